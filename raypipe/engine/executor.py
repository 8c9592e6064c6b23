"""The dumb machine: it carries out a row of actions on one stage and asks no questions.

It knows neither schedules nor Ray. What a row means was decided, checked and simulated elsewhere;
here every action is a few lines, and whatever goes wrong is raised with the action's name.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import torch

from raypipe.engine.channel import Channel
from raypipe.engine.data import Source
from raypipe.engine.feed import Feed, MicrobatchData
from raypipe.engine.gradients import GradientSink
from raypipe.engine.randomness import RandomKey
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import Settings, StageState
from raypipe.errors import LinkError, RaypipeError, StageError
from raypipe.ir.plan import Segment
from raypipe.ir.report import StepReport
from raypipe.ir.schedule import COMPUTE, Action, Op, Row
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
        self.sink = GradientSink(self.program, state.parameters)
        self.feed = Feed(
            sources,
            {"train": self.program.train.columns, "eval": self.program.eval.columns},
            self.program.targets,
            weighs=self.last,
            reduction=settings.loss_reduction,
        )
        self._live: dict[int, tuple[Sequence[torch.Tensor], tuple[torch.Tensor, ...]]] = {}
        self._arrived: dict[int, tuple[torch.Tensor | None, ...]] = {}
        self._seeds: dict[int, tuple[torch.Tensor | None, ...]] = {}
        self._loss: torch.Tensor | None = None
        self._totals: tuple[torch.Tensor, torch.Tensor] | None = None
        self._segment: Segment | None = None
        self._training = True
        self._wait_s = 0.0
        self._sent = [0, 0]
        self._peak = 0

    def abort(self, reason: str) -> None:
        """Release every wait from another thread; the executor is unusable afterwards."""
        for channel in self.channels.values():
            channel.abort(reason)

    def run(self, segment: Segment, row: Row, *, training: bool = True, keep_spans: bool = False) -> list[StepReport]:
        """Carry out one segment; returns one report per mini-batch.

        Args:
            row: this worker's actions with micro-batches counted from 0 within the segment.
            training: False runs the evaluation function without gradients.

        Raises:
            StageError: the user's code raised, or the loss is not a finite scalar; names stage and action.
            LinkError: a message did not come; names the link, the action and the micro-batch.
        """
        # The number of intra-op threads belongs to the calling thread, and sums over several round differently.
        torch.set_num_threads(1)
        self._segment, self._training = segment, training
        per_minibatch = len(segment.microbatch_samples)
        reports = []
        try:
            with torch.set_grad_enabled(training):
                for part in _split(row):
                    minibatch = part[-1].microbatch // per_minibatch
                    reports.append(self._run_minibatch(part, minibatch, keep_spans))
        except RaypipeError:
            raise
        except Exception as error:
            where = f" in {self._action}" if self._action else ""
            raise StageError(f"Stage {self.stage} failed{where}: {type(error).__name__}: {error}") from error
        return reports

    def _run_minibatch(self, row: Iterable[Action], minibatch: int, keep_spans: bool) -> StepReport:
        segment = self._segment
        assert segment is not None
        first = segment.first_microbatch
        self._wait_s, self._sent, self._peak, self._loss = 0.0, [0, 0], len(self._live), None
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
        if keep_spans:
            spans = tuple(Span(self.stage, a, s, e) for a, s, e in zip(done, times, times[1:], strict=False))
        loss, norm = self._loss, None
        if self._totals is not None:
            norm, loss = self._totals
            self._totals = None
        return StepReport(
            stage=self.stage,
            step=segment.first_step + minibatch,
            samples=segment.minibatch_samples,
            loss=None if loss is None else float(loss),
            grad_norm=None if norm is None else float(norm),
            start_s=start_s,
            end_s=times[-1],
            busy_s=busy_s,
            wait_s=self._wait_s,
            sent_bytes=(self._sent[0], self._sent[1]),
            peak_in_flight=self._peak,
            spans=spans,
        )

    _action: Action | None = None

    def _do(self, action: Action) -> None:
        stage, op, microbatch = action
        match op:
            case Op.F:
                self._forward(microbatch)
            case Op.B:
                self._backward(microbatch)
            case Op.SEND_F:
                outputs = self._live[microbatch][1] if self._training else self._live.pop(microbatch)[1]
                self._send(stage + 1, action, outputs)
            case Op.RECV_F:
                self._arrived[microbatch] = self._recv(stage - 1, Action(stage - 1, Op.SEND_F, microbatch))
            case Op.SEND_B:
                self._send(stage - 1, action, self._seeds.pop(microbatch))
            case Op.RECV_B:
                self._seeds[microbatch] = self._recv(stage + 1, Action(stage + 1, Op.SEND_B, microbatch))
            case Op.REDUCE_GRAD:
                self._reduce_grad(action)
            case Op.REDUCE_NORM:
                self._reduce_norm(action)
            case Op.STEP:
                self._step()
            case Op.I | Op.W:
                raise StageError(f"{action}: this release runs whole backwards (B); choose a schedule without I and W.")

    def _forward(self, microbatch: int) -> None:
        segment = self._segment
        assert segment is not None
        step = segment.locate(microbatch)[0]
        inputs = self._arrived.pop(microbatch, ())
        function = self.program.train if self._training else self.program.eval
        data = self.feed.microbatch(segment, microbatch, training=self._training)
        state = self.state
        if self._training:
            leaves: Sequence[torch.Tensor] = self.sink.leaves
        else:
            leaves = [state.parameters[site.parameter] for site in function.sites]
        outputs = function(
            leaves,
            [state.buffers[name] for name in function.buffers],
            inputs,  # type: ignore[arg-type]
            [data.columns[name] for name in function.columns],
            RandomKey(self.settings.seed, step, microbatch),
        )
        if self.last:
            outputs = self._weighted_loss(outputs, data, microbatch)
        if self._training or not self.last:
            self._live[microbatch] = (inputs, outputs)  # type: ignore[assignment]
            self._peak = max(self._peak, len(self._live))

    def _weighted_loss(
        self, outputs: tuple[torch.Tensor, ...], data: MicrobatchData, microbatch: int
    ) -> tuple[torch.Tensor, ...]:
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
        weighted = loss * data.weight
        seen = weighted.detach()
        self._loss = seen if self._loss is None else self._loss + seen
        return (weighted,)

    def _backward(self, microbatch: int) -> None:
        inputs, outputs = self._live.pop(microbatch)
        seeds = self._seeds.pop(microbatch, None)
        if self.last:
            roots: list[torch.Tensor] = list(outputs)
            gradients: list[torch.Tensor | None] = [None] * len(outputs)
        else:
            pairs = [(o, g) for o, g in zip(outputs, seeds or (), strict=True) if g is not None]
            roots, gradients = [o for o, _ in pairs], [g for _, g in pairs]
        wanted_sites = [i for i, leaf in enumerate(self.sink.leaves) if leaf.requires_grad]
        wanted_inputs = [i for i, x in enumerate(inputs) if x is not None and x.requires_grad]
        targets = [self.sink.leaves[i] for i in wanted_sites] + [inputs[i] for i in wanted_inputs]
        if roots and targets:
            found: Sequence[torch.Tensor | None] = torch.autograd.grad(roots, targets, gradients, allow_unused=True)
        else:
            found = (None,) * len(targets)
        for i, gradient in zip(wanted_sites, found, strict=False):
            if gradient is not None:
                self.sink.add(i, gradient)
        if self.stage > self.program.first_trainable:
            by_input = dict(zip(wanted_inputs, found[len(wanted_sites) :], strict=True))
            self._seeds[microbatch] = tuple(by_input.get(i) for i in range(len(inputs)))

    def _reduce_grad(self, action: Action) -> None:
        shared = {s for stages in self.program.shared_with.values() for s in stages} - {self.stage}
        for peer in sorted(shared):
            self.channels[peer].send(action, self.sink.exported(peer))
        imported = {peer: self._recv(peer, Action(peer, Op.REDUCE_GRAD, action.microbatch)) for peer in sorted(shared)}
        self.sink.finish(imported, {peer: self.programs[peer] for peer in shared})

    def _reduce_norm(self, action: Action) -> None:
        """Per-tensor norms travel down to stage 0, which is the last to finish; the total travels back up.

        The total is the norm of the stacked norms in the order of the user's named_parameters(), which is
        what torch computes, so it does not depend on the partition.
        """
        positions, norms = [], []
        for name, parameter in self.state.parameters.items():
            owner = self.program.shared_with.get(name, (self.stage,))[0] == self.stage
            if owner and parameter.grad is not None:
                positions.append(self.program.order[name])
                norms.append(torch.linalg.vector_norm(parameter.grad))
        where = torch.tensor(positions, dtype=torch.int64)
        sizes = torch.stack(norms) if norms else torch.empty(0)
        loss = self._loss if self.last else None
        if not self.last:
            above, more, loss = self._recv(self.stage + 1, Action(self.stage + 1, Op.REDUCE_NORM, action.microbatch))
            assert above is not None
            assert more is not None
            where, sizes = torch.cat([where, above]), torch.cat([sizes, more])
        if self.stage:
            self.channels[self.stage - 1].send(action, [where, sizes, loss])
            back = self._recv(self.stage - 1, Action(self.stage - 1, Op.REDUCE_NORM, action.microbatch))
            total, loss = back[0], back[1]
        else:
            total = torch.linalg.vector_norm(sizes[torch.argsort(where)])
        if not self.last:
            self.channels[self.stage + 1].send(action, [total, loss])
        assert total is not None
        assert loss is not None
        self._totals = (total, loss)

    def _step(self) -> None:
        assert self._totals is not None
        assert self._segment is not None
        total, loss = self._totals
        if not torch.isfinite(total) or not torch.isfinite(loss):
            action = self._action
            step = self._segment.first_step if action is None else self._segment.locate(action.microbatch)[0]
            raise StageError(
                f"Step {step}: the loss is {float(loss):g} and the gradient norm {float(total):g}, so no stage took "
                f"this step and the parameters are those after {step} steps. Lower the learning rate, set "
                "max_grad_norm, or look at the data of this mini-batch."
            )
        limit = self.settings.max_grad_norm
        if limit is not None:
            factor = torch.clamp(limit / (total + 1e-6), max=1.0)
            for parameter in self.state.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        if self.state.optimizer is not None:
            self.state.optimizer.step()
            if self.state.scheduler is not None:
                self.state.scheduler.step()
        self.sink.reset()

    def _send(self, peer: int, action: Action, tensors: Sequence[torch.Tensor | None]) -> None:
        self._sent[0 if peer > self.stage else 1] += sum(t.nbytes for t in tensors if t is not None)
        self.channels[peer].send(action, tensors)

    def _recv(self, peer: int, action: Action) -> tuple[torch.Tensor | None, ...]:
        begin_s = time.monotonic()
        try:
            return self.channels[peer].recv(action, self.settings.timeout_s)
        except LinkError as error:
            raise LinkError(f"Stage {self.stage} in {self._action}: {error}") from error
        finally:
            self._wait_s += time.monotonic() - begin_s


def _split(row: Row) -> Iterable[list[Action]]:
    """A row in parts that end with a STEP (an evaluation has none: one part), one report for each."""
    part: list[Action] = []
    for action in row:
        part.append(action)
        if action.op is Op.STEP:
            yield part
            part = []
    if part:
        yield part
