"""Runner of one stage's actions (forwards, backwards, messages to other stages), which counts their times and bytes.

The executor calls the runner for one action at a time, in the order of the worker's schedule.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import torch

from raypipe.engine.bad_samples import failing_row, of_failing_row
from raypipe.engine.codec import NONE, Codec, Codecs
from raypipe.engine.codec.codec import message_bytes
from raypipe.engine.device.device import Device, Mark, TransferKind
from raypipe.engine.device_functions import modes_of, placed_loss
from raypipe.engine.messages.channel import Channel, Message
from raypipe.engine.messages.transfer import DeviceTransfer
from raypipe.engine.optim.state import LossScale, StageState
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.stage.activation_checkpointing import ForwardInputs, Recomputation
from raypipe.engine.stage.activation_stash import ActivationStash
from raypipe.engine.stage.feed import Feed, MicrobatchData
from raypipe.engine.stage.gradients import GradientSink
from raypipe.engine.stage.graphs import StageGraphs
from raypipe.engine.stage.losses import LossTerm, counting, loss_parts, summed, weighted
from raypipe.engine.stage.minibatch_loss import MinibatchOutputs, OutputExchange
from raypipe.engine.stage.placement import Placement
from raypipe.engine.stage.randomness import RandomKey
from raypipe.engine.stage.stage import StageBuffers, StageProgram
from raypipe.engine.stage.user_metrics import UserMetrics
from raypipe.engine.stage.weight_ring import WeightRing
from raypipe.engine.step_counters import StepCounters
from raypipe.errors import LinkError, RaypipeError
from raypipe.ir.communication import stage_sample
from raypipe.ir.report import StepReport
from raypipe.ir.schedule import Action, Op, lane_of
from raypipe.ir.segment import Order, Segment
from raypipe.ir.timeline import Span

Tensors = tuple[torch.Tensor, ...]
Values = Callable[[], list[float | None]]
"""Function that waits for the values of scalars on the device; None for each that a worker lacks."""
Totals = tuple[torch.Tensor | None, torch.Tensor | None]
"""(Gradient norm of the model, loss of a mini-batch), scalars on the device; None for each that a worker lacks."""


SPLIT_FIRST, SPLIT_EVERY = 4, 8
"""Steps that split one backward to time its input and weight parts: the first SPLIT_FIRST, then one in SPLIT_EVERY.

