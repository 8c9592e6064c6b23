"""Weight versions: which one a micro-batch uses, how many a stage keeps, and how stale that makes its gradients.

    update      0       1       2                 of a stage, counted from the last time the pipeline was empty
    version  0  |   1   |   2   |   3             version v is the result of v updates

A micro-batch's backward always uses the version that its forward used (weight stashing, PipeDream, SOSP'19, 3.3).
The rules differ in which version a forward takes; k counts micro-batches from the last empty pipeline, u is the
update interval, and w_s are the forwards that stage s runs ahead of its backwards.

    NEWEST    what the stage has:         max(0, (k - w_s) // u)     stashing; differs between stages
    STAMPED   what stage 0 had:           max(0, (k - w_0) // u)     vertical sync: the same on every stage
    DELAYED   one before the last:        max(0, k // u - 1)         PipeDream-2BW, arXiv:2006.09503
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["SYNCHRONOUS", "VersionRule", "WeightPolicy", "versions_needed"]


class VersionRule(Enum):
    """Which weight version a forward takes; see the module."""

    NEWEST = "newest"
    STAMPED = "stamped"
    DELAYED = "delayed"


@dataclass(frozen=True, slots=True)
class WeightPolicy:
    """What the stages do with their weights from one update to the next.

    Attributes:
        rule: which version a forward takes.
        interval: u, micro-batches per update; None for one update per mini-batch with an empty pipeline around it.
        intervals: u_s by stage, where stages update more often than every ``interval``, which is a multiple of all;
            empty where they do not.
        capacities: versions that each stage has room for, by stage; empty for one. An update that finds no room is
            put off, and its gradients join those of the next.
        ahead: w_0, forwards that stage 0 runs ahead of its backwards.
        norm_per_stage: every stage takes the norm of its own gradients, waits for nobody, and clips it to
            max_grad_norm times the root of its share; False takes the norm of the whole model.
        shares: of the trainable numbers, by stage.
        puts_off: some stage may have no room for a version that an update would make.
    """

    rule: VersionRule = VersionRule.NEWEST
    interval: int | None = None
    capacities: tuple[int, ...] = ()
    ahead: int = 0
    norm_per_stage: bool = False
    shares: tuple[float, ...] = ()
    intervals: tuple[int, ...] = ()
    puts_off: bool = False

    def interval_of(self, stage: int) -> int:
        """Micro-batches per update of a stage of an asynchronous schedule."""
        assert self.interval is not None
        return self.intervals[stage] if self.intervals else self.interval

    def rate(self, stage: int) -> float:
        """By what a stage multiplies the learning rate: u_s / u_0.

        A stage that takes a mean over twice as many micro-batches updates half as often, so that with the same rate its
        weights would move half as far for the same gradients (PipeDream's runtime; the rate that is set is stage 0's).
        """
        return self.intervals[stage] / self.intervals[0] if self.intervals else 1.0

    @property
    def synchronous(self) -> bool:
        return self.interval is None

    def capacity(self, stage: int) -> int:
        """Versions that ``stage`` has room for."""
        return self.capacities[stage] if self.capacities else 1


SYNCHRONOUS = WeightPolicy()
"""One version, updated while the pipeline is empty."""


def versions_needed(rule: VersionRule, interval: int, warmups: Sequence[int], stage: int) -> int:
    """Versions that a stage holds at most, so that no update is put off.

    Just before an update the micro-batches under way use ceil(w / u) versions, w being w_s, or w_0 where stage 0
    says which; the update makes one more.
    """
    if rule is VersionRule.DELAYED:
        return 2
    ahead = warmups[stage] if rule is VersionRule.NEWEST else warmups[0]
    return math.ceil(ahead / interval) + 1
