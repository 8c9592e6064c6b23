"""The loss scale of fp16: as torch.amp.GradScaler moves it, on every stage alike.

    gradient of the loss x scale --> fp16 backward --> sums in fp32 / scale --> norm --> finite: step
                                                                                     --> else: no step, scale / 2

Small gradients would be zero in fp16, so the loss is made larger, until some gradient overflows. Every stage sees the
same norm of the whole model before it steps, so each of them moves its own copy of the scale, and all stay equal.

It is kept among the options of the optimizer's groups: checkpoints, copies in memory and another number of stages then
carry it as they carry a learning rate.
"""

from __future__ import annotations

from typing import Any

from raypipe.engine.state import StageState

__all__ = ["OPTIONS", "LossScale"]

FIRST, GROWTH, BACKOFF, PATIENCE = 2.0**16, 2.0, 0.5, 2000
"""The defaults of torch.amp.GradScaler: the first scale, its factors, and steps until it grows."""
OPTIONS = ("loss_scale", "loss_scale_steps")
"""Of an optimizer's group: the scale, and steps since it moved last."""


class LossScale:
    """Of one stage; where that trains nothing, it is never asked for."""

    def __init__(self, state: StageState) -> None:
        self._state = state

    @property
    def value(self) -> float:
        """What the loss of the next step is multiplied by; a power of two."""
        found: float = self._groups[0].get(OPTIONS[0], FIRST)
        return found

    def move(self, *, overflowed: bool) -> None:
        """A step has ended: it was taken, or left out because gradients overflowed."""
        if not self._groups:
            return
        scale, steps = self.value, self._groups[0].get(OPTIONS[1], 0) + 1
        if overflowed:
            scale, steps = scale * BACKOFF, 0
        elif steps == PATIENCE:
            scale, steps = scale * GROWTH, 0
        for group in self._groups:
            group.update(zip(OPTIONS, (scale, steps), strict=True))

    @property
    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self._state.optimizer
        return [] if optimizer is None else optimizer.param_groups
