"""Estimators of all links and all workers of a run."""

from __future__ import annotations

from typing import NamedTuple

from raypipe.ir.communication import LinkEstimate, LinkSample
from raypipe.planner.controller.change_detection import DriftState, StageEstimator
from raypipe.planner.controller.events import StepDone
from raypipe.planner.controller.links import LinkEstimator
from raypipe.planner.controller.measured import Measured
from raypipe.planner.replay import Routes

MOST_REPLAYS = 4
"""Most steps for which a candidate is replayed if messages differ from each other."""
ALIKE = 0.02
"""Messages are alike if the middle four fifths differ by less than this fraction of a micro-batch's computation."""


class Observed(NamedTuple):
    """Changes of links and stages that one step shows.

    Attributes:
        news: CHANGED if any link or stage changed, else SUSPECT if any is suspect, else STEADY.
        who: names of the changed (or suspect) links and stages, for messages; "" for STEADY.
        links: numbers of the changed (or suspect) links.
    """

    news: DriftState = DriftState.STEADY
    who: str = ""
    links: tuple[int, ...] = ()


class Observer:
    """Observer of a run, which turns measurements of steps into estimates of all links and workers.

    Args:
        routes: workers and the links between them.
        num_microbatches: M that the run begins with.
        drift_threshold: relative change of seconds from which on a link or a stage counts as changed.
    """

    def __init__(self, routes: Routes, num_microbatches: int, drift_threshold: float) -> None:
        self._routes, self._num_microbatches, self._threshold = routes, num_microbatches, drift_threshold
        self._forget()

    def _forget(self) -> None:
        self._links = [LinkEstimator(hop, self._threshold) for hop in self._routes.hops]
        self._workers = StageEstimator(len(self._routes.stages), self._threshold)

    def add(self, done: StepDone) -> Observed:
        """Add one step, and return the changes that it shows.

        If M has changed, all earlier measurements are forgotten. The step itself is left out too, because the first
        step with a new M is unusual.
        """
        if done.choice.num_microbatches != self._num_microbatches:
            self._num_microbatches = done.choice.num_microbatches
            self._forget()
            return Observed()
        by_link: list[list[LinkSample]] = [[] for _ in self._links]
        for m in done.messages:
            link, place = self._routes.place_of(m.hop, m.microbatch)
            by_link[link].append(m._replace(microbatch=place))
        words = [link.add(messages) for link, messages in zip(self._links, by_link, strict=True)]
        homes = self._routes.homes
        computed = self._workers.add(s._replace(stage=homes[s.stage][s.replica]) for s in done.stages)
        for news in (DriftState.CHANGED, DriftState.SUSPECT):
            links = tuple(link for link, word in enumerate(words) if word is news)
            names = [self._routes.name(link) for link in links] + ["a stage's computation"] * (computed is news)
            if names:
                return Observed(news, ", ".join(names), links)
        return Observed()

    def measured(self) -> Measured | None:
        """Return the measurements that candidates are scored on; None until every worker has reported."""
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
        """Return, for every hop and direction that had messages, the estimate of the slowest link."""
        slowest: dict[tuple[int, bool], LinkEstimate] = {}
        for link in self._links:
            for forward in (True, False):
                estimate, known = link.estimate(forward), slowest.get((link.hop, forward))
                if estimate is not None and (known is None or known.transfer_s < estimate.transfer_s):
                    slowest[link.hop, forward] = estimate
        return tuple(slowest.values())


def _spread_s(link: LinkEstimate) -> float:
    ordered = sorted(link.draws_s)
    return ordered[int(0.9 * (len(ordered) - 1))] - ordered[int(0.1 * (len(ordered) - 1))]