Other steps do not, because with many small layers a split backward takes up to twice as long as a whole one.
"""


class StageRunner:
    """Runner of one stage's actions on a worker.

    Args:
        stage: number of the stage, its index in ``setup.programs``.
        channels: for the previous and the next stage, one channel per lane (partial sum of gradients): the channel to
            the worker that computes the lane's micro-batches on that stage.
        workers: channels to other workers, among them the replicas of the stage, by worker.
    """

    def __init__(
        self,
        run: RunSetup,
        setup: GenerationSetup,
        stage: int,
        worker: int,
        state: StageState,
        channels: Mapping[int, Sequence[Channel]],
        workers: Mapping[int, Channel],
        transfer: DeviceTransfer,
    ) -> None:
        program = self.program = setup.programs[stage]
        self.stage, self.worker, self.last = stage, worker, stage == len(setup.programs) - 1
        self.state, self.settings = state, run.settings
        self._channels, self._codecs = channels, setup.codecs
        self._transfer, self._mark = transfer, transfer.device.mark
        placement = self._placement = setup.placement(worker)
        # Neighbour stages on this worker: no link between them, and rows have no messages to them.
        self._co_located = placement.co_located(stage)
        self.sink, self.ring = _sink_and_ring(program, state, run, setup, placement, transfer.device)
        self._stash = ActivationStash(self.sink, self.ring, sends_input_grads=stage > program.first_trainable)
        self._modes = modes_of(program, transfer, run.compile_stages)
        recomputes = stage >= program.first_trainable and any(setup.recompute[stage : stage + 1])
        if run.cuda_graphs and not recomputes:
            self._modes["train"] = StageGraphs(self._modes["train"], stage, transfer.device, self.sink)
        self._loss = {mode: placed_loss(loss, transfer) for mode, loss in program.loss_by_mode.items()}
        self._splits = run.compile_stages == "off" and not run.cuda_graphs
        self.feed = Feed(
            run.sources,
            {m: (*f.columns, *(program.metric_reads.columns if m == "eval" else ())) for m, f in self._modes.items()},
            program.targets,
            weighs=self.last,
            reduction=run.settings.loss_reduction,
            owner=(stage, worker),
            token_column=run.token_column,
            place=None if transfer.device.immediate else partial(transfer.named, what=TransferKind.COLUMNS),
        )
        self.buffers = StageBuffers(self._modes, state.buffers)
        self._recomputation = Recomputation(stage, program.train.changing_buffers) if recomputes else None
        evaluates = placement.leads and self.last and "eval" in run.sources
        self._metrics = UserMetrics(run.metrics) if evaluates and run.metrics else None
        self._num_to_evaluate = run.sources["eval"].num_samples if "eval" in run.sources else 0
        exchange = OutputExchange(stage, workers, transfer, run.settings.timeout_s)
        self.whole = MinibatchOutputs(run.settings.loss_reduction if self.last else None, worker, exchange)
        self.loss_terms: list[LossTerm] = []
        """Weighted parts of the losses of this mini-batch's micro-batches."""
        self._output_grad_tensors: dict[tuple[float, torch.dtype], torch.Tensor] = {}
        self._arrived: dict[int, Message] = {}
        self._training, self.split_microbatch = True, None
        self._split_marks: tuple[Mark, Mark, Mark] | None = None
        self.counters = StepCounters()

    _segment: Segment
    split_microbatch: int | None

    @property
    def _mode(self) -> str:
        return "train" if self._training else "eval"

    def use_codecs(self, ahead: Codec, back: Codec) -> None:
        """Set the codecs of forward (``ahead``) and backward messages, except between stages of one worker."""
        self._codecs = Codecs(
            NONE if self.stage + 1 in self._co_located else ahead, NONE if self.stage - 1 in self._co_located else back
        )

    def begin_segment(self, segment: Segment, *, training: bool) -> None:
        """Prepare buffers, metrics and weight versions for the actions of a segment of training or evaluation."""
        self._segment, self._training = segment, training
        self.buffers.begin(training=training, anew=segment.offset == 0)
        if self._metrics is not None and not training and segment.offset == 0:
            self._metrics.begin()
        if training and segment.phase.begins_empty:
            self.ring.begin(segment.first_microbatch, segment.interval)

    def drop(self) -> None:
        """Drop all micro-batches in flight with their activations, after the step was aborted."""
        self._stash.drop()
        self.whole.clear()
        self._arrived.clear()

    def begin_minibatch(self, minibatch: int, *, measure: bool) -> None:
        """Reset losses and counters for the mini-batch with index ``minibatch`` in the segment.

        If ``measure``, messages are timed, and in some steps (SPLIT_EVERY) the two parts of one backward.
        """
        segment = self._segment
        count = len(segment.microbatch_samples)
        step, first = segment.first_step + minibatch, segment.first_microbatch + minibatch * count
        splits = self._splits and measure and (step < SPLIT_FIRST or step % SPLIT_EVERY == 0)
        homes = {m: self._placement.home_of(self.stage, self._lane(m)) for m in range(first, first + count)}
        own = [m for m, home in homes.items() if home == self.worker] if splits else []
        self.split_microbatch, self._split_marks = own[len(own) // 2] if own else None, None
        self.counters = StepCounters.of(self.stage, len(self._stash), measure=measure)
        self.loss_terms.clear()
        self._output_grad_tensors.clear()
        self.whole.begin(homes)

    def waited(self, seconds: float) -> None:
        """Add seconds of waiting for a message to the counters."""
        self.counters.wait_s += seconds

    def report(
        self, order: Order, step: int, values: Values, *, alone: bool
    ) -> Callable[[tuple[float, float], Sequence[Span]], StepReport]:
        """Begin this stage's report on the mini-batch that has just ended.

        Args:
            values: reads the gradient norm and the loss of the mini-batch.
            alone: True if the norm is that of this stage, False if it is the norm of the model.

        Returns:
            Function that waits for the values and creates the report, from the begin and end of the mini-batch, in
            seconds of ``time.monotonic``, and from the timed actions of this stage. The next mini-batch may have begun.

        Raises:
            StageError: a buffer changed that replicas must have equal; see ``StageBuffers.check``.
        """
        counters, split_marks = self.counters, self._split_marks
        if self._training and len(self._placement.replicas) > 1 and not self.settings.replicated_buffers:
            self.buffers.check(self.stage)
        begun = partial(
            StepReport,
            stage=self.stage,
            step=step,
            samples=self._segment.minibatch_samples,
            averages=self._averages() if self.last and self._placement.leads and not self._training else (),
            metrics=self._results(),
            sent_bytes=(counters.sent_bytes[0], counters.sent_bytes[1]),
            uncompressed_bytes=(counters.uncompressed_bytes[0], counters.uncompressed_bytes[1]),
            peak_in_flight=counters.peak_in_flight,
            weight_versions=self.ring.held,
            messages=tuple(times for times in counters.times.values() if times.wire_bytes),
            worker=self.worker,
            tokens=self.feed.take_tokens(self._segment, step) if self._training else 0,
            exchanged_bytes=counters.exchanged_bytes,
        )

        def finished(during_s: tuple[float, float], spans: Sequence[Span]) -> StepReport:
            norm, loss = values()
            split_s = self._transfer.two_parts_s(split_marks) if order.measure else None
            return begun(
                loss=loss,
                grad_norm=None if alone else norm,
                stage_grad_norm=norm if alone else None,
                start_s=during_s[0],
                end_s=during_s[1],
                busy_s=counters.busy_s,
                wait_s=counters.wait_s,
                spans=tuple(spans) if order.keep_spans else (),
                sample=stage_sample(self.stage, step, spans, split_s) if order.measure else None,
            )

        return finished

    def run_of(self, op: Op) -> Callable[[Action, Mark], None]:
        """Return the function that runs a forward, backward, send or receive.

        The mark is one in the computing stream after the actions before. F and B also pass tensors between stages of
        the same worker.
        """
        match op:
            case Op.F:
                return self._run_forward
            case Op.B | Op.I:
                return self._run_backward
            case Op.W:
                return self._run_weight_part
            case Op.SEND_F:
                return self._send_forward
            case Op.SEND_B:
                return self._send_backward
            case Op.RECV_F:
                return self._recv_inputs
            case Op.RECV_B:
                return self._recv_output_grads
        raise AssertionError(f"{op} belongs to the worker, not to one of its stages")

    def _run_forward(self, action: Action, since: Mark) -> None:
        stage, _, microbatch = action
        if stage - 1 in self._co_located:
            self._recv_inputs(action, since)
        self._forward(microbatch)
        if stage + 1 in self._co_located:
            self._send_forward(Action(stage, Op.SEND_F, microbatch))

    def _run_backward(self, action: Action, since: Mark) -> None:
        stage, op, microbatch = action
        if stage + 1 in self._co_located:
            self._recv_output_grads(action, since)
        self._backward(op, microbatch)
        if stage - 1 in self._co_located and stage > self.program.first_trainable:
            self._send_backward(Action(stage, Op.SEND_B, microbatch))

    def _run_weight_part(self, action: Action, since: Mark) -> None:
        self.sink.enter(action.microbatch - self._segment.first_microbatch, self._segment.interval)
        self._stash.backward_weight(action.microbatch)

    def _forward(self, microbatch: int) -> None:
        inputs = self._arrived.pop(microbatch, _NOTHING)
        data = self.feed.microbatch(self._segment, microbatch, training=self._training)
        columns = data.placed
        compute = self._bind(microbatch, inputs.weight_version)
        run = partial(self._compute_loss, compute, data, microbatch) if self.last else compute
        arguments, recompute = ForwardInputs(inputs, columns, self.buffers.of(training=self._training)), None
        try:
            if self._training and self._recomputation is not None:
                outputs, recompute = self._recomputation.first(run, arguments)
            else:
                outputs = run(arguments)
        except Exception as error:
            self._add_sample_note(error, compute, arguments, microbatch)
            raise
        if self._training or not self.last:
            self._stash.hold(microbatch, inputs, outputs, recompute)
            self.counters.peak_in_flight = max(self.counters.peak_in_flight, len(self._stash))
        if self.whole.used:
            targets = {name: columns[name] for name in self.program.targets}
            self.counters.exchanged_bytes += self.whole.add(self._mode, microbatch, outputs, targets)
            if recompute is not None:
                self._stash.outputs(microbatch, keep=True)  # freed with the loss
            if self.whole.complete:
                self._compute_whole_loss(microbatch)
        elif self.last:
            self._note_loss(outputs, data, microbatch)

    def _bind(self, microbatch: int, stamp: int) -> Callable[[ForwardInputs], Tensors]:
        """Return the stage's function with the random key and the weights of a micro-batch filled in.

        ``stamp`` is the weight version in the received message of the micro-batch; 0 if it has none.
        """
        function = self._modes[self._mode]
        leaves: Sequence[torch.Tensor]
        if not self._training:
            leaves = [self.state.parameters[site.parameter] for site in function.sites]
        elif self.stage < self.program.first_trainable:
            leaves = self.ring.newest_leaves()
        else:
            self.ring.enter(microbatch, stamp)
            leaves = self.ring.leaves(microbatch)
        key = RandomKey(self.settings.seed, self._segment.locate(microbatch)[0], microbatch)

        def compute(arguments: ForwardInputs) -> Tensors:
            buffers = [arguments.buffers[name] for name in function.buffers]
            columns = [arguments.columns[name] for name in function.columns]
            return function(leaves, buffers, arguments.inputs, columns, key)  # type: ignore[arg-type]

        return compute

    def _compute_loss(
        self, compute: Callable[[ForwardInputs], Tensors], data: MicrobatchData, microbatch: int,
        arguments: ForwardInputs,
    ) -> Tensors:  # fmt: skip
        """Run the last stage by ``compute``; return loss parts, or outputs if ``whole`` is used; update metrics."""
        outputs = parts = compute(arguments)
        if not self.whole.used:
            losses = outputs if self._training else self.program.loss_outputs(outputs)
            loss, targets = self._loss[self._mode], self.program.targets
            parts = loss_parts(loss, targets, losses, arguments.columns, data.weights, microbatch)
        if self._metrics is not None and not self._training:
            samples = self._segment.microbatch_samples[microbatch - self._segment.first_microbatch]
            on_host = self._transfer.to_host(outputs, TransferKind.METRICS)
            self._metrics.add(*self.program.metric_arguments(on_host, data.columns), samples)  # type: ignore[arg-type]
        return parts

    def _add_sample_note(
        self,
        error: Exception,
        compute: Callable[[ForwardInputs], Tensors],
        arguments: ForwardInputs,
        microbatch: int,
    ) -> None:
        """Add a note to an exception of ``compute(arguments)`` if one sample alone raises an exception of its type."""
        _, position, samples = self._segment.locate(microbatch)

        def run(rows: ForwardInputs) -> None:
            outputs = compute(rows._replace(buffers={name: x.clone() for name, x in arguments.buffers.items()}))
            if (loss := self._loss[self._mode]) is not None and not self.whole.used:
                losses = outputs if self._training else self.program.loss_outputs(outputs)
                loss(losses, [rows.columns[name] for name in self.program.targets])

        row = failing_row(run, arguments, samples, error)
        if row is not None:
            source = self.feed.source(training=self._training)
            with suppress(RaypipeError):  # a source that cannot name the row must not hide the model's failure
                error.add_note(of_failing_row(source, self._segment.epoch, position + row, arguments.columns, row))

    def _lane(self, microbatch: int) -> int:
        """Return the lane (partial gradient sum) of a micro-batch; 0 in evaluation, which only first replicas run."""
        segment = self._segment
        index = microbatch - segment.first_microbatch
        return lane_of(index, segment.interval, self._placement.lanes) if self._training else 0

    def _backward(self, op: Op, microbatch: int) -> None:
        self.sink.enter(microbatch - self._segment.first_microbatch, self._segment.interval)
        if op is Op.I:
            self._stash.backward_input(microbatch)
        elif microbatch == self.split_microbatch:
            # Same bits as a whole backward; its times are for the planner, to rate schedules with split backwards.
            begin = self._mark()
            self._stash.backward_input(microbatch)
            between = self._mark()
            self._stash.backward_weight(microbatch)
            self._split_marks = begin, between, self._mark()
        else:
            self._stash.backward(microbatch)

    def _note_loss(self, parts: tuple[torch.Tensor, ...], data: MicrobatchData, microbatch: int) -> None:
        """Record the parts of a micro-batch's loss; in training, set the gradient of each part to its weight."""
        counted = list(zip(counting(data.weights), parts, strict=True))
        self.loss_terms += [weighted(part, data.shares[at], microbatch, at) for at, part in counted]
        if self._training and counted:
            output_grads = tuple(self._output_grad(data.weights[at], part.dtype) for at, part in counted)
            self._stash.set_output_grads(microbatch, output_grads)

    def _compute_whole_loss(self, microbatch: int) -> None:
        """Compute the loss of the mini-batch from all outputs; in training, set the gradients of the outputs."""
        waited_s = self.whole.gather(self.feed.targets)
        self.waited(waited_s)
        self.counters.busy_s -= waited_s  # within the forward of ``microbatch``
        loss_fn = self._loss[self._mode]
        (loss,) = loss_parts(loss_fn, self.program.targets, *self.whole.joined(self._mode), (1.0,), microbatch)
        if self.whole.counts:
            self.loss_terms.append(weighted(loss, 1.0, microbatch))
        if self._training:
            for number, grads in self.whole.gradients(loss, self._output_grad(1.0, loss.dtype)):
                self._stash.set_output_grads(number, grads)
        self.whole.clear()

    def _output_grad(self, weight: float, dtype: torch.dtype) -> torch.Tensor:
        key = (weight, dtype)
        if key not in self._output_grad_tensors:
            scale = LossScale(self.state).value if self.program.precision.scaled else 1.0
            # Filled on the device: a copy from the host would wait for all work queued there.
            self._output_grad_tensors[key] = (
                torch.full((), scale, dtype=dtype, device=self._transfer.device.place) * weight
            )
        return self._output_grad_tensors[key]

    def loss(self, part: int | None = None) -> torch.Tensor | None:
        """Return the loss of the mini-batch so far: the weighted sum over micro-batches, in their order, a scalar.

        ``part`` selects one part of the loss. The result is None before the first loss, and on stages before the last.
        """
        return summed([term for term in self.loss_terms if part in (None, term.part)])

    def _averages(self) -> tuple[tuple[float, float], ...]:
        """Return (loss, number of items) of one mini-batch of an evaluation, for each term of the loss.

        A term averages over its items, which are samples or valid labels. The loss of a term without items is NaN.
        """
        losses = self._transfer.read([self.loss(part) for part in range(len(self.feed.items))], TransferKind.LOSS)
        return tuple((math.nan if loss is None else loss, n) for loss, n in zip(losses, self.feed.items, strict=True))

    def _results(self) -> tuple[tuple[str, float], ...]:
        """Return (name, value) of each metric after the last mini-batch of an evaluation, else an empty tuple."""
        end = self._segment.offset + self._segment.minibatch_samples
        if self._metrics is None or self._training or end < self._num_to_evaluate:
            return ()
        return self._metrics.results()

    def _send_forward(self, action: Action, computed: Mark | None = None) -> None:
        # Kept for the backward, which evaluation and stages before the first trainable one do not have.
        kept = self._training and self.stage >= self.program.first_trainable
        outputs = self._stash.outputs(action.microbatch, keep=kept)
        self._send(self.stage + 1, action, outputs, computed, self.ring.version(action.microbatch))

    def _send_backward(self, action: Action, computed: Mark | None = None) -> None:
        self._send(self.stage - 1, action, self._stash.take_input_grads(action.microbatch), computed)

    def _send(
        self, peer: int, action: Action, tensors: Sequence[torch.Tensor | None], computed: Mark | None,
        weight_version: int = 0,
    ) -> None:  # fmt: skip
        if peer not in self._co_located:
            self.counters.sent(*message_bytes(action.op, tensors, self._codecs), ahead=peer > self.stage)
        what = TransferKind.OUTPUTS if action.op is Op.SEND_F else TransferKind.INPUT_GRADS
        channel, codec = self._channels[peer][self._lane(action.microbatch)], self._codecs.of(action.op)
        payload = self._transfer.outgoing(action, tensors, what, codec, on_device=channel.on_device, computed=computed)
        channel.send(action, payload, weight_version)

    def _recv_inputs(self, action: Action, since: Mark) -> None:
        below = self.stage - 1
        message = self._recv(action.op, below, Action(below, Op.SEND_F, action.microbatch))
        self._arrived[action.microbatch] = message

    def _recv_output_grads(self, action: Action, since: Mark) -> None:
        above = self.stage + 1
        grads = self._recv(Op.RECV_B, above, Action(above, Op.SEND_B, action.microbatch))
        self._stash.set_output_grads(action.microbatch, grads)

    def _recv(self, op: Op, peer: int, action: Action) -> Message:
        """Receive the message ``action`` from stage ``peer`` for operation ``op``; move its tensors to the device."""
        begin_s = time.monotonic()
        try:
            message = self._channels[peer][self._lane(action.microbatch)].recv(action, self.settings.timeout_s)
        except LinkError as error:
            at = Action(self.stage, op, action.microbatch)
            raise type(error)(f"Stage {self.stage} in {at.label}: {error}") from error
        finally:
            self.counters.wait_s += time.monotonic() - begin_s
        self.counters.received(op, message, crossed=peer not in self._co_located)
        return self._transfer.message(
            message, TransferKind.INPUTS if action.op is Op.SEND_F else TransferKind.OUTPUT_GRADS
        )


def _sink_and_ring(
    program: StageProgram, state: StageState, run: RunSetup, setup: GenerationSetup, placement: Placement,
    device: Device,
) -> tuple[GradientSink, WeightRing]:  # fmt: skip
    """Create the gradient accumulators and the ring of weight versions of a stage."""
    weights, replicas = setup.weights, len(placement.replicas)
    apart, fixed = run.settings.codec_sums != "none" or weights.puts_off, run.cuda_graphs
    ways = {"exchanged": replicas > 1, "on_device": not device.immediate, "apart": apart, "fixed": fixed}
    sink = GradientSink(program, state.parameters, placement.lanes, **ways)
    predicts = weights.correction == "predict"
    lookahead = weights.delay(program.index, program.first_trainable) if predicts else 0.0
    kept = weights.rule, weights.capacity(program.index), weights.ahead, replicas, lookahead
    return sink, WeightRing(program, state.parameters, *kept, sink.watch)


_NOTHING = Message()
"""Inputs of the first stage: no tensors."""
