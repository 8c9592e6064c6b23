"""When the stages copy their state: as often as that is worth its cost, and not before everybody has the copy before.

    ordered     copy 20 . . . . . . . . . copy 30      21 ... 29: too soon, or some stage's copy 20 has not arrived
    reports     . . stage 0: 20 . stage 1: 20 .

An asynchronous schedule runs empty at fixed numbers of steps, whether a copy is taken there or not: running empty
changes bits, a copy does not.

A stage that took copy 30 while the holder of another one has no more than copy 10 of it would have overwritten its own
copy 10, and nothing would be left to go back to together. So the next copy is ordered when all have the one before.

What a copy costs is what the steps beside it took longer than those without one, and at least what copying took. The
former is too much where something else slowed these steps, as a spare that starts, so that the interval grows to twice
itself at most with each copy. The first copies after workers came say nothing: they go into new memory, which takes
several times as long. Until others are known, only the time that sending took keeps them apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from raypipe.ir.report import StepReport
from raypipe.planner.copies import MOST_STEPS, CopyCosts, copy_interval

__all__ = ["CopyTimes"]

WINDOW_STEPS, WINDOW_COPIES = 16, 9
GROWTH = 2
"""Of the interval from one copy to the next."""
NEW_MEMORY_COPIES = 3
"""A stage has two places for copies, and those before its optimizer's first step are smaller."""
AGAIN_STEPS = 32
"""After so many steps the next copy is ordered although nobody has said that the one before has arrived, where nobody
sends it any more: its holder failed to take it, or a worker still sent the one before it and took none."""


class CopyTimes:
    """Of one run.

    Attributes:
        interval: steps between two copies; 0 until one has told what it costs.

    Args:
        least_steps: between two copies; None for none at all.
    """

    def __init__(self, least_steps: int | None) -> None:
        self._least_steps = least_steps
        self._at = 0  # step of the newest copy that was ordered
        self._arrived, self._under_way = True, False
        self._into_new_memory = NEW_MEMORY_COPIES  # so many of the next ones
        self.interval = 0
        self._calm_s: deque[float] = deque(maxlen=WINDOW_STEPS)  # of steps without a copy
        self._copying_s: list[float] = []  # of those beside the newest copy
        self._costs_s: deque[float] = deque(maxlen=WINDOW_COPIES)

    def empties(self, step: int) -> bool:
        """Whether an asynchronous schedule runs empty after that step, so that a copy can be taken."""
        return self._least_steps is not None and step % self._least_steps == 0

    def due(self, step: int) -> bool:
        """Whether a copy is to be taken after that step."""
        if self._least_steps is None:
            return False
        since = step - self._at
        failed = since >= AGAIN_STEPS and not self._under_way
        return since >= max(self._least_steps, self.interval) and (self._arrived or failed)

    def ordered(self, step: int) -> None:
        """A copy will be taken after that step, or was; also an earlier one than before, where the run went back."""
        self._at, self._arrived, self._copying_s = step, False, []

    def soon(self) -> None:
        """One is due after the next step, whatever became of the one before: workers have gone or come."""
        self._at, self._arrived, self._copying_s = -MOST_STEPS, True, []
        self._into_new_memory = NEW_MEMORY_COPIES

    def heard(self, seconds: float, of_step: Sequence[StepReport]) -> None:
        """What all stages say of a step that took so long."""
        if self._least_steps is None:
            return
        self._under_way = any(report.copying for report in of_step)
        (self._copying_s if self._under_way else self._calm_s).append(seconds)
        copied = [report.copied for report in of_step if report.copied is not None]
        if self._arrived or len(copied) < len(of_step) or any(copy.step != self._at for copy in copied):
            return
        self._arrived = True
        first, self._into_new_memory = self._into_new_memory > 0, max(0, self._into_new_memory - 1)
        if self._calm_s:
            step_s, sent_s = median(self._calm_s), max(copy.sent_s for copy in copied)
            if first:
                self.interval = self.interval or copy_interval(CopyCosts(step_s, 0.0, sent_s))
                return
            # Some come out below nothing where steps vary: cut off, the middle of them would be too much.
            self._costs_s.append(sum(self._copying_s) - len(self._copying_s) * step_s)
            copying = CopyCosts(step_s, max(copy.copied_s for copy in copied), sent_s)
            cost_s = max(median(self._costs_s), copying.cost_s)
            wanted = copy_interval(copying._replace(cost_s=cost_s))
            self.interval = max(copy_interval(copying), min(GROWTH * self.interval, wanted))
