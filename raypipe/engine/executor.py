"""The dumb machine: it carries out a row of actions on the stages of one worker and asks no questions.

It knows neither schedules nor Ray. What a row means was decided, checked and simulated elsewhere;
here every action is a few lines, and whatever goes wrong is raised with the action's name.

    row of the worker    0F0 3F0 3B0 0B0 ... 3REDUCE_GRAD 0REDUCE_GRAD | 0REDUCE_NORM 3REDUCE_NORM 0STEP 3STEP
                         StageWork 0, StageWork 3                      | Reduction: once for all stages
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from raypipe.engine.beside import channels_beside
from raypipe.engine.codec import Codec
from raypipe.engine.crossing import Crossing
from raypipe.engine.culprits import columns_read, of_numbers
from raypipe.engine.device import CPU, Crosses, Device
from raypipe.engine.exchange import Exchange, last_backwards
from raypipe.engine.message_log import LoggedStep, MessageLog
from raypipe.engine.messages.channel import Channel, Message
from raypipe.engine.norms import norms_told
from raypipe.engine.out_of_memory import held_bytes, ran_out
from raypipe.engine.reached import Reached, Scalar
from raypipe.engine.reduction import Reduction
from raypipe.engine.row_parts import as_many, split_row
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.stage_work import StageWork
from raypipe.engine.state import StageState
from raypipe.engine.tally import Totals
from raypipe.engine.update import Update
from raypipe.engine.user_lines import as_sentence
from raypipe.errors import LESS_MEMORY, LinkError, RanOut, RaypipeError, StageError
from raypipe.ir.plan import human_bytes
from raypipe.ir.report import StepReport
from raypipe.ir.schedule import COMPUTE, Action, Op, Row
from raypipe.ir.segment import Segment
from raypipe.ir.timeline import Span

__all__ = ["Executor"]


class Executor:
    """Runs segments on one worker.

    Args:
        worker: this one.
        states: of this worker's stages, in their order.
        channels: to every worker of ``placement.neighbours(programs)``.
        device: that computes; the states lie there.
        log: of what is sent; a step that was begun can then be begun anew. None keeps nothing.
    """

    def __init__(
        self,
        run: RunSetup,
        setup: GenerationSetup,
        worker: int,
        states: Sequence[StageState],
        channels: Mapping[int, Channel],
        device: Device = CPU,
        log: MessageLog | None = None,
    ) -> None:
        programs, settings = setup.programs, run.settings
        placement = self.placement = setup.placement(worker)
        self._codecs = setup.codecs
        self.channels, self.settings = channels, settings
        self.device, self.crossing, self._log = device, Crossing(device), log
        beside = channels_beside(programs, placement, channels)
        for channel in channels.values() if device.codes else ():
            if not channel.on_device:
                channel.leave_coded()
        self.works = {
            stage: StageWork(run, setup, stage, worker, state, beside[stage], self.crossing)
            for stage, state in zip(placement.stages, states, strict=True)
        }
        self._updates = {
            stage: Update(
                work.program, work.state, work.sink, work.ring, settings, setup.weights, self.crossing,
                setup.lanes, self._of_numbers,
            )
            for stage, work in self.works.items()
        }  # fmt: skip
        self._sources = run.sources
        self._columns = {mode: columns_read(programs, mode) for mode in run.sources}
        sinks = {stage: work.sink for stage, work in self.works.items()}
        self._exchange = Exchange(placement, self.works, channels, device, settings)
        self._reduction = Reduction(programs, placement, sinks, self._updates, self._exchange, self._send, self._recv)
        self.use_codecs(((), ()))
        self._totals: Totals | None = None
        self._norms: tuple[torch.Tensor, torch.Tensor] | None = None
        self._told: tuple[torch.Tensor, torch.Tensor] | None = None  # totals of the step that is replayed
        self._alone = self._skipped = False
        self._training, self._ready, self._flows, self._loose = True, False, False, False
        self._made: int | None = None  # steps
        self._stepped = 0  # stages that have made the one in progress
        self._begun_s: float | None = None  # since then another one is under way
        self._last: Totals | None = None  # totals of the last one made

    @property
    def reached(self) -> Reached:
        """How far it has come; where it does not run anything."""
        with self.device.prepare_thread():
            norm, loss = (None, None) if self._last is None else self.crossing.to_host(self._last, Crosses.NORMS)
        totals = None if norm is None or loss is None else (Scalar.of(norm), Scalar.of(loss))
        return Reached(self._made, self._ready, totals, self._flows or self._stepped > 0)

    @property
    def states(self) -> list[StageState]:
        """Of this worker's stages, in their order."""
        return [work.state for work in self.works.values()]

    @property
    def doing(self) -> Action | None:
        """The action in progress, an object of its own each time; None between mini-batches and after a failure."""
        return self._action

    @property
    def reads(self) -> bool:
        """Whether it waits for the data of a micro-batch."""
        return any(work.feed.reading for work in self.works.values())

    def abort(self, reason: str) -> None:
        """Release every wait from another thread; the executor is unusable afterwards."""
        for channel in self.channels.values():
            channel.abort(reason)

    def leave(self, reason: str) -> None:
        """Tell the neighbours that nothing more will come; what was sent before still reaches them."""
        for channel in self.channels.values():
            channel.leave(reason)

    def let_go(self) -> None:
        """Nothing is run here any more: what is held goes at once, though parts of it refer to each other."""
        self.works.clear()
        self._updates.clear()
        self._exchange.let_go()
        self._reduction = None  # type: ignore[assignment]

    def undo(self) -> None:
        """A step of a run in lanes that was begun will be begun anew, by another executor of these states."""
        for work in self.works.values():
            work.drop()
            with self.device.prepare_thread():
                if self._begun_s is not None:
                    work.buffers.bring_back()
            for parameter in work.state.parameters.values():
                parameter.grad = None
        self._begun_s, self._ready = None, False

    def finish(self, norm: Scalar, loss: Scalar) -> list[list[StepReport]]:
        """Make the step that this worker is ready for, as others have, with what they know of it; see ``run``."""
        assert self._ready, "a step needs all its gradients"
        assert self._made is not None
        step, place = self._made, self.device.place
        self._totals = totals = norm.tensor(place), loss.tensor(place)
        with self.device.prepare_thread():
            for update in self._updates.values():
                self._skipped = update.step(step, *totals, alone=False)
        begin_s, end_s = self._begun_s or 0.0, time.monotonic()
        self._has_made(step)
        found, ways = [], {"alone": False, "keep_spans": False, "measure": False}
        for stage, work in self.works.items():
            report = work.report(step, (begin_s, end_s), totals, (), **ways)
            found.append([replace(report, skipped=self._skipped, lr=self._updates[stage].lr)])
        return found

    def replay(self, step: LoggedStep, row: Row) -> list[list[StepReport]]:
        """Do a step again that the others have made, with what they know of it; see ``run``."""
        norm, loss = step.totals
        self._told = norm.tensor(self.device.place), loss.tensor(self.device.place)
        try:
            self.use_codecs(step.order.codecs)
            return self.run(step.order.segment, row)
        finally:
            self._told = None

    def _has_made(self, step: int) -> None:
        if self._log is not None and self._totals is not None:
            self._log.made(step, (None, None) if self._alone else self._totals)
        self._made, self._ready, self._begun_s, self._last = step + 1, False, None, self._totals
        self._stepped = 0

    def prepare(self, segment: Segment, *, training: bool) -> None:
        """Read the data of a segment that comes later, from another thread."""
        if not (training or self.placement.leads):
            return
        for work in self.works.values():
            work.feed.prepare(segment, training=training)

    def use_codecs(self, by_hop: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
        """Send in these codecs from now on, forward and backward; an empty one stands for what was configured."""
        forward, backward = by_hop
        assert len(self.works) == 1 or not (forward or backward), "a link that several hops share has one codec"
        for stage, work in self.works.items():
            # What goes ahead crosses the hop behind this stage, what goes back the one before it.
            ahead = Codec(forward[stage]) if forward and not work.last else self._codecs.forward
            back = Codec(backward[stage - 1]) if backward and stage else self._codecs.backward
            work.use_codecs(ahead, back)
            for channel in self.channels.values():
                channel.use(ahead, back)

    def run(
        self,
        segment: Segment,
        row: Row,
        *,
        training: bool = True,
        alone: bool = False,
        keep_spans: bool = False,
        measure: bool = False,
    ) -> list[list[StepReport]]:
        """Carry out one segment; returns by stage one report per mini-batch.

        Args:
            row: this worker's actions with micro-batches counted from 0 within the segment.
            training: False runs the evaluation function without gradients.
            alone: every stage takes its own norm and waits for nobody's (``Wiring.alone``).
            measure: report how long actions and messages took.

        Raises:
            StageError: the user's code raised, or the loss is not a finite scalar; names stage and action.
            LinkError: a message did not come; names the link, the action and the micro-batch.
        """
        self._begin(segment, training=training, alone=alone)
        per_minibatch = len(segment.microbatch_samples)
        reports: list[list[StepReport]] = [[] for _ in self.works]
        try:
            with self.device.prepare_thread(), torch.set_grad_enabled(training):
                parts = split_row(row, per_minibatch, len(self.works))
                for minibatch, part in enumerate(as_many(parts, segment.num_minibatches if training else 1)):
                    found = self._run_minibatch(part, minibatch, keep_spans=keep_spans, measure=measure)
                    for of_stage, report in zip(reports, found, strict=True):
                        of_stage.append(report)
        except (RaypipeError, KeyboardInterrupt):
            raise
        except BaseException as error:  # what is no Exception is the user's too
            raise self._failure(error) from error
        finally:
            self._action = None  # a worker whose action failed does nothing: it is not one that hangs in it
            self._exchange.abandon()
        return reports

    def _begin(self, segment: Segment, *, training: bool, alone: bool) -> None:
        """What comes belongs to this segment."""
        self._segment, self._training, self._alone = segment, training, alone
        synchronous = segment.update_interval is None
        if training:  # the step before may not have ended on all stages
            loose = alone or not synchronous
            self._flows, self._loose = loose or self._loose, loose
        whole = self.settings.max_grad_norm is not None or self.settings.on_nonfinite == "skip"
        whole |= any(work.program.precision.scaled for work in self.works.values())
        assert not (alone and synchronous and whole), "clipping and skipping need the whole norm"
        for work in self.works.values():
            work.begin_segment(segment, training=training)

    def _failure(self, error: BaseException) -> StageError:
        """That the user's code raised, or had no memory left."""
        name, where = f"Stage {self.placement.stages[0]}", ""
        if self._action is not None:
            name, where = f"Stage {self._action.stage}", f" in {self._action.label}"
        said = f"{type(error).__name__}: {error}"
        if not ran_out(error):
            notes = getattr(error, "__notes__", ())
            return StageError(" ".join([f"{name} failed{where}: {as_sentence(said) if notes else said}", *notes]))
        held = held_bytes(error)
        for work in self.works.values():  # going back takes memory too
            work.drop()
        found = StageError(f"{name} ran out of memory{where}, with {human_bytes(held)} in use: {said} {LESS_MEMORY}")
        found.ran_out = RanOut(self.placement.worker, held)
        return found

    def _of_numbers(self, step: int) -> str:
        """What the data has to do with a loss that is not finite; every stage says the same, whichever is heard."""
        mode = "train" if self._training else "eval"
        with suppress(RaypipeError):
            return of_numbers(self._sources[mode], self._segment, step, self._columns[mode])
        return ""

    def _run_minibatch(
        self, row: Sequence[Action], minibatch: int, *, keep_spans: bool, measure: bool
    ) -> list[StepReport]:
        segment = self._segment
        first, step = segment.first_microbatch, segment.first_step + minibatch
        if self._training:
            self._made, self._ready, self._begun_s = step, False, time.monotonic()
        for work in self.works.values():
            work.begin_minibatch(minibatch, measure=measure)
            if self._training and (self.placement.lanes > 1 or (self._log is not None and self._log.keeps)):
                work.buffers.keep()
        self._totals = self._norms = None
        self._skipped = False
        mark = self.device.mark
        marks = [mark()]
        done = []
        closing = last_backwards(row) if self._training and segment.update_interval is None else {}
        for place, local in enumerate(row):
            action = self._action = local.shifted(first)
            if place in closing:
                self._exchange.begin(action.stage, action.microbatch, closing[place] + first)
            self._do(action)
            done.append(action)
            marks.append(mark())
        self._action = None
        if self._training:
            self._has_made(step)
        return self._reports(step, done, self.device.seconds(marks), keep_spans=keep_spans, measure=measure)

    def _reports(
        self, step: int, done: Sequence[Action], times: Sequence[float], *, keep_spans: bool, measure: bool
    ) -> list[StepReport]:
        """Of all stages, on the mini-batch that ends.

        Args:
            times: when the first action began, and when each of them ended.
        """
        me, works = self.placement.worker, self.works
        for action, begin_s, end_s in zip(done, times, times[1:], strict=False):
            if action.op in COMPUTE:
                works[action.stage].tally.busy_s += end_s - begin_s
        spans: list[Span] = []
        if keep_spans or measure:
            spans = [Span(me, a, s, e) for a, s, e in zip(done, times, times[1:], strict=False)]
        norms = None
        # Asynchronous stages' norms are of different weights: nobody makes one of them.
        if self._norms is not None and self._segment.update_interval is None:
            places, values = self.crossing.to_host(self._norms, Crosses.NORMS)
            assert places is not None
            assert values is not None
            norms = norms_told(places, values)
        found = []
        for stage, work in works.items():
            totals = self._totals if self._totals is not None else (None, work.loss())
            own = spans if len(works) == 1 else [span for span in spans if span.action.stage == stage]
            ways = {"alone": self._alone, "keep_spans": keep_spans, "measure": measure}
            report = work.report(step, (times[0], times[-1]), totals, own, **ways)
            remark = "" if all(math.isfinite(loss) for loss, _ in report.averages) else self._of_numbers(step)
            lr = self._updates[stage].lr
            found.append(replace(report, norms=norms, skipped=self._skipped, lr=lr, remark=remark))
        return found

    _action: Action | None = None
    _segment: Segment

    def _do(self, action: Action) -> None:
        stage, op, microbatch = action
        match op:
            case Op.REDUCE_GRAD:
                self._updates[stage].of(self._segment, microbatch)
                self._reduction.reduce_grad(stage, microbatch)
            case Op.REDUCE_NORM:
                self._ready = True
                losses = [term for work in self.works.values() for term in work.loss_terms()]
                if self._alone:
                    loss = self._reduction.loss(microbatch, losses)
                    own = self._updates[stage].own_norm()
                    norm, self._norms = (None, None) if own is None else own
                    self._totals = norm, loss
                else:
                    synchronous = self._segment.update_interval is None
                    self._totals = self._told or self._reduction.norm(
                        stage, microbatch, losses, with_frozen=synchronous
                    )
            case Op.STEP:
                assert self._totals is not None
                step = self._segment.locate(microbatch)[0]
                gather = partial(self._exchange.gather, stage, microbatch)
                self._skipped = self._updates[stage].step(step, *self._totals, alone=self._alone, gather=gather)
                self._stepped += 1
            case _:
                self.works[stage].do(action)

    def _send(self, worker: int, action: Action, tensors: Sequence[torch.Tensor | None]) -> None:
        nbytes = sum(x.nbytes for x in tensors if x is not None)
        assert self._action is not None
        work = self.works[self._action.stage]
        if worker in self.placement.replicas:
            work.tally.exchanged_bytes += nbytes
        else:
            work.tally.sent(nbytes, nbytes, ahead=worker > self.placement.worker)
        self.channels[worker].send(action, self.crossing.to_host(tensors, Crosses.REDUCED), 0)

    def _recv(self, worker: int, action: Action) -> Message:
        assert self._action is not None
        begin_s = time.monotonic()
        try:
            message = self.channels[worker].recv(action, self.settings.timeout_s)
        except LinkError as error:
            raise type(error)(f"Stage {self._action.stage} in {self._action.label}: {error}") from error
        finally:
            self.works[self._action.stage].waited(time.monotonic() - begin_s)
        return self.crossing.message(message, Crosses.REDUCED)
