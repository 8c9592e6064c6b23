"""At what the seconds of all stages have settled, once they have: one that changes for a few steps says nothing yet.

step      0 1 2 3 4 5 6 7 8 9 ...                 x: a stage differs from its running mean, see ``drift``
          x . . . . . x x . . . . . .
settled               |       |           x x: its earlier steps are forgotten, the medians are of the later ones
          not yet ----+ yes   +-- not yet --- yes
"""

from __future__ import annotations

from collections.abc import Iterable

from raypipe.ir.links import StageSample
from raypipe.planner.control.drift import News
from raypipe.planner.control.stages import StageEstimator

__all__ = ["Pace"]

SETTLED_STEPS = 6
"""In a row without a change, after which what is measured counts as lasting."""


class Pace:
    """Told of every step.

    Args:
        drift_threshold: relative change of a stage's seconds that is one.
    """

    def __init__(self, num_stages: int, drift_threshold: float) -> None:
        self._stages = StageEstimator(num_stages, drift_threshold)
        self._calm_steps = 0

    def add(self, samples: Iterable[StageSample]) -> tuple[float, ...] | None:
        """Take in one step.

        Returns:
            seconds of forward and backward of one micro-batch, by stage; None while they have not settled.
        """
        changed = self._stages.add(samples) is News.CHANGED
        self._calm_steps = 0 if changed else self._calm_steps + 1
        if self._calm_steps < SETTLED_STEPS or not self._stages.complete:
            return None
        forward_s, backward_s, _ = self._stages.seconds()
        return tuple(f + b for f, b in zip(forward_s, backward_s, strict=True))
