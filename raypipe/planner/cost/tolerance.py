"""Tolerance within which two predicted times count as equal for a choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

EVEN = 0.005
"""Relative difference up to which predicted seconds count as equal; then the option that costs less memory, workers or
accuracy is taken. Models and measurements are not exact enough to distinguish such seconds.
"""

MIN_GAIN = 0.03
"""Default of the relative gain in step time that is worth a switch of the controller, or a lossy codec in a plan."""

T = TypeVar("T")


def as_quick(options: Sequence[T], seconds: Callable[[T], float]) -> list[T]:
    """Return the items whose seconds count as equal to the shortest, in the order of ``options``; at least one."""
    best_s = min(map(seconds, options))
    return [one for one in options if seconds(one) <= best_s * (1 + EVEN)]
