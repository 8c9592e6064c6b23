"""When two predicted times are the same for a choice between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["EVEN", "as_quick"]

EVEN = 0.005
"""Predicted seconds this near to each other, relatively, count as equal: then whatever costs less is taken, memory,
workers or accuracy. Models and measurements are not exact enough to tell them apart."""

T = TypeVar("T")


def as_quick(found: Sequence[T], seconds: Callable[[T], float]) -> list[T]:
    """Those that count as equal to the quickest, in their order; at least one of them."""
    best_s = min(map(seconds, found))
    return [one for one in found if seconds(one) <= best_s * (1 + EVEN)]
