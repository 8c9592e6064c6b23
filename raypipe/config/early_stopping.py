"""EarlyStopping: ends a run before its last step if evaluations do not improve any more."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from raypipe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """Rule that ends a run if its evaluations do not improve any more.

    Only the evaluations at multiples of eval_interval_steps count. Evaluations at the end of a submission, or for a
    checkpoint, do not count. Evaluations of earlier submissions count too, so a run that was stopped and resumed ends
    at the same step as without the interruption.

    Attributes:
        metric: "eval_loss", or "eval_<name>" of one of the trainer's metrics, or "eval_<name>_<key>" if that metric
            returns several numbers.
        patience: number of consecutive evaluations without an improvement after which the run ends.
        mode: "min" if smaller values are better, "max" if larger ones are.
        min_delta: an evaluation is an improvement if it is better than the best earlier value by more than this.

    Raises:
        ConfigError: a field has an impossible value; names the field.
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
        """Return the reason why the run ends now; "" if it continues.

        Args:
            values: results of all evaluations so far, oldest first. NaN is never an improvement.
        """
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
    """Return True if evaluations may have a result with the name ``wanted``.

    A metric may return several numbers, which are named eval_<name>_<key>. The keys are not known before the metrics
    are called, so any key is accepted.

    Args:
        names: "eval_loss" and "eval_<name>" of each metric.
    """
    return wanted in names or any(wanted.startswith(f"{name}_") for name in names if name != "eval_loss")
