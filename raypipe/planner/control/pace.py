"""At what the seconds of all stages have settled, once they have: one that changes for a few steps says nothing yet.

step      0 1 2 3 4 5 6 7 8 9 ...                 x: a stage differs from its running mean, see ``drift``
          x . . . . . x x . . . . . .
settled               |       |           x x: its earlier steps are forgotten, the medians are of the later ones
          not yet ----+ yes   +-- not yet --- yes

Steps beside a copy of the state are not measured, and pass all the same: where every second one is, a new pace counts
after eight steps, not after twelve.
"""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.ir.links import StageSample
from raypipe.planner.control.drift import News
from raypipe.planner.control.stages import StageEstimator

__all__ = ["Pace"]

SETTLED_STEPS = 6
"""That pass without a change, after which what is measured counts as lasting."""
MEASURED_STEPS = 4
"""Of them, at least: with the two that showed a change they are what the medians are of."""


class Pace:
    """Told of every step that was measured.

    Args:
        drift_threshold: relative change of a stage's seconds that is one.
    """

    def __init__(self, num_stages: int, drift_threshold: float) -> None:
        self._stages = StageEstimator(num_stages, drift_threshold)
        self._since: int | None = None  # the step of the last change, or the one before the first
        self._measured = 0  # steps since then

    def add(self, samples: Sequence[StageSample]) -> tuple[float, ...] | None:
        """Take in one step.

        Args:
            samples: of all stages.

        Returns:
            seconds of forward and backward of one micro-batch, by stage; None while they have not settled.
        """
        step = samples[0].step
        if self._since is None or self._since >= step:  # the second where the run went back
            self._since, self._measured = step - 1, 0
        if self._stages.add(samples) is News.CHANGED:
            self._since, self._measured = step, 0
        else:
            self._measured += 1
        if step - self._since < SETTLED_STEPS or self._measured < MEASURED_STEPS or not self._stages.complete:
            return None
        forward_s, backward_s, _ = self._stages.seconds()
        return tuple(f + b for f, b in zip(forward_s, backward_s, strict=True))
