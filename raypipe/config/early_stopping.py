"""EarlyStopping: when a run ends before its last step, because evaluations get no better."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from raypipe.errors import ConfigError

__all__ = ["EarlyStopping", "may_give"]


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """End a run whose evaluations get no better.

    What decides is the whole row of evaluations that eval_interval_steps asks for, those of earlier submissions
    included: a run that was stopped and goes on ends where it would have ended. Evaluations at the end of a submission
    and with checkpoints do not count.

    Attributes:
        metric: "eval_loss", or "eval_<name>" of one of the trainer's metrics; "eval_<name>_<key>" where it gives
            several numbers.
        patience: evaluations in a row that are no better than the best before them.
        mode: "min" where less is better, "max" where more is.
        min_delta: by how much better an evaluation must be to count.

    Raises:
        ConfigError: names the field.
    """

    metric: str = "eval_loss"
    patience: int = 3
    mode: Literal["min", "max"] = "min"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric.startswith("eval_"):
            raise ConfigError(f"EarlyStopping(metric={self.metric!r}): give 'eval_loss' or 'eval_<name>' of a metric.")
        if type(self.patience) is not int or self.patience < 1:
            raise ConfigError(f"EarlyStopping(patience={self.patience!r}): give an integer of at least 1.")
        if self.mode not in ("min", "max"):
            raise ConfigError(f"EarlyStopping(mode={self.mode!r}): give 'min' where less is better, or 'max'.")
        if type(self.min_delta) not in (int, float) or not 0 <= self.min_delta < math.inf:
            raise ConfigError(f"EarlyStopping(min_delta={self.min_delta!r}): give a number of at least 0.")

    def verdict(self, values: Iterable[float]) -> str:
        """Why the run ends after these evaluations, in their order; empty where it goes on. nan is never better."""
        sign = 1.0 if self.mode == "max" else -1.0
        best, waited = -math.inf, 0
        for value in values:
            better = sign * value > best + (self.min_delta if math.isfinite(best) else 0.0)
            best, waited = (sign * value, 0) if better else (best, waited + 1)
        if waited < self.patience:
            return ""
        if best == -math.inf:
            return f"{self.metric} has been no finite number for {waited} evaluations"
        return f"{self.metric} has not got better than {sign * best:g} for {waited} evaluations"


def may_give(names: Collection[str], wanted: str) -> bool:
    """Whether evaluations may have this number.

    Args:
        names: "eval_loss" and "eval_<name>" of the metrics, each of which may give several numbers, as
            eval_<name>_<key>; which ones is known once they were called.
    """
    return wanted in names or any(wanted.startswith(f"{name}_") for name in names if name != "eval_loss")
