"""The end of a mini-batch on one stage: shared gradients are summed, the norm is taken, the optimizer steps.

    REDUCE_GRAD   holders of a shared parameter exchange their accumulators; each sums them in use order
    REDUCE_NORM   norms of single tensors travel down to stage 0, the total travels back up
    STEP          refuse what is not finite, clip, step

Stage 0 finishes its backwards last, so everybody else's norms have arrived by the time it has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from raypipe.engine.gradients import GradientSink
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import StageState
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
        max_grad_norm: clip to this; None never clips.
    """

    def __init__(
        self,
        programs: Sequence[StageProgram],
        stage: int,
        state: StageState,
        sink: GradientSink,
        send: Callable[[int, Action, Tensors], None],
        receive: Callable[[int, Action], tuple[torch.Tensor | None, ...]],
        max_grad_norm: float | None,
    ) -> None:
        self._programs = programs
        self._program = programs[stage]
        self._stage = stage
        self._last = stage == len(programs) - 1
        self._state = state
        self._sink = sink
        self._send = send
        self._receive = receive
        self._max_grad_norm = max_grad_norm
        self._sharing = sorted({s for stages in self._program.shared_with.values() for s in stages} - {stage})

    def reduce_grad(self, action: Action) -> None:
        """Fill every ``parameter.grad``."""
        for peer in self._sharing:
            self._send(peer, action, self._sink.exported(peer))
        imported = {
            peer: self._receive(peer, Action(peer, Op.REDUCE_GRAD, action.microbatch)) for peer in self._sharing
        }
        self._sink.finish(imported, {peer: self._programs[peer] for peer in self._sharing})

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

    def step(self, step: int, total: torch.Tensor, loss: torch.Tensor) -> None:
        """Clip and step, or refuse: then no stage steps, for all of them see the same numbers.

        Raises:
            StageError: loss or norm is not finite.
        """
        if not torch.isfinite(total) or not torch.isfinite(loss):
            raise StageError(
                f"Step {step}: the loss is {float(loss):g} and the gradient norm {float(total):g}, so no stage took "
                f"this step and the parameters are those after {step} steps. Lower the learning rate, set "
                "max_grad_norm, or look at the data of this mini-batch."
            )
        if self._max_grad_norm is not None:
            factor = torch.clamp(self._max_grad_norm / (total + 1e-6), max=1.0)
            for parameter in self._state.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        if self._state.optimizer is not None:
            self._state.optimizer.step()
            if self._state.scheduler is not None:
                self._state.scheduler.step()
            self._sink.follow()
        self._sink.reset()
