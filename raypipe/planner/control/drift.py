"""Change detection: a running mean, and the steps that disagree with it.

        ordinary step: the mean moves a little
  +---+
  v   | agrees
steady ---- differs ----> suspect ---- differs again ----> changed: the mean starts anew from both
  ^                          |
  +--------- agrees ---------+        a single outlier is noise and hardly moves the mean
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

__all__ = ["Drift", "News"]


class News(StrEnum):
    """What a step says about the watched number."""

    STEADY = "steady"
    SUSPECT = "suspect"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class Drift:
    """Change detection of one number.

    Attributes:
        threshold: relative distance from the mean from which on a step disagrees.
        floor_s: distances below ``threshold * floor_s`` never count, however small the mean is.
        weight: of the newest step in the mean.
        mean_s: None before the first step.
        odd_s: the value of the last step, where it disagreed with the mean.
    """

    threshold: float
    floor_s: float
    weight: float = 0.2
    mean_s: float | None = None
    odd_s: float | None = None

    def after(self, seconds: float) -> tuple[Drift, News]:
        """The state after one more step, and what that step says."""
        if self.mean_s is None:
            return replace(self, mean_s=seconds), News.STEADY
        allowed_s = self.threshold * max(self.mean_s, self.floor_s)
        change_s = seconds - self.mean_s
        if abs(change_s) <= allowed_s:
            # The outlier before is clipped: it moves the mean no further than an ordinary step can.
            odd_s = 0.0 if self.odd_s is None else max(-allowed_s, min(allowed_s, self.odd_s - self.mean_s))
            mean_s = max(0.0, self.mean_s + self.weight * (change_s + odd_s))
            return replace(self, mean_s=mean_s, odd_s=None), News.STEADY
        if self.odd_s is not None and (self.odd_s > self.mean_s) == (seconds > self.mean_s):
            return replace(self, mean_s=(self.odd_s + seconds) / 2, odd_s=None), News.CHANGED
        return replace(self, odd_s=seconds), News.SUSPECT

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
