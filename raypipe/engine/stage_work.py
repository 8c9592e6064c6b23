"""What one stage does, an action at a time: forwards, backwards, messages to other stages, and counting all of it.

The executor decides nothing either, but it knows the row of its worker; this knows one stage and no order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch

from raypipe.engine.codec import NONE, Codec, Codecs
from raypipe.engine.codec.choice import message_bytes
from raypipe.engine.compiling import modes_of
from raypipe.engine.crossing import Crossing
from raypipe.engine.culprits import failing_row, of_failing_row
from raypipe.engine.device import Crosses, Mark
from raypipe.engine.feed import Feed, MicrobatchData
from raypipe.engine.gradients import GradientSink
from raypipe.engine.in_flight import InFlight
from raypipe.engine.loss_scale import LossScale
from raypipe.engine.losses import LossTerm, loss_parts, summed
from raypipe.engine.messages.channel import Channel, Message
from raypipe.engine.meter import Meter
from raypipe.engine.microbatch import counting
from raypipe.engine.placing import placed_loss
from raypipe.engine.randomness import RandomKey
from raypipe.engine.second_forward import Given, SecondForward
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.stage_buffers import StageBuffers
from raypipe.engine.state import StageState
from raypipe.engine.tally import Tally, Totals
from raypipe.engine.token_count import TokenCount
from raypipe.engine.weight_ring import WeightRing
from raypipe.errors import LinkError, RaypipeError
from raypipe.ir.links import stage_sample
from raypipe.ir.report import StepReport
from raypipe.ir.schedule import Action, Op, lane_of
from raypipe.ir.segment import Segment
from raypipe.ir.timeline import Span

__all__ = ["SPLIT_EVERY", "SPLIT_FIRST", "StageWork"]

SPLIT_FIRST, SPLIT_EVERY = 4, 8
"""When split backwards are timed: one backward in each of the first 4 steps, then one in every eighth step. With many
small layers a split backward takes up to twice as long as a whole one."""


class StageWork:
    """One stage of a worker.

    Args:
        programs: of all stages; this one is ``programs[stage]``.
        worker: that holds it.
        channels: by stage beside it and lane of the micro-batch, to who works on that.
        crossing: to the device that computes and back.
    """

    def __init__(
        self,
        run: RunSetup,
        setup: GenerationSetup,
        stage: int,
        worker: int,
        state: StageState,
        channels: Mapping[int, Sequence[Channel]],
        crossing: Crossing,
    ) -> None:
        programs, settings, weights = setup.programs, run.settings, setup.weights
        self.program = programs[stage]
        self.stage, self.worker, self.last = stage, worker, stage == len(programs) - 1
        self.state = state
        self.settings = settings
        self._channels = channels
        self._crossing, self._mark = crossing, crossing.device.mark
        placement = setup.placement(worker)
        # Those that the same worker holds: no link is crossed, and rows have no messages to them.
        self._co_located = placement.co_located(stage)
        self._lanes, self._own_lanes, self._leads = placement.lanes, placement.lanes_of(worker), placement.leads
        self._codecs = setup.codecs
        exchanged, apart = len(placement.replicas) > 1, settings.codec_sums != "none" or weights.puts_off
        self.sink = GradientSink(self.program, state.parameters, self._lanes, exchanged=exchanged, apart=apart)
        kept = weights.rule, weights.capacity(stage), weights.ahead, len(placement.replicas)
        self.ring = WeightRing(self.program, state.parameters, *kept, self.sink.watch)
        self._in_flight = InFlight(self.sink, self.ring, sends_input_grads=stage > self.program.first_trainable)
        self._modes = modes_of(self.program, crossing, run.compile_stages)
        self._splits = run.compile_stages == "off"
        self.feed = Feed(
            run.sources,
            {m: (*f.columns, *(self.program.asked.columns if m == "eval" else ())) for m, f in self._modes.items()},
            self.program.targets,
            weighs=self.last,
            reduction=settings.loss_reduction,
            owner=(stage, worker),
        )
        self.buffers = StageBuffers(self._modes, state.buffers)
        self._shares_buffers = exchanged and not settings.replicated_buffers
        recomputes = bool(setup.recompute) and setup.recompute[stage] and stage >= self.program.first_trainable
        self._loss = {mode: placed_loss(loss, crossing) for mode, loss in self.program.loss_by_mode.items()}
        self._second_forward = SecondForward(stage, self.program.train.changing_buffers) if recomputes else None
        self._tokens = TokenCount(run.token_column)
        evaluates = self._leads and self.last and "eval" in run.sources
        self._meter = Meter(run.metrics) if evaluates and run.metrics else None
        self._num_to_evaluate = run.sources["eval"].num_samples if "eval" in run.sources else 0
        self._losses: list[tuple[int, int, torch.Tensor, float]] = []  # micro-batch, part, value, share
        self._seed_tensors: dict[tuple[float, torch.dtype], torch.Tensor] = {}
        self._arrived: dict[int, Message] = {}
        self._training = True
        self.tally = Tally()

    def use_codecs(self, ahead: Codec, back: Codec) -> None:
        """What the messages to other workers travel in from now on, for the bytes that are told."""
        self._codecs = Codecs(
            NONE if self.stage + 1 in self._co_located else ahead, NONE if self.stage - 1 in self._co_located else back
        )

    def begin_segment(self, segment: Segment, *, training: bool) -> None:
        """What comes belongs to this segment."""
        self._segment, self._training = segment, training
        self.buffers.begin(training=training, anew=segment.offset == 0)
        if self._meter is not None and not training and segment.offset == 0:
            self._meter.begin()
        if training and segment.phase.begins_empty:
            self.ring.begin(segment.first_microbatch, segment.interval)

    def drop(self) -> None:
        """Forget what is under way: there is no memory left, and its step will not end."""
        self._in_flight.drop()
        self._arrived.clear()

    def begin_minibatch(self, minibatch: int, *, measure: bool) -> None:
        """Count anew.

        Args:
            minibatch: of the segment.
            measure: how long messages take, and now and then the input and weight parts of one backward.
        """
        segment = self._segment
        count = len(segment.microbatch_samples)
        step, first = segment.first_step + minibatch, segment.first_microbatch + minibatch * count
        splits = self._splits and measure and (step < SPLIT_FIRST or step % SPLIT_EVERY == 0)
        own = [m for m in range(first, first + count) if self._lane(m) in self._own_lanes] if splits else []
        self.split_microbatch, self._split_marks = own[len(own) // 2] if own else None, None
        self.tally = Tally.of(self.stage, len(self._in_flight), measure=measure)
        self._losses.clear()
        self._seed_tensors.clear()

    def waited(self, seconds: float) -> None:
        """For a message of another stage, or of a replica."""
        self.tally.wait_s += seconds

    def report(
        self, step: int, during_s: tuple[float, float], totals: Totals, spans: Sequence[Span],
        *, alone: bool, keep_spans: bool, measure: bool,
    ) -> StepReport:  # fmt: skip
        """On the mini-batch that ends.

        Args:
            during_s: when it began and when it ended.
            spans: of this stage.
            alone: the norm is that of this stage.
        """
        tally, (norm, loss) = self.tally, totals
        loss_value, norm_value = self._crossing.read((loss, norm), Crosses.LOSS)
        split_s = self._crossing.two_parts_s(self._split_marks) if measure else None
        if self._training and self._shares_buffers:
            self.buffers.check(self.stage)
        return StepReport(
            stage=self.stage,
            step=step,
            samples=self._segment.minibatch_samples,
            averages=self._averages() if self.last and self._leads and not self._training else (),
            metrics=self._results(),
            loss=loss_value,
            grad_norm=None if alone else norm_value,
            stage_grad_norm=norm_value if alone else None,
            start_s=during_s[0],
            end_s=during_s[1],
            busy_s=tally.busy_s,
            wait_s=tally.wait_s,
            sent_bytes=(tally.sent_bytes[0], tally.sent_bytes[1]),
            uncompressed_bytes=(tally.uncompressed_bytes[0], tally.uncompressed_bytes[1]),
            peak_in_flight=tally.peak_in_flight,
            weight_versions=self.ring.held,
            spans=tuple(spans) if keep_spans else (),
            sample=stage_sample(self.stage, step, spans, split_s) if measure else None,
            messages=tuple(times for times in tally.times.values() if times.wire_bytes),
            worker=self.worker,
            damaged=tally.damaged,
            tokens=self._tokens.take(self._segment, step) if self._training else 0,
            exchanged_bytes=tally.exchanged_bytes,
        )

    _segment: Segment
    split_microbatch: int | None = None
    _split_marks: tuple[Mark, Mark, Mark] | None = None

    def do(self, action: Action) -> None:
        """Any action but the end of an update."""
        stage, op, microbatch = action
        match op:
            case Op.F:
                if stage - 1 in self._co_located:
                    self._arrived[microbatch] = self._hear(op, stage - 1, Action(stage - 1, Op.SEND_F, microbatch))
                self._forward(microbatch)
                if stage + 1 in self._co_located:
                    self._send_forward(Action(stage, Op.SEND_F, microbatch))
            case Op.B | Op.I:
                if stage + 1 in self._co_located:
                    self._hear_seeds(microbatch)
                self._backward(op, microbatch)
                if stage - 1 in self._co_located and stage > self.program.first_trainable:
                    self._send_back(Action(stage, Op.SEND_B, microbatch))
            case Op.W:
                self.sink.enter(microbatch - self._segment.first_microbatch, self._segment.interval)
                self._in_flight.backward_weight(microbatch)
            case Op.SEND_F:
                self._send_forward(action)
            case Op.RECV_F:
                self._arrived[microbatch] = self._hear(op, stage - 1, Action(stage - 1, Op.SEND_F, microbatch))
            case Op.SEND_B:
                self._send_back(action)
            case Op.RECV_B:
                self._hear_seeds(microbatch)
            case _:
                raise AssertionError(f"{action} belongs to the worker, not to one of its stages")

    def _forward(self, microbatch: int) -> None:
        segment, training = self._segment, self._training
        mode = "train" if training else "eval"
        function = self._modes[mode]
        inputs = self._arrived.pop(microbatch, _NOTHING)
        data = self.feed.microbatch(segment, microbatch, training=training)
        columns = self._crossing.named(data.columns, Crosses.COLUMNS)
        leaves: Sequence[torch.Tensor]
        if not training:
            leaves = [self.state.parameters[site.parameter] for site in function.sites]
        elif self.stage < self.program.first_trainable:
            leaves = self.ring.newest_leaves()
        else:
            self.ring.enter(microbatch, inputs.weight_version)
            leaves = self.ring.leaves(microbatch)
        if training:
            self._tokens.forward(microbatch, data.columns)
        key = RandomKey(self.settings.seed, segment.locate(microbatch)[0], microbatch)

        def computed(given: Given) -> tuple[torch.Tensor, ...]:
            held = [given.buffers[name] for name in function.buffers]
            columns = [given.columns[name] for name in function.columns]
            return function(leaves, held, given.inputs, columns, key)  # type: ignore[arg-type]

        def run(given: Given) -> tuple[torch.Tensor, ...]:
            outputs = computed(given)
            if not self.last:
                return outputs
            losses = outputs if training else self.program.without_asked(outputs)
            parts = loss_parts(self._loss[mode], self.program.targets, losses, given.columns, data.weights, microbatch)
            if self._meter is not None and not training:
                samples = segment.microbatch_samples[microbatch - segment.first_microbatch]
                seen = self._crossing.to_host(outputs, Crosses.METRICS)
                self._meter.add(*self.program.metric_arguments(seen, data.columns), samples)  # type: ignore[arg-type]
            return parts

        given, again = Given(inputs, columns, self.buffers.of(training=training)), None
        try:
            if training and self._second_forward is not None:
                outputs, again = self._second_forward.first(run, given)
            else:
                outputs = run(given)
        except Exception as error:
            self._note_row(error, computed, given, microbatch)
            raise
        if self.last:
            self._note_loss(outputs, data, microbatch)
        if training or not self.last:
            self._in_flight.hold(microbatch, inputs, outputs, again)
            self.tally.peak_in_flight = max(self.tally.peak_in_flight, len(self._in_flight))

    def _note_row(
        self, error: Exception, computed: Callable[[Given], tuple[torch.Tensor, ...]], given: Given, microbatch: int
    ) -> None:
        """Say of an exception of the user's code which sample is enough for it."""
        _, position, samples = self._segment.locate(microbatch)

        def again(some: Given) -> None:
            outputs = computed(some._replace(buffers={name: x.clone() for name, x in given.buffers.items()}))
            if (loss := self._loss["train" if self._training else "eval"]) is not None:
                losses = outputs if self._training else self.program.without_asked(outputs)
                loss(losses, [some.columns[name] for name in self.program.targets])

        row = failing_row(again, given, samples, error)
        if row is not None:
            source = self.feed.source(training=self._training)
            with suppress(RaypipeError):  # data that cannot say which row that was hides no failure of the model
                error.add_note(of_failing_row(source, self._segment.epoch, position + row, given.columns, row))

    def _lane(self, microbatch: int) -> int:
        """Evaluations run on workers that lead, which have the first lane."""
        segment = self._segment
        within = microbatch - segment.first_microbatch
        return lane_of(within, segment.interval, self._lanes) if self._training else 0

    def _backward(self, op: Op, microbatch: int) -> None:
        self.sink.enter(microbatch - self._segment.first_microbatch, self._segment.interval)
        if op is Op.I:
            self._in_flight.backward_input(microbatch)
        elif microbatch == self.split_microbatch:
            # To the same bits, and it tells what a schedule that splits backwards would be worth.
            begin = self._mark()
            self._in_flight.backward_input(microbatch)
            between = self._mark()
            self._in_flight.backward_weight(microbatch)
            self._split_marks = begin, between, self._mark()
        else:
            self._in_flight.backward(microbatch)

    def _note_loss(self, parts: tuple[torch.Tensor, ...], data: MicrobatchData, microbatch: int) -> None:
        """Count the loss; the weights of its parts enter as the gradients of the outputs."""
        counted = list(zip(counting(data.weights), parts, strict=True))
        self._losses += [(microbatch, at, part, data.shares[at]) for at, part in counted]
        if self._training and counted:
            output_grads = tuple(self._seed(data.weights[at], part.dtype) for at, part in counted)
            self._in_flight.set_output_grads(microbatch, output_grads)

    def _seed(self, weight: float, dtype: torch.dtype) -> torch.Tensor:
        key = (weight, dtype)
        if key not in self._seed_tensors:
            scale = LossScale(self.state).value if self.program.precision.scaled else 1.0
            # Filled on the device: a copy from the host would wait for all that is queued there.
            self._seed_tensors[key] = torch.full((), scale, dtype=dtype, device=self._crossing.device.place) * weight
        return self._seed_tensors[key]

    def loss(self, part: int | None = None) -> torch.Tensor | None:
        """The mini-batch's loss so far: the weighted sum in the order of the micro-batches. Of the last stage only.

        Args:
            part: only this one of its parts.
        """
        return summed([term for term in self.loss_terms() if part in (None, term.part)])

    def loss_terms(self) -> list[LossTerm]:
        """What ``loss`` sums up."""
        # Sums of 16 bits would stop growing after a few hundred micro-batches.
        return [
            LossTerm(m, at, loss.detach().to(torch.promote_types(loss.dtype, torch.float32)) * share)
            for m, at, loss, share in self._losses
        ]

    def _averages(self) -> tuple[tuple[float, float], ...]:
        """(loss, items) of each part of an evaluation's loss."""
        losses = self._crossing.read([self.loss(part) for part in range(len(self.feed.items))], Crosses.LOSS)
        return tuple((math.nan if loss is None else loss, n) for loss, n in zip(losses, self.feed.items, strict=True))

    def _results(self) -> tuple[tuple[str, float], ...]:
        """The metrics, once the last sample of an evaluation has been seen."""
        end = self._segment.offset + self._segment.minibatch_samples
        if self._meter is None or self._training or end < self._num_to_evaluate:
            return ()
        return self._meter.results()

    def _send_forward(self, action: Action) -> None:
        # Kept for the backward, where there is one: none in evaluation and below the first trainable stage.
        kept = self._training and self.stage >= self.program.first_trainable
        outputs = self._in_flight.outputs(action.microbatch, keep=kept)
        self._send(self.stage + 1, action, outputs, self.ring.version(action.microbatch))

    def _send_back(self, action: Action) -> None:
        self._send(self.stage - 1, action, self._in_flight.take_input_grads(action.microbatch))

    def _send(self, peer: int, action: Action, tensors: Sequence[torch.Tensor | None], weight_version: int = 0) -> None:
        if peer not in self._co_located:
            self.tally.sent(*message_bytes(action.op, tensors, self._codecs), ahead=peer > self.stage)
        what = Crosses.OUTPUTS if action.op is Op.SEND_F else Crosses.INPUT_GRADS
        channel, codec = self._channels[peer][self._lane(action.microbatch)], self._codecs.of(action.op)
        payload = self._crossing.outgoing(action, tensors, what, codec, on_device=channel.on_device)
        channel.send(action, payload, weight_version)

    def _hear_seeds(self, microbatch: int) -> None:
        above = self.stage + 1
        self._in_flight.set_output_grads(microbatch, self._hear(Op.RECV_B, above, Action(above, Op.SEND_B, microbatch)))

    def _hear(self, op: Op, peer: int, action: Action) -> Message:
        """Receive an activation or a gradient, and note how it travelled where that is asked for."""
        begin_s = time.monotonic()
        try:
            message = self._channels[peer][self._lane(action.microbatch)].recv(action, self.settings.timeout_s)
        except LinkError as error:
            at = Action(self.stage, op, action.microbatch)
            raise type(error)(f"Stage {self.stage} in {at.label}: {error}") from error
        finally:
            self.tally.wait_s += time.monotonic() - begin_s
        self.tally.received(op, message, crossed=peer not in self._co_located)
        return self._crossing.message(message, Crosses.INPUTS if action.op is Op.SEND_F else Crosses.OUTPUT_GRADS)


_NOTHING = Message()
"""What the first stage receives."""
