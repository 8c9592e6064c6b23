"""Goodput: the share of a run's time in which it got further.

    wall time   | step | step | failure, recovery | step | evaluation | step |
    counts        yes    no                          yes                 yes      the second one was done again

The time of steps, each of them once and those left out as not finite not at all, over the time since the stages were
ready. Recoveries, evaluations, waiting for workers, resizes and steps that are done again lower it. One submission is
looked at; of steps that a driver took over the time is not known, and they count neither way.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

from raypipe.ir.report import StepRecord

__all__ = ["Goodput"]


class Goodput:
    """Of one submission.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun_s: float | None = None
        self._first = 0
        self._sums = array("d", [0.0])  # seconds of the steps from the first on, added up

    def begin(self, step: int) -> None:
        """The stages are ready, and have done so many steps."""
        self._begun_s, self._first, self._sums = self._clock(), step, array("d", [0.0])

    def done(self, record: StepRecord) -> float:
        """A step is over; the goodput up to now, from 0 to 1, and 0 where it is not known."""
        if self._begun_s is None:
            return 0.0
        self._sums.append(self._sums[-1] + (0.0 if record.skipped else record.seconds))
        wall_s = self._clock() - self._begun_s
        return min(1.0, self._sums[-1] / wall_s) if wall_s > 0 else 0.0

    def go_back(self, step: int) -> None:
        """The run goes on after this step; what came behind it was for nothing."""
        del self._sums[max(1, 1 + step - self._first) :]
        self._first = min(self._first, step)
