"""Executor of a worker: runs a row, the ordered list of the worker's actions in a schedule, on the worker's stages.

The executor depends neither on the kind of schedule nor on Ray: rows are created, checked and simulated elsewhere.
Exceptions name the action that failed.

    row of the worker    0F0 3F0 3B0 0B0 ... 3REDUCE_GRAD 0REDUCE_GRAD | 0REDUCE_NORM 3REDUCE_NORM 0STEP 3STEP
                         StageRunner 0, StageRunner 3                      | Reduction: once for all stages

worker_progress.py has the progress of workers after a failure.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import torch

from raypipe.data.stream_source import StreamSource
from raypipe.engine.bad_samples import columns_read, describe_nonfinite
from raypipe.engine.bound_row import BoundAction, Run, bound_parts
from raypipe.engine.codec import Codec
from raypipe.engine.device.device import CPU, Device, Mark, TransferKind, held_bytes, ran_out
from raypipe.engine.io.checkpoint import FreshOptions, load_stage, take_snapshot
from raypipe.engine.io.checkpoint.snapshot import ShardWriter, read_mark
from raypipe.engine.messages.channel import Channel, Message, Payload
from raypipe.engine.messages.frame import wait_for_copies
from raypipe.engine.messages.transfer import DeviceTransfer
from raypipe.engine.optim.norms import to_report_norms
from raypipe.engine.optim.state import StageState
from raypipe.engine.optim.update import Update
from raypipe.engine.reduction import Reduction, all_reduces
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.stage.placement import channels_by_stage
from raypipe.engine.stage_runner import StageRunner, Totals, Values
from raypipe.engine.worker_progress import WorkerProgress
from raypipe.errors import LESS_MEMORY, LinkError, RanOut, RaypipeError, StageError
from raypipe.ir.report import Reports, StepReport
from raypipe.ir.schedule import COMPUTE, Action, Op, Row
from raypipe.ir.segment import Order, Segment
from raypipe.ir.timeline import Span
from raypipe.ir.units import human_bytes
from raypipe.user_lines import as_sentence


class Executor:
    """Executor of one worker's actions, for one segment (consecutive mini-batches to train or to evaluate) per call.

    Args:
        run: settings and data of the run.
        setup: stage programs, codecs and weight policy of the current plan.
        worker: number of this worker.
        states: states of this worker's stages, in increasing order of the stages.
        channels: channels to all workers with which this worker exchanges messages, by number of the worker; see
            ``Placement.neighbours``.
        device: device that holds the states and computes.
    """

    def __init__(
        self,
        run: RunSetup,
        setup: GenerationSetup,
        worker: int,
        states: Sequence[StageState],
        channels: Mapping[int, Channel],
        device: Device = CPU,
    ) -> None:
        self._run, programs, settings = run, setup.programs, run.settings
        placement = self.placement = setup.placement(worker)
        self._codecs, self.channels, self.settings = setup.codecs, channels, settings
        self.device, self.transfer = device, DeviceTransfer(device)
        neighbours = channels_by_stage(programs, placement, channels)
        for channel in channels.values() if device.codes else ():
            if not channel.on_device:
                channel.leave_coded()
        self.works = {
            stage: StageRunner(run, setup, stage, worker, state, neighbours[stage], channels, self.transfer)
            for stage, state in zip(placement.stages, states, strict=True)
        }
        self._updates = {
            stage: Update(
                work.state,
                work.sink,
                work.ring,
                settings,
                setup.weights,
                self.transfer,
                partial(self._nonfinite_data, "train"),
            )
            for stage, work in self.works.items()
        }
        self._columns = {mode: columns_read(programs, mode) for mode in run.sources}
        sinks = {stage: work.sink for stage, work in self.works.items()}
        self._exchanges = all_reduces(placement, self.works, channels, device, settings)
        self._reduction = Reduction(programs, placement, sinks, self._updates, self._exchanges, self._send, self._recv)
        self.use_codecs(((), ()))
        self._totals: Totals | None = None
        self._values: Values = list  # reads ``_totals``
        self._norms: tuple[torch.Tensor, torch.Tensor] | None = None
        self._stage_norms = False  # every stage clips by its own norm
        self._training, self._skipped = True, False
        self._steps: int | None = None  # number of finished steps
        self._ready = False  # this worker has all gradients of the step in progress
        self._stepped = 0  # stages that have finished the step in progress
        self._begun_s: float | None = None  # begin of the step in progress
        self._last: Totals | None = None  # totals of the last finished step
        # True if steps of this segment overlap; and if steps of this segment or of the one before do.
        self._asynchronous = self._overlapping = False
        self._action: Action | None = None
        self._bound: tuple[Row, tuple[int, int], Sequence[Sequence[BoundAction]]] = (), (0, 0), ()
        self._segment: Segment

    @property
    def progress(self) -> WorkerProgress:
        """Progress of this worker. Must be read only while ``run`` is not active."""
        with suppress(StageError):  # a step that was refused has changed something, see Update
            for update in self._updates.values():
                update.settle()
        with self.device.prepare_thread():
            norm, loss = (None, None) if self._last is None else self.transfer.to_host(self._last, TransferKind.NORMS)
        totals = None if norm is None or loss is None else (norm, loss)
        changed = self._stepped > 0 or any(update.changed for update in self._updates.values())
        return WorkerProgress(self._steps, self._ready, totals, self._overlapping or changed, changed)

    @property
    def states(self) -> list[StageState]:
        """States of this worker's stages, in increasing order of the stages."""
        return [work.state for work in self.works.values()]

    @property
    def doing(self) -> Action | None:
        """Action in progress, a new object for each action; None between mini-batches and after a failure."""
        return self._action

    @property
    def waits(self) -> bool:
        """True while a forward waits for the data of a micro-batch, or for the outputs of other replicas."""
        return any(work.feed.reading or work.whole.waiting for work in self.works.values())

    def abort(self, reason: str) -> None:
        """Abort all channels, in any thread: every wait for a message ends. The executor is unusable afterwards."""
        for channel in self.channels.values():
            channel.abort(reason)

    def leave(self, reason: str) -> None:
        """Send the queued messages of every channel, and then abort the channel with ``reason``."""
        for channel in self.channels.values():
            channel.leave(reason)

    def let_go(self) -> None:
        """Free the memory of the stages at once by breaking reference cycles; the executor is unusable afterwards."""
        self.works.clear()
        self._updates.clear()
        self._exchanges.clear()
        self._reduction = None  # type: ignore[assignment]
        self._bound = (), (0, 0), ()

    def undo(self) -> None:
        """Undo the step in progress, so that another executor of these states can repeat the step.

        Buffers are restored only with several lanes (partial sums of gradients): with one lane no copies were kept.
        """
        for work in self.works.values():
            work.drop()
            with self.device.prepare_thread():
                if self._begun_s is not None:
                    work.buffers.bring_back()
            for parameter in work.state.parameters.values():
                parameter.grad = None
        self._begun_s, self._ready = None, False

    def finish(self, norm: torch.Tensor, loss: torch.Tensor) -> list[list[StepReport]]:
        """Complete the step in progress with the gradient norm and loss of a worker that has made this step.

        Returns the reports in the form of ``run``.
        """
        assert self._ready, "a step needs all its gradients"
        assert self._steps is not None
        step = self._steps
        with self.device.prepare_thread():
            total, total_loss = self.transfer.to_device((norm, loss), TransferKind.NORMS)
            self._totals, self._values = (total, total_loss), lambda: [float(norm), float(loss)]
            for update in self._updates.values():
                self._skipped = update.step(self._segment, step, total, total_loss, self._values, alone=False)
            times = self._begun_s or 0.0, time.monotonic()
            self._end_step(step)
            return [[report] for report in self._reports(Order(self._segment), step, (), lambda: times)()]

    def _end_step(self, step: int) -> None:
        self._steps, self._ready, self._begun_s, self._last = step + 1, False, None, self._totals
        self._stepped = 0
        for update in self._updates.values():
            update.changed = False

    def restore(self, folder: str, fresh: FreshOptions) -> None:
        """Load a checkpoint, which may have been written with another number of stages.

        Args:
            folder: name of the checkpoint in the run's folder.
            fresh: optimizer options that keep their current value.

        Raises:
            CheckpointError: another model or another optimizer wrote the checkpoint, or a file is missing.
        """
        assert self._run.place is not None, "a run that saves nothing cannot be restored"
        checkpoint = self._run.place / folder
        mark = read_mark(checkpoint) if isinstance(self._run.sources.get("train"), StreamSource) else None
        for work in self.works.values():
            load_stage(checkpoint, work.program, work.state, self._run.persistent, fresh, self.transfer)
            work.ring.fill()
            work.feed.learn(mark)

    def shard_writers(self) -> list[ShardWriter]:
        """Create one checkpoint writer per stage; the run must have a folder.

        Replicas after the first have writers only if optimizer state is sharded, for the slices that they hold.
        """
        assert self._run.place is not None, "a run without a folder saves nothing"
        persistent, transfer = self._run.persistent, DeviceTransfer(self.device)
        return [
            ShardWriter(
                self._run.place,
                partial(take_snapshot, work.program, work.state, persistent, transfer, work.feed.mark),
            )
            for work in self.works.values()
            if self.placement.leads or work.state.slices is not None
        ]

    def prepare(self, segment: Segment, *, training: bool) -> None:
        """Read the data of a later segment in advance; callable from another thread while ``run`` is active."""
        if not (training or self.placement.leads):
            return
        for work in self.works.values():
            work.feed.prepare(segment, training=training)

    def use_codecs(self, by_hop: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
        """Set the codecs of all following messages: (names for forward messages, names for backward messages).

        Each tuple has one name per link between neighbouring stages; two empty tuples set the configured codecs.
        """
        forward, backward = by_hop
        assert len(self.works) == 1 or not (forward or backward), "a link that several hops share has one codec"
        for stage, work in self.works.items():
            # Forward messages cross the link after this stage, backward ones the link before it.
            ahead = Codec(forward[stage]) if forward and not work.last else self._codecs.forward
            back = Codec(backward[stage - 1]) if backward and stage else self._codecs.backward
            work.use_codecs(ahead, back)
            for channel in self.channels.values():
                channel.use(ahead, back)

    def reports_late(self, order: Order) -> bool:
        """Return True if the reports of ``order`` should be taken after the next order, which keeps the device busy.

        Where the state is saved they are taken at once, because they may raise the error of a refused step.
        """
        at_once = order.save_to or order.keep_copy or order.keep_spans or not order.training
        return not (self.device.immediate or at_once)

    def run(self, order: Order, row: Row, *, alone: bool = False) -> Reports:
        """Run the segment of ``order``; the caller must make the checkpoint and in-memory copy that ``order`` requests.

        Args:
            row: this worker's actions; micro-batches are counted from 0 within the segment.
            alone: True if every stage clips by its own norm, without waiting for others (``Wiring.alone``).

        Returns:
            Function that returns the reports. It has waited already, and raises nothing, unless ``reports_late``.

        Raises:
            StageError: the user's code raised, or the loss is not a finite scalar; names stage and action.
            LinkError: a message did not come; names the link, the action and the micro-batch.
        """
        segment = order.segment
        if order.training:
            self.use_codecs(order.codecs)
        self._begin(segment, training=order.training, alone=alone)
        begun: list[Callable[[], list[StepReport]]] = []

        def reports() -> list[list[StepReport]]:
            with self._named_failures():
                return [list(of_stage) for of_stage in zip(*(of_minibatch() for of_minibatch in begun), strict=True)]

        try:
            with self._named_failures(), self.device.prepare_thread(), torch.set_grad_enabled(order.training):
                for minibatch, part in enumerate(self._parts(row, segment)):
                    begun.append(self._run_minibatch(order, part, minibatch))
                if not self.reports_late(order):
                    found = reports()
                    return lambda: found
        finally:
            self._action = None  # after a failure the worker must not seem to hang in this action
            for exchange in self._exchanges.values():
                exchange.abandon()
        return reports

    @contextmanager
    def _named_failures(self) -> Iterator[None]:
        """Convert what is raised inside to an error that names the failed action."""
        try:
            yield
        except (RaypipeError, KeyboardInterrupt):
            raise
        except BaseException as error:  # the user's code may raise one that is no Exception
            raise self._failure(error) from error

    def _begin(self, segment: Segment, *, training: bool, alone: bool) -> None:
        """Prepare this worker's stages for the actions of a segment; for ``alone`` see ``run``."""
        self._segment, self._training, self._stage_norms = segment, training, alone
        synchronous = segment.update_interval is None
        if training:  # the step before may not have ended on all stages
            before, self._asynchronous = self._asynchronous, alone or not synchronous
            self._overlapping = self._asynchronous or before
        whole = self.settings.max_grad_norm is not None or self.settings.on_nonfinite == "skip"
        whole |= any(work.program.precision.scaled for work in self.works.values())
        assert not (alone and synchronous and whole), "clipping and skipping need the whole norm"
        for work in self.works.values():
            work.begin_segment(segment, training=training)

    def _failure(self, error: BaseException) -> StageError:
        """Convert an exception of the user's code or an out-of-memory error to a StageError; names stage and action."""
        name, where = f"Stage {self.placement.stages[0]}", ""
        if self._action is not None:
            name, where = f"Stage {self._action.stage}", f" in {self._action.label}"
        message = f"{type(error).__name__}: {error}"
        if not ran_out(error):
            notes = getattr(error, "__notes__", ())
            return StageError(" ".join([f"{name} failed{where}: {as_sentence(message) if notes else message}", *notes]))
        held = held_bytes(error)
        for work in self.works.values():  # a rollback takes memory too
            work.drop()
        failure = StageError(
            f"{name} ran out of memory{where}, with {human_bytes(held)} in use: {message} {LESS_MEMORY}"
        )
        failure.ran_out = RanOut(self.placement.worker, held)
        return failure

    def _nonfinite_data(self, mode: str, segment: Segment, step: int) -> str:
        """Describe the first NaN or infinite value in a step's data; "" if all are finite or the data is unreadable."""
        with suppress(RaypipeError):
            return describe_nonfinite(self._run.sources[mode], segment, step, self._columns[mode])
        return ""

    def _parts(self, row: Row, segment: Segment) -> Sequence[Sequence[BoundAction]]:
        """Return the actions of each mini-batch, bound; those of the row that was run last are kept."""
        counts = len(segment.microbatch_samples), segment.num_minibatches if self._training else 1
        if self._bound[:2] != (row, counts):
            self._bound = row, counts, bound_parts(row, *counts, len(self.works), self._run_of)
        return self._bound[2]

    def _run_of(self, action: Action) -> Run:
        match action.op:
            case Op.REDUCE_GRAD:
                return self._reduce_grad
            case Op.REDUCE_NORM:
                return self._reduce_norm
            case Op.STEP:
                return self._step
        return self.works[action.stage].run_of(action.op)

    def _run_minibatch(
        self, order: Order, row: Sequence[BoundAction], minibatch: int
    ) -> Callable[[], list[StepReport]]:
        segment = order.segment
        first, step = segment.first_microbatch, segment.first_step + minibatch
        if self._training:
            self._steps, self._ready, self._begun_s = step, False, time.monotonic()
        for work in self.works.values():
            work.begin_minibatch(minibatch, measure=order.measure)
            if self._training and self.placement.lanes > 1:
                work.buffers.keep()
        self._totals = self._norms = None
        self._skipped = False
        mark, shared = self.device.mark, not self.device.immediate
        marks = [mark()]
        done = []
        exchanges = self._training and segment.update_interval is None
        for local, run, closes, sends in row:
            action = self._action = local.shifted(first)
            if exchanges and closes is not None and action.microbatch != self.works[action.stage].split_microbatch:
                self._exchanges[action.stage].begin(closes + first)
            run(action, marks[-1])
            done.append(action)
            marks.append(marks[-1] if sends and shared else mark())
        self._action = None
        if self._training:
            self._end_step(step)
        return self._reports(order, step, done, partial(self.device.seconds, marks))

    def _reports(
        self, order: Order, step: int, done: Sequence[Action], times_of: Callable[[], Sequence[float]]
    ) -> Callable[[], list[StepReport]]:
        """Begin the reports of this worker's stages on one mini-batch, in which the actions ``done`` were run.

        ``times_of`` returns the begin of the first action, then the end of each action, in seconds of
        ``time.monotonic``. The function that is returned may be called after the next mini-batch has begun.
        """
        me, works, transfer, segment = self.placement.worker, self.works, self.transfer, self._segment
        lrs = {stage: update.lr for stage, update in self._updates.items()}
        checks, skipped = [update.check for update in self._updates.values()], self._skipped
        counters = {stage: work.counters for stage, work in works.items()}
        norms: Payload = ()
        # Norms of asynchronous stages are of different weight versions: they have no common total.
        if self._norms is not None and segment.update_interval is None:
            norms = transfer.copying(self._norms, TransferKind.NORMS)
        begun = {}
        for stage, work in works.items():
            known = self._totals is not None
            values = self._values if known else transfer.reading((None, work.loss()), TransferKind.LOSS)
            begun[stage] = work.report(order, step, values, alone=self._stage_norms)

        def finished() -> list[StepReport]:
            for check in checks:
                check()
            times = times_of()
            for action, begin_s, end_s in zip(done, times, times[1:], strict=False):
                if action.op in COMPUTE:
                    counters[action.stage].busy_s += end_s - begin_s
            spans: list[Span] = []
            if order.keep_spans or order.measure:
                spans = [Span(me, a, s, e) for a, s, e in zip(done, times, times[1:], strict=False)]
            wait_for_copies(norms)
            of_parameters = to_report_norms(*norms) if norms else None  # type: ignore[arg-type]
            reports = []
            for stage, report_of in begun.items():
                own = spans if len(begun) == 1 else [span for span in spans if span.action.stage == stage]
                report = report_of((times[0], times[-1]), own)
                finite = all(math.isfinite(loss) for loss, _ in report.averages)
                remark = "" if finite else self._nonfinite_data("eval", segment, step)
                reports.append(replace(report, norms=of_parameters, skipped=skipped, lr=lrs[stage], remark=remark))
            return reports

        return finished

    def _reduce_grad(self, action: Action, since: Mark) -> None:
        self._updates[action.stage].of(self._segment, action.microbatch)
        self._reduction.reduce_grad(action.stage, action.microbatch)

    def _reduce_norm(self, action: Action, since: Mark) -> None:
        stage, _, microbatch = action
        self._ready = True
        losses = [term for work in self.works.values() for term in work.loss_terms]
        if self._stage_norms:
            loss = self._reduction.loss(microbatch, losses)
            own = self._updates[stage].own_norm()
            norm, self._norms = (None, None) if own is None else own
            totals: Totals = norm, loss
        else:
            synchronous = self._segment.update_interval is None
            totals = self._reduction.norm(stage, microbatch, losses, with_frozen=synchronous)
        if totals is not self._totals:  # the stages of a worker get the same
            self._totals, self._values = totals, self.transfer.reading(totals, TransferKind.NORMS)

    def _step(self, action: Action, since: Mark) -> None:
        stage, _, microbatch = action
        assert self._totals is not None
        step = self._segment.locate(microbatch)[0]
        gather = partial(self._exchanges[stage].gather, microbatch)
        self._skipped = self._updates[stage].step(
            self._segment, step, *self._totals, self._values, alone=self._stage_norms, gather=gather
        )
        self._stepped += 1

    def _send(self, worker: int, action: Action, tensors: Sequence[torch.Tensor | None]) -> None:
        nbytes = sum(x.nbytes for x in tensors if x is not None)
        assert self._action is not None
        work = self.works[self._action.stage]
        if worker in self.placement.replicas:
            work.counters.exchanged_bytes += nbytes
        else:
            work.counters.sent(nbytes, nbytes, ahead=worker > self.placement.worker)
        # Nothing changes a sum before the peer has it: the next backward here follows the peer's step, which needs it.
        self.channels[worker].send(action, self.transfer.copying(tensors, TransferKind.REDUCED), 0)

    def _recv(self, worker: int, action: Action) -> Message:
        assert self._action is not None
        begin_s = time.monotonic()
        try:
            message = self.channels[worker].recv(action, self.settings.timeout_s)
        except LinkError as error:
            raise type(error)(f"Stage {self._action.stage} in {self._action.label}: {error}") from error
        finally:
            self.works[self._action.stage].waited(time.monotonic() - begin_s)
        return self.transfer.message(message, TransferKind.REDUCED)
