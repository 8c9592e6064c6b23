"""Everything that is measured, in one place: all hops and all stages."""

from __future__ import annotations

from typing import Any, NamedTuple

from raypipe.ir.links import LinkEstimate, LinkSample
from raypipe.planner.control.drift import News
from raypipe.planner.control.events import StepDone
from raypipe.planner.control.links import LinkEstimator
from raypipe.planner.control.measured import Measured
from raypipe.planner.control.stages import StageEstimator

__all__ = ["Observed", "Observer"]

MOST_REPLAYS = 4
"""Steps that a candidate is run for where messages differ from each other."""
ALIKE = 0.02
"""Messages whose middle four fifths differ by less, relatively to a micro-batch's computation, are alike."""


class Observed(NamedTuple):
    """What one step says.

    Attributes:
        news: the most alarming word about any link or stage.
        who: it is about, in words; "" for nobody.
        hops: it is about.
    """

    news: News = News.STEADY
    who: str = ""
    hops: tuple[int, ...] = ()


class Observer:
    """Measurements in, estimates out.

    Args:
        num_microbatches: M that the run begins with.
        drift_threshold: relative change that counts as one.
    """

    def __init__(self, num_stages: int, num_microbatches: int, drift_threshold: float) -> None:
        self._num_stages, self._num_microbatches, self._threshold = num_stages, num_microbatches, drift_threshold
        self._forget()

    def _forget(self) -> None:
        self._links = [LinkEstimator(hop, self._threshold) for hop in range(self._num_stages - 1)]
        self._stages = StageEstimator(self._num_stages, self._threshold)

    def add(self, done: StepDone) -> Observed:
        """Take in one step.

        With another M actions and messages are others than those measured so far, and the first step with it is like
        no other: all is forgotten, and that step is left out.
        """
        if done.choice.num_microbatches != self._num_microbatches:
            self._num_microbatches = done.choice.num_microbatches
            self._forget()
            return Observed()
        by_hop: dict[int, list[LinkSample]] = {}
        for m in done.messages:
            by_hop.setdefault(m.hop, []).append(m)
        links = [link.add(by_hop.get(link.hop, ())) for link in self._links]
        stages = self._stages.add(done.stages)
        for news in (News.CHANGED, News.SUSPECT):
            hops = tuple(hop for hop, word in enumerate(links) if word is news)
            names = [f"link {hop} - {hop + 1}" for hop in hops] + ["a stage's computation"] * (stages is news)
            if names:
                return Observed(news, ", ".join(names), hops)
        return Observed()

    def measured(self) -> Measured | None:
        """What candidates are scored on; None while a stage has not been heard of."""
        if not self._stages.complete:
            return None
        num_microbatches = self._num_microbatches
        forward_s, backward_s, optimizer_s = self._stages.seconds()
        links = tuple(link.estimate(forward) for link in self._links for forward in (True, False))
        slowest_s = max(f + b for f, b in zip(forward_s, backward_s, strict=True))
        steps = [len(x.draws_s) // num_microbatches for x in links if x and _spread_s(x) > ALIKE * slowest_s]
        replays = max(1, min(MOST_REPLAYS, min(steps, default=1)))
        split_backward_s = self._stages.split_backward_s()
        return Measured(num_microbatches, forward_s, backward_s, optimizer_s, links, replays, split_backward_s)

    def estimates(self) -> tuple[LinkEstimate, ...]:
        """Of every hop and direction that messages have crossed."""
        found = (link.estimate(forward) for link in self._links for forward in (True, False))
        return tuple(x for x in found if x is not None)

    def to_dict(self) -> dict[str, Any]:
        """The state, for JSON."""
        return {
            "num_microbatches": self._num_microbatches,
            "links": [link.to_dict() for link in self._links],
            "stages": self._stages.to_dict(),
        }

    def load(self, found: dict[str, Any]) -> None:
        """Inverse of ``to_dict``."""
        self._num_microbatches = int(found["num_microbatches"])
        for link, row in zip(self._links, found["links"], strict=True):
            link.load(row)
        self._stages.load(found["stages"])


def _spread_s(link: LinkEstimate) -> float:
    ordered = sorted(link.draws_s)
    return ordered[int(0.9 * (len(ordered) - 1))] - ordered[int(0.1 * (len(ordered) - 1))]
