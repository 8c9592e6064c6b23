"""The dumb machine: it carries out a row of actions on one stage and asks no questions.

It knows neither schedules nor Ray. What a row means was decided, checked and simulated elsewhere;
here every action is a few lines, and whatever goes wrong is raised with the action's name.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import torch

from raypipe.engine.channel import Channel, Message
from raypipe.engine.codec import Codec, Codecs
from raypipe.engine.codec.choice import message_bytes
from raypipe.engine.data import Source
from raypipe.engine.feed import Feed, MicrobatchData
from raypipe.engine.gradients import GradientSink
from raypipe.engine.randomness import RandomKey
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import Settings, StageState
from raypipe.engine.under_way import UnderWay
from raypipe.engine.update import Update
from raypipe.engine.weight_ring import WeightRing
from raypipe.errors import LinkError, RaypipeError, StageError
from raypipe.ir.links import MessageTimes, stage_sample
from raypipe.ir.report import StepReport
from raypipe.ir.schedule import COMPUTE, Action, Op, Row
from raypipe.ir.segment import Segment
from raypipe.ir.timeline import Span

__all__ = ["Executor"]


class Executor:
    """Runs segments on one stage.

    Args:
        programs: of all stages; this one is ``programs[stage]``.
        channels: to every stage of ``neighbours(programs, stage)``.
        sources: "train" and, for evaluation, "eval".
    """

    def __init__(
        self,
        programs: Sequence[StageProgram],
        stage: int,
        state: StageState,
        channels: Mapping[int, Channel],
        sources: Mapping[str, Source],
        settings: Settings,
    ) -> None:
        self.programs = programs
        self.program = programs[stage]
        self.stage = stage
        self.last = stage == len(programs) - 1
        self.state = state
        self.channels = channels
        self.settings = settings
        self._codecs = settings.codecs
        self.use_codecs(((), ()))
        self.sink = GradientSink(self.program, state.parameters)
        weights = settings.weights
        self.ring = WeightRing(
            self.program, state.parameters, weights.rule, weights.capacity(stage), weights.ahead, self.sink.watch
        )
        self._under_way = UnderWay(self.sink, self.ring, answers=stage > self.program.first_trainable)
        self._modes = self.program.modes
        self.feed = Feed(
            sources,
            {mode: function.columns for mode, function in self._modes.items()},
            self.program.targets
            or (("labels",) if self.last and settings.loss_reduction not in ("mean", "sum") else ()),
            weighs=self.last,
            reduction=settings.loss_reduction,
        )
        self._update = Update(programs, stage, state, self.sink, self.ring, self._send, self._recv, settings)
        self._buffers = {
            mode: [state.buffers[name] for name in function.buffers] for mode, function in self._modes.items()
        }
        self._losses: list[tuple[torch.Tensor, float]] = []
        self._seed_tensors: dict[tuple[float, torch.dtype], torch.Tensor] = {}
        self._arrived: dict[int, Message] = {}
        self._totals: tuple[torch.Tensor | None, torch.Tensor | None] | None = None
        self._training, self._alone = True, False
        self._wait_s = 0.0
        self._sent, self._plain = [0, 0], [0, 0]
        self._peak = 0

    def abort(self, reason: str) -> None:
        """Release every wait from another thread; the executor is unusable afterwards."""
        for channel in self.channels.values():
            channel.abort(reason)

    def leave(self, reason: str) -> None:
        """Tell the neighbours that nothing more will come; what was sent before still reaches them."""
        for channel in self.channels.values():
            channel.leave(reason)

    def use_codecs(self, by_hop: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
        """Send in these codecs from now on, forward and backward; an empty one stands for what was configured."""
        forward, backward = by_hop
        # What goes ahead crosses the hop behind this stage, what goes back the one before it.
        ahead = Codec(forward[self.stage]) if forward and not self.last else self.settings.codecs.forward
        back = Codec(backward[self.stage - 1]) if backward and self.stage else self.settings.codecs.backward
        self._codecs = Codecs(ahead, back)
        for channel in self.channels.values():
            channel.use(ahead, back)

    def run(
        self, segment: Segment, row: Row, *, training: bool = True, keep_spans: bool = False, measure: bool = False
    ) -> list[StepReport]:
        """Carry out one segment; returns one report per mini-batch.

        Args:
            row: this worker's actions with micro-batches counted from 0 within the segment.
            training: False runs the evaluation function without gradients.
            measure: report how long actions and messages took.

        Raises:
            StageError: the user's code raised, or the loss is not a finite scalar; names stage and action.
            LinkError: a message did not come; names the link, the action and the micro-batch.
        """
        # The number of intra-op threads belongs to the calling thread, and sums over several round differently.
        torch.set_num_threads(1)
        self._segment, self._training = segment, training
        self._alone = self.settings.weights.norm_per_stage and segment.update_interval is not None
        if training and segment.phase.begins_empty:
            self.ring.begin(segment.first_microbatch, segment.interval)
        per_minibatch = len(segment.microbatch_samples)
        reports = []
        try:
            with torch.set_grad_enabled(training):
                for part in _split(row, per_minibatch):
                    minibatch = part[-1].microbatch // per_minibatch
                    reports.append(self._run_minibatch(part, minibatch, keep_spans, measure))
        except RaypipeError:
            raise
        except Exception as error:
            where = f" in {self._action}" if self._action else ""
            raise StageError(f"Stage {self.stage} failed{where}: {type(error).__name__}: {error}") from error
        return reports

    def _run_minibatch(self, row: Iterable[Action], minibatch: int, keep_spans: bool, measure: bool) -> StepReport:
        segment = self._segment
        first, step = segment.first_microbatch, segment.first_step + minibatch
        self._times = _message_times(self.stage) if measure else {}
        count = len(segment.microbatch_samples)
        self._parted, self._halves_s = first + minibatch * count + count // 2 if measure else None, None
        self._wait_s, self._sent, self._plain, self._peak = 0.0, [0, 0], [0, 0], len(self._under_way)
        self._losses.clear()
        self._seed_tensors.clear()
        clock = time.monotonic
        times = [start_s := clock()]
        busy_s = 0.0
        done = []
        for local in row:
            action = self._action = local.shifted(first)
            self._do(action)
            now = clock()
            if local.op in COMPUTE:
                busy_s += now - times[-1]
            done.append(action)
            times.append(now)
        self._action = None
        spans: tuple[Span, ...] = ()
        if keep_spans or measure:
            spans = tuple(Span(self.stage, a, s, e) for a, s, e in zip(done, times, times[1:], strict=False))
        norm, loss = self._totals if self._totals is not None else (None, self._loss())
        self._totals = None
        return StepReport(
            stage=self.stage,
            step=step,
            samples=segment.minibatch_samples,
            loss=None if loss is None else float(loss),
            grad_norm=None if norm is None or self._alone else float(norm),
            stage_grad_norm=float(norm) if norm is not None and self._alone else None,
            start_s=start_s,
            end_s=times[-1],
            busy_s=busy_s,
            wait_s=self._wait_s,
            sent_bytes=(self._sent[0], self._sent[1]),
            plain_bytes=(self._plain[0], self._plain[1]),
            peak_in_flight=self._peak,
            weight_versions=self.ring.held,
            spans=spans if keep_spans else (),
            sample=stage_sample(self.stage, step, spans, self._halves_s) if measure else None,
            messages=tuple(times for times in self._times.values() if times.wire_bytes),
        )

    _action: Action | None = None
    _segment: Segment
    _parted: int | None = None
    _halves_s: tuple[float, float] | None = None

    def _do(self, action: Action) -> None:
        stage, op, microbatch = action
        match op:
            case Op.F:
                self._forward(microbatch)
            case Op.B if microbatch == self._parted:
                # To the same bits, and it tells what a schedule that parts backwards would be worth.
                begin_s = time.monotonic()
                self._under_way.backward_input(microbatch)
                between_s = time.monotonic()
                self._under_way.backward_weight(microbatch)
                self._halves_s = between_s - begin_s, time.monotonic() - between_s
            case Op.B:
                self._under_way.backward(microbatch)
            case Op.I:
                self._under_way.backward_input(microbatch)
            case Op.W:
                self._under_way.backward_weight(microbatch)
            case Op.SEND_F:
                # Kept for the backward, where there is one: none in evaluation and below the first trainable stage.
                kept = self._training and stage >= self.program.first_trainable
                outputs = self._under_way.outputs(microbatch, keep=kept)
                self._send(stage + 1, action, outputs, self.ring.version(microbatch))
            case Op.RECV_F:
                self._arrived[microbatch] = self._hear(op, stage - 1, Action(stage - 1, Op.SEND_F, microbatch))
            case Op.SEND_B:
                self._send(stage - 1, action, self._under_way.take_answer(microbatch))
            case Op.RECV_B:
                seeds = self._hear(op, stage + 1, Action(stage + 1, Op.SEND_B, microbatch))
                self._under_way.seed(microbatch, seeds)
            case Op.REDUCE_GRAD:
                self._update.reduce_grad(action)
            case Op.REDUCE_NORM:
                if self._alone:
                    self._totals = self._update.own_norm(), self._loss()
                else:
                    self._totals = self._update.reduce_norm(action, self._loss())
            case Op.STEP:
                assert self._totals is not None
                self._update.step(self._segment.locate(microbatch)[0], *self._totals, alone=self._alone)

    def _forward(self, microbatch: int) -> None:
        segment, training = self._segment, self._training
        mode = "train" if training else "eval"
        function = self._modes[mode]
        inputs = self._arrived.pop(microbatch, _NOTHING)
        data = self.feed.microbatch(segment, microbatch, training=training)
        leaves: Sequence[torch.Tensor]
        if not training:
            leaves = [self.state.parameters[site.parameter] for site in function.sites]
        elif self.stage < self.program.first_trainable:
            leaves = self.ring.newest_leaves()
        else:
            self.ring.enter(microbatch, inputs.weight_version)
            leaves = self.ring.leaves(microbatch)
        outputs = function(
            leaves,
            self._buffers[mode],
            inputs,  # type: ignore[arg-type]
            [data.columns[name] for name in function.columns],
            RandomKey(self.settings.seed, segment.locate(microbatch)[0], microbatch),
        )
        if self.last:
            outputs = self._take_loss(outputs, data, microbatch)
        if training or not self.last:
            self._under_way.hold(microbatch, inputs, outputs)
            self._peak = max(self._peak, len(self._under_way))

    def _take_loss(
        self, outputs: tuple[torch.Tensor, ...], data: MicrobatchData, microbatch: int
    ) -> tuple[torch.Tensor, ...]:
        """The loss as the last stage's only output; its weight enters as the gradient's seed in the backward."""
        if data.weight == 0.0:  # no valid target: an average over nothing, which would be nan
            return ()
        assert self.program.loss is not None
        loss = self.program.loss(outputs, [data.columns[name] for name in self.program.targets])
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise StageError(
                f"The loss of micro-batch {microbatch} is not a scalar tensor but has {found}. Let loss_fn reduce over "
                "the samples of a micro-batch (reduction='mean') and choose loss_reduction to match."
            )
        self._losses.append((loss, data.share))
        if self._training:
            self._under_way.seed(microbatch, (self._seed(data.weight, loss.dtype),))
        return (loss,)

    def _seed(self, weight: float, dtype: torch.dtype) -> torch.Tensor:
        key = (weight, dtype)
        if key not in self._seed_tensors:
            self._seed_tensors[key] = torch.tensor(weight, dtype=dtype)
        return self._seed_tensors[key]

    def _loss(self) -> torch.Tensor | None:
        """The mini-batch's loss so far: the weighted sum in the order of the micro-batches."""
        total: torch.Tensor | None = None
        for loss, weight in self._losses:
            part = loss.detach() * weight
            total = part if total is None else total + part
        return total

    def _send(self, peer: int, action: Action, tensors: Sequence[torch.Tensor | None], weight_version: int = 0) -> None:
        direction = 0 if peer > self.stage else 1
        plain, wire = message_bytes(action.op, tensors, self._codecs)
        self._plain[direction] += plain
        self._sent[direction] += wire
        self.channels[peer].send(action, tensors, weight_version)

    def _hear(self, op: Op, peer: int, action: Action) -> Message:
        """Receive an activation or a gradient, and note how it travelled where that is asked for."""
        message = self._recv(peer, action)
        if self._times:
            sent_at_s, arrived_at_s, wire_bytes = message.stamp
            raw_bytes = sum(x.nbytes for x in message if x is not None)
            self._times[op].add(wire_bytes, raw_bytes, sent_at_s, arrived_at_s)
        return message

    def _recv(self, peer: int, action: Action) -> Message:
        begin_s = time.monotonic()
        try:
            return self.channels[peer].recv(action, self.settings.timeout_s)
        except LinkError as error:
            raise type(error)(f"Stage {self.stage} in {self._action}: {error}") from error
        finally:
            self._wait_s += time.monotonic() - begin_s


_NOTHING = Message()
"""What the first stage receives."""


def _message_times(stage: int) -> dict[Op, MessageTimes]:
    return {Op.RECV_F: MessageTimes(stage - 1, forward=True), Op.RECV_B: MessageTimes(stage, forward=False)}


def _split(row: Row, per_minibatch: int) -> Iterable[list[Action]]:
    """A row in parts that end with a mini-batch's last STEP (an evaluation has none: one part), one report for each."""
    part: list[Action] = []
    for action in row:
        part.append(action)
        if action.op is Op.STEP and (action.microbatch + 1) % per_minibatch == 0:
            yield part
            part = []
    if part:
        yield part
