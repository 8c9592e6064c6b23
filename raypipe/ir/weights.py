"""Weight versions: the version that a micro-batch uses, the number that a stage keeps, and the resulting staleness.

    update      0       1       2                 of a stage, counted from the last time the pipeline was empty
    version  0  |   1   |   2   |   3             version v is the result of v updates

A micro-batch's backward always uses the version that its forward used (weight stashing, PipeDream, SOSP'19, 3.3).
The rules differ in the version that a forward uses; k counts micro-batches from the last empty pipeline, u is the
update interval, and w_s is the number of forwards that stage s runs ahead of its backwards.

    NEWEST    newest on the stage:        max(0, (k - w_s) // u)     stashing; differs between stages
    STAMPED   newest on stage 0:          max(0, (k - w_0) // u)     vertical sync: the same on every stage
    DELAYED   one before the newest:      max(0, k // u - 1)         PipeDream-2BW, arXiv:2006.09503
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class VersionRule(Enum):
    """Rule for the weight version of a forward; see the module docstring."""

    NEWEST = "newest"
    STAMPED = "stamped"
    DELAYED = "delayed"


@dataclass(frozen=True, slots=True)
class WeightPolicy:
    """Policy for weight versions and updates.

    Attributes:
        rule: version that a forward uses.
        interval: u, micro-batches per update; None for one update per mini-batch, with an empty pipeline before and
            after.
        intervals: u_s by stage if stages update at different intervals, all of which divide ``interval``; else empty.
        capacities: maximum number of versions by stage; empty means one. If an update finds all of them in use, it is
            deferred: its gradients are added to those of the next update.
        ahead: w_0, forwards that stage 0 runs ahead of its backwards.
        norm_per_stage: True if every stage computes the norm of its own gradients without waiting for others, and clips
            to max_grad_norm times the square root of its share; False uses the norm of the whole model.
        shares: each stage's share of the trainable parameters.
        puts_off: True if some stage may have to defer an update.
        correction: correction for stale gradients: "none", "predict" or "discount"; see docs/schedules.md.
        delays: by stage, updates between the newest weights of a forward and the update of its gradient, on average.
        discount_updates: number of updates after which a discount of the learning rate ends.
    """

    rule: VersionRule = VersionRule.NEWEST
    interval: int | None = None
    capacities: tuple[int, ...] = ()
    ahead: int = 0
    norm_per_stage: bool = False
    shares: tuple[float, ...] = ()
    intervals: tuple[int, ...] = ()
    puts_off: bool = False
    correction: str = "none"
    delays: tuple[float, ...] = ()
    discount_updates: int = 0

    def interval_of(self, stage: int) -> int:
        """Return the number of micro-batches per update of a stage; only for an asynchronous schedule."""
        assert self.interval is not None
        return self.intervals[stage] if self.intervals else self.interval

    def rate(self, stage: int) -> float:
        """Return the factor u_s / u_0 on a stage's learning rate.

        A stage that averages twice as many micro-batches updates half as often, so with an equal rate its weights would
        move half as far for the same gradients (as in PipeDream's runtime; the configured rate is stage 0's).
        """
        return self.intervals[stage] / self.intervals[0] if self.intervals else 1.0

    def delay(self, stage: int, first_trainable: int = 0) -> float:
        """Return the updates by which the gradients of a stage are late in the steady state, on average.

        Gradients meet version (k - w) // u and belong to update k // u: the mean over k is w / u, with w = w_s, or
        that of the first trainable stage for STAMPED. A stage with few versions is late by one less than these at most.
        """
        if not self.delays:
            return 0.0
        of = first_trainable if self.rule is VersionRule.STAMPED else stage
        return min(self.delays[of], self.capacity(stage) - 1.0)

    @property
    def synchronous(self) -> bool:
        return self.interval is None

    def capacity(self, stage: int) -> int:
        """Return the maximum number of versions on ``stage``."""
        return self.capacities[stage] if self.capacities else 1


SYNCHRONOUS = WeightPolicy()
"""Policy with one version, updated while the pipeline is empty."""


def versions_needed(rule: VersionRule, interval: int, warmups: Sequence[int], stage: int) -> int:
    """Return the number of versions that a stage needs so that no update is deferred.

    Just before an update the micro-batches in flight use ceil(w / u) versions, with w = w_s, or w_0 for STAMPED; the
    update adds one.

    Args:
        interval: u, micro-batches per update.
        warmups: w_s by stage.
    """
    if rule is VersionRule.DELAYED:
        return 2
    ahead = warmups[stage] if rule is VersionRule.NEWEST else warmups[0]
    return math.ceil(ahead / interval) + 1


def discount(delay: float, update: int, updates: int) -> float:
    """Compute the factor 1 / max(1, delay) ** (1 - min(update / updates, 1)) on the learning rate of a stage.

    It discounts early updates of late stages and fades to 1 (PipeMare, arXiv:1910.05124, section 3.1, technique 1).

    Args:
        delay: updates between the weights of a gradient and its own update (``WeightPolicy.delay``).
        update: number of updates so far.
        updates: number of updates after which the factor is 1.
    """
    return float(max(1.0, delay) ** -(1.0 - min(update / updates, 1.0)))
