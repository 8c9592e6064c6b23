"""Steps before a switch against steps after it: did the switch pay?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from raypipe.planner.control.choice import Choice

__all__ = ["Comparison", "typical_s", "uncertainty_s"]

FEWEST = 4
"""Steps after a switch before it is judged."""
MOST = 16
"""Steps after which it is judged in any case."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is known of a switch that was asked for.

    Attributes:
        before, after: what ran, and what runs.
        predicted_gain: relative; 0.1 means that a step before takes 1.1 times as long as a step after.
        before_s: seconds of the last steps before it, since the links changed last.
        after_s: seconds of the steps after it, without the first one, in which the pipeline changed.
        began: step in which ``after`` first ran; None before that.
    """

    before: Choice
    after: Choice
    predicted_gain: float
    before_s: tuple[float, ...]
    after_s: tuple[float, ...] = ()
    began: int | None = None

    def with_step(self, step: int, seconds: float, counts: bool) -> Comparison:
        """After one more step with the new choice."""
        if self.began is None:
            return replace(self, began=step)
        return replace(self, after_s=(*self.after_s, seconds)) if counts else self

    @property
    def achieved_gain(self) -> float:
        """Relative, by medians; 0 where one side is missing."""
        if not self.before_s or not self.after_s:
            return 0.0
        return typical_s(self.before_s) / typical_s(self.after_s) - 1.0

    def paid(self, min_gain: float) -> bool | None:
        """Whether the switch gained min_gain, or a quarter of what was predicted; None while noise hides the answer.

        A switch that only drops codecs may cost up to ``min_gain``: no gain below that is worth an approximation.
        """
        if len(self.after_s) < FEWEST:
            return None
        if not self.before_s:
            return True
        drops_codecs = self.before.lossy and not self.after.lossy
        wanted = -min_gain if drops_codecs else min(min_gain, self.predicted_gain / 4)
        margin = self.achieved_gain - wanted
        doubt = (uncertainty_s(self.before_s) + uncertainty_s(self.after_s)) / typical_s(self.after_s)
        if abs(margin) < doubt and len(self.after_s) < MOST:
            return None
        return margin >= 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        rest = {name: getattr(self, name) for name in ("predicted_gain", "before_s", "after_s", "began")}
        return {"before": self.before.to_dict(), "after": self.after.to_dict(), **rest}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Comparison:
        """Inverse of ``to_dict``, as JSON keeps it."""
        ends = {name: Choice.from_dict(found[name]) for name in ("before", "after")}
        seconds = {name: tuple(found[name]) for name in ("before_s", "after_s")}
        return cls(**{**found, **ends, **seconds})


def typical_s(seconds: Sequence[float]) -> float:
    """The median, which a single slow step does not move."""
    return median(seconds) if seconds else 0.0


def uncertainty_s(seconds: Sequence[float]) -> float:
    """About one standard error of the median, from the median deviation; 0 for a single number."""
    if len(seconds) < 2:
        return 0.0
    middle = median(seconds)
    spread_s = 1.4826 * median(abs(s - middle) for s in seconds)
    return float(1.2533 * spread_s / len(seconds) ** 0.5)
