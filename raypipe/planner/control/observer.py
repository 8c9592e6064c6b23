"""Everything that is measured, in one place: all hops and all stages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from raypipe.ir.links import LinkEstimate, LinkSample, StageSample
from raypipe.planner.control.drift import News
from raypipe.planner.control.links import LinkEstimator
from raypipe.planner.control.measured import Measured
from raypipe.planner.control.stages import StageEstimator

__all__ = ["Observer", "hop_name"]

MOST_REPLAYS = 4
"""Steps that a candidate is run for where messages differ from each other."""
ALIKE = 0.02
"""Messages whose middle four fifths differ by less, relatively to a micro-batch's computation, are alike."""


def hop_name(hop: int) -> str:
    """What a person is told that changed."""
    return f"link {hop} - {hop + 1}"


class Observer:
    """Measurements in, estimates out.

    Args:
        drift_threshold: relative change that counts as one.
    """

    def __init__(self, num_stages: int, drift_threshold: float) -> None:
        self._links = [LinkEstimator(hop, drift_threshold) for hop in range(num_stages - 1)]
        self._stages = StageEstimator(num_stages, drift_threshold)

    def add(self, stages: Iterable[StageSample], messages: Iterable[LinkSample]) -> tuple[News, str]:
        """Take in one step; the most alarming word about any link or stage, and who it is about."""
        by_hop: dict[int, list[LinkSample]] = {}
        for m in messages:
            by_hop.setdefault(m.hop, []).append(m)
        words = {hop_name(link.hop): link.add(by_hop.get(link.hop, ())) for link in self._links}
        words["a stage's computation"] = self._stages.add(stages)
        for news in (News.CHANGED, News.SUSPECT):
            who = [name for name, word in words.items() if word is news]
            if who:
                return news, ", ".join(who)
        return News.STEADY, ""

    def measured(self, num_microbatches: int) -> Measured | None:
        """What candidates are scored on; None while a stage has not been heard of."""
        if not self._stages.complete:
            return None
        forward_s, backward_s, optimizer_s = self._stages.seconds()
        links = tuple(link.estimate(forward) for link in self._links for forward in (True, False))
        slowest_s = max(f + b for f, b in zip(forward_s, backward_s, strict=True))
        steps = [len(x.draws_s) // num_microbatches for x in links if x and _spread_s(x) > ALIKE * slowest_s]
        replays = max(1, min(MOST_REPLAYS, min(steps, default=1)))
        halves = self._stages.halves()
        return Measured(num_microbatches, forward_s, backward_s, optimizer_s, links, replays, halves)

    def estimates(self) -> tuple[LinkEstimate, ...]:
        """Of every hop and direction that messages have crossed."""
        found = (link.estimate(forward) for link in self._links for forward in (True, False))
        return tuple(x for x in found if x is not None)

    def to_dict(self) -> dict[str, Any]:
        """The state, for JSON."""
        return {"links": [link.to_dict() for link in self._links], "stages": self._stages.to_dict()}

    def load(self, found: dict[str, Any]) -> None:
        """Inverse of ``to_dict``."""
        for link, row in zip(self._links, found["links"], strict=True):
            link.load(row)
        self._stages.load(found["stages"])


def _spread_s(link: LinkEstimate) -> float:
    ordered = sorted(link.draws_s)
    return ordered[int(0.9 * (len(ordered) - 1))] - ordered[int(0.1 * (len(ordered) - 1))]
