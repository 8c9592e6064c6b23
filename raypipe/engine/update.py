"""The end of a mini-batch on one stage: shared gradients are summed, the norm is taken, the optimizer steps.

    REDUCE_GRAD   holders of a shared parameter exchange their accumulators; each sums them in use order
    REDUCE_NORM   norms of single tensors travel down to stage 0, the total travels back up
    STEP          refuse what is not finite, clip, step

Stage 0 finishes its backwards last, so everybody else's norms have arrived by the time it has its own. Asynchronous
schedules may let every stage take its own norm instead: it then waits for nobody. Where the ring of weight versions
has no room for another one, all three do nothing and the gradients join those of the next update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from raypipe.engine.gradients import GradientSink
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import Settings, StageState
from raypipe.engine.weight_ring import WeightRing
from raypipe.errors import StageError
from raypipe.ir.schedule import Action, Op

__all__ = ["Update"]

Tensors = Sequence[torch.Tensor | None]


class Update:
    """REDUCE_GRAD, REDUCE_NORM and STEP of one stage.

    Args:
        programs: of all stages.
        send: (stage, action, tensors) hands a message to another stage.
        receive: (stage, the sender's action) waits for one.
        settings: the norm to clip to, and whose norm that is.
    """

    def __init__(
        self,
        programs: Sequence[StageProgram],
        stage: int,
        state: StageState,
        sink: GradientSink,
        ring: WeightRing,
        send: Callable[[int, Action, Tensors], None],
        receive: Callable[[int, Action], tuple[torch.Tensor | None, ...]],
        settings: Settings,
    ) -> None:
        self._programs = programs
        self._program = programs[stage]
        self._stage = stage
        self._last = stage == len(programs) - 1
        self._state = state
        self._sink = sink
        self._send = send
        self._receive = receive
        self._ring = ring
        self._limit = settings.max_grad_norm
        shares = settings.weights.shares
        self._share = shares[stage] if shares else 1.0
        self._put_off = 0  # updates since the last one that was made
        self._waits = False  # whether this one is put off
        self._sharing = sorted({s for stages in self._program.shared_with.values() for s in stages} - {stage})

    def reduce_grad(self, action: Action) -> None:
        """Fill every ``parameter.grad``: the mean of this update's and of those put off before it."""
        self._waits = not self._ring.has_room()
        if self._waits:
            self._put_off += 1
            return
        for peer in self._sharing:
            self._send(peer, action, self._sink.exported(peer))
        imported = {
            peer: self._receive(peer, Action(peer, Op.REDUCE_GRAD, action.microbatch)) for peer in self._sharing
        }
        self._sink.finish(imported, {peer: self._programs[peer] for peer in self._sharing})
        if self._put_off:
            self._scale(1.0 / (1 + self._put_off))
            self._put_off = 0

    def own_norm(self) -> torch.Tensor | None:
        """Gradient norm of this stage alone; None where the update is put off."""
        if self._waits:
            return None
        where, norms = self._own_norms()
        return torch.linalg.vector_norm(norms[torch.argsort(where)])

    def reduce_norm(self, action: Action, loss: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(gradient norm of the whole model, loss), the same on every stage.

        The total is the norm of the stacked norms in the order of the user's named_parameters(), which is
        what torch computes, so it does not depend on the partition.

        Args:
            loss: of the mini-batch, on the last stage.
        """
        stage, microbatch = self._stage, action.microbatch
        where, norms = self._own_norms()
        if not self._last:
            above, more, loss = self._receive(stage + 1, Action(stage + 1, Op.REDUCE_NORM, microbatch))
            assert above is not None
            assert more is not None
            where, norms = torch.cat([where, above]), torch.cat([norms, more])
        if stage:
            self._send(stage - 1, action, [where, norms, loss])
            total, loss = self._receive(stage - 1, Action(stage - 1, Op.REDUCE_NORM, microbatch))
        else:
            total = torch.linalg.vector_norm(norms[torch.argsort(where)])
        if not self._last:
            self._send(stage + 1, action, [total, loss])
        assert total is not None
        assert loss is not None
        return total, loss

    def _own_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions in named_parameters() and norms of the gradients that this stage is the first to hold."""
        positions, norms = [], []
        for name, parameter in self._state.parameters.items():
            owner = self._program.shared_with.get(name, (self._stage,))[0]
            if owner == self._stage and parameter.grad is not None:
                positions.append(self._program.order[name])
                norms.append(torch.linalg.vector_norm(parameter.grad))
        return torch.tensor(positions, dtype=torch.int64), torch.stack(norms) if norms else torch.empty(0)

    def step(self, step: int, total: torch.Tensor | None, loss: torch.Tensor | None, *, alone: bool) -> None:
        """Clip and step, or refuse. Where all stages see the same norm, none steps when one refuses.

        Args:
            total: norm to clip by; None where the update is put off.
            loss: of the mini-batch so far, where this stage knows it.
            alone: the norm is that of this stage.

        Raises:
            StageError: loss or norm is not finite.
        """
        if total is None:
            self._advance_scheduler()
            return
        if not torch.isfinite(total) or not (loss is None or torch.isfinite(loss)):
            raise StageError(_not_finite(step, self._stage, total, loss, alone=alone))
        if self._limit is not None:
            limit = self._limit * (math.sqrt(self._share) if alone else 1.0)
            self._scale(torch.clamp(limit / (total + 1e-6), max=1.0))
        self._ring.advance()
        if self._state.optimizer is not None:
            self._state.optimizer.step()
            self._ring.follow()
        self._advance_scheduler()
        self._sink.reset()

    def _advance_scheduler(self) -> None:
        """Put-off updates count too, so that the learning rate is the same on every stage."""
        if self._state.scheduler is not None:
            self._state.scheduler.step()

    def _scale(self, factor: torch.Tensor | float) -> None:
        for parameter in self._state.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def _not_finite(step: int, stage: int, total: torch.Tensor, loss: torch.Tensor | None, *, alone: bool) -> str:
    advice = "Lower the learning rate, set max_grad_norm, or look at the data of this mini-batch."
    if not alone:
        assert loss is not None
        return (
            f"Step {step}: the loss is {float(loss):g} and the gradient norm {float(total):g}, so no stage took "
            f"this step and the parameters are those after {step} steps. {advice}"
        )
    known = "" if loss is None else f"the loss is {float(loss):g} and "
    return (
        f"Step {step}: {known}the gradient norm of stage {stage} is {float(total):g}, so it refused the update. Other "
        f"stages may have gone on, as an asynchronous schedule does; the newest checkpoint is whole. {advice}"
    )
