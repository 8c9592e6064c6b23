"""Everything that is measured, in one place: all links and all workers."""

from __future__ import annotations

from typing import Any, NamedTuple

from raypipe.ir.links import LinkEstimate, LinkSample
from raypipe.planner.control.drift import News
from raypipe.planner.control.events import StepDone
from raypipe.planner.control.links import LinkEstimator
from raypipe.planner.control.measured import Measured
from raypipe.planner.control.stages import StageEstimator
from raypipe.planner.search.routes import Routes

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
        links: it is about.
    """

    news: News = News.STEADY
    who: str = ""
    links: tuple[int, ...] = ()


class Observer:
    """Measurements in, estimates out.

    Args:
        routes: workers and the links between them.
        num_microbatches: M that the run begins with.
        drift_threshold: relative change that counts as one.
    """

    def __init__(self, routes: Routes, num_microbatches: int, drift_threshold: float) -> None:
        self._routes, self._num_microbatches, self._threshold = routes, num_microbatches, drift_threshold
        self._forget()

    def _forget(self) -> None:
        self._links = [LinkEstimator(hop, self._threshold) for hop in self._routes.hops]
        self._workers = StageEstimator(len(self._routes.stages), self._threshold)

    def add(self, done: StepDone) -> Observed:
        """Take in one step.

        With another M actions and messages are others than those measured so far, and the first step with it is like
        no other: all is forgotten, and that step is left out.
        """
        if done.choice.num_microbatches != self._num_microbatches:
            self._num_microbatches = done.choice.num_microbatches
            self._forget()
            return Observed()
        by_link: list[list[LinkSample]] = [[] for _ in self._links]
        for m in done.messages:
            link, place = self._routes.place_of(m.hop, m.microbatch)
            by_link[link].append(m._replace(microbatch=place))
        words = [link.add(found) for link, found in zip(self._links, by_link, strict=True)]
        homes = self._routes.homes
        computed = self._workers.add(s._replace(stage=homes[s.stage][s.replica]) for s in done.stages)
        for news in (News.CHANGED, News.SUSPECT):
            links = tuple(link for link, word in enumerate(words) if word is news)
            names = [self._routes.name(link) for link in links] + ["a stage's computation"] * (computed is news)
            if names:
                return Observed(news, ", ".join(names), links)
        return Observed()

    def measured(self) -> Measured | None:
        """What candidates are scored on; None while a worker has not been heard of."""
        if not self._workers.complete:
            return None
        num_microbatches = self._num_microbatches
        forward_s, backward_s, optimizer_s = self._workers.seconds()
        links = tuple(link.estimate(forward) for link in self._links for forward in (True, False))
        slowest_s = max(f + b for f, b in zip(forward_s, backward_s, strict=True))
        counts = (count for count in self._routes.messages(num_microbatches) for _ in (0, 1))
        steps = [
            len(x.draws_s) // count
            for x, count in zip(links, counts, strict=True)
            if x and _spread_s(x) > ALIKE * slowest_s
        ]
        return Measured(
            num_microbatches,
            forward_s,
            backward_s,
            optimizer_s,
            links,
            replays=max(1, min(MOST_REPLAYS, min(steps, default=1))),
            split_backward_s=self._workers.split_backward_s(),
            routes=self._routes,
        )

    def estimates(self) -> tuple[LinkEstimate, ...]:
        """Of every hop and direction that messages have crossed: of its slowest link, where it has several."""
        found: dict[tuple[int, bool], LinkEstimate] = {}
        for link in self._links:
            for forward in (True, False):
                estimate, known = link.estimate(forward), found.get((link.hop, forward))
                if estimate is not None and (known is None or known.transfer_s < estimate.transfer_s):
                    found[link.hop, forward] = estimate
        return tuple(found.values())

    def to_dict(self) -> dict[str, Any]:
        """The state, for JSON."""
        return {
            "num_microbatches": self._num_microbatches,
            "links": [link.to_dict() for link in self._links],
            "stages": self._workers.to_dict(),
        }

    def load(self, found: dict[str, Any]) -> None:
        """Inverse of ``to_dict``."""
        self._num_microbatches = int(found["num_microbatches"])
        for link, row in zip(self._links, found["links"], strict=True):
            link.load(row)
        self._workers.load(found["stages"])


def _spread_s(link: LinkEstimate) -> float:
    ordered = sorted(link.draws_s)
    return ordered[int(0.9 * (len(ordered) - 1))] - ordered[int(0.1 * (len(ordered) - 1))]
