"""Over which links the messages of a step go: with replicas of stages, a hop has several.

    stages 2-1, lanes 2       link 0: worker 0 - 2, micro-batches 0 2 4 ...       link 1: worker 1 - 2, 1 3 5 ...
    stages 1-1-1              link 0: worker 0 - 1, all micro-batches             link 1: worker 1 - 2, all

Every link is a connection of its own and keeps its messages in order, both ways.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from raypipe.ir.schedule import Homes, Wiring
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.schedule.replicas import Replicas

__all__ = ["Routes", "routes_of"]


@dataclass(frozen=True, slots=True)
class Routes:
    """Of synchronous schedules with a stage on each worker.

    Attributes:
        homes: workers by stage.
        lanes: L, into which the micro-batches of a step are dealt out.
        workers: by stage and lane, who runs it: ``Wiring.by_lane``.
        ends: by link, (hop, worker that has the lower stage, worker that has the higher); hop after hop.
        by_lane: by hop and lane, (link, lanes before this one that share it, all lanes that do).
    """

    homes: Homes
    lanes: int
    workers: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, int, int], ...]
    by_lane: tuple[tuple[tuple[int, int, int], ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.homes)

    @property
    def stages(self) -> tuple[int, ...]:
        """By worker, the stage that it has."""
        return tuple(stage for stage, workers in enumerate(self.homes) for _ in workers)

    @property
    def hops(self) -> tuple[int, ...]:
        """By link."""
        return tuple(hop for hop, _, _ in self.ends)

    def links_of(self, hop: int) -> list[int]:
        """Links that join stage hop to stage hop + 1."""
        return [link for link, (at, _, _) in enumerate(self.ends) if at == hop]

    def name(self, link: int) -> str:
        """Of a link, for people: its stages, and its workers where others join these stages too."""
        hop, source, target = self.ends[link]
        return f"link {hop} - {hop + 1}" + f" (workers {source} - {target})" * (len(self.links_of(hop)) > 1)

    def place_of(self, hop: int, microbatch: int) -> tuple[int, int]:
        """The link that a message of this micro-batch crosses, and how many of its step cross it before."""
        link, before, each = self.by_lane[hop][microbatch % self.lanes]
        return link, microbatch // self.lanes * each + before

    def microbatches_of(self, worker: int, count: int) -> Iterator[int]:
        """Those of ``count`` that a worker runs, counted from 0 in their step, in their order."""
        by_lane = self.workers[self.stages[worker]]
        return (m for m in range(count) if by_lane[m % self.lanes] == worker)

    def messages(self, num_microbatches: int) -> tuple[int, ...]:
        """By link, how many of a step cross it, each way."""
        found = [0] * len(self.ends)
        for row in self.by_lane:
            for lane, (link, _, _) in enumerate(row):
                found[link] += len(range(lane, num_microbatches, self.lanes))
        return tuple(found)


def routes_of(spec: ScheduleSpec, num_stages: int) -> Routes:
    """The links of a schedule."""
    return _routes(Replicas(spec.replicas, spec.lanes), num_stages)


@functools.lru_cache(maxsize=64)
def _routes(replicas: Replicas, num_stages: int) -> Routes:
    homes, lanes = replicas.homes(num_stages), replicas.lanes
    workers = Wiring(homes, lanes, lanes=lanes).by_lane
    ends = [[(hop, *pair) for pair in zip(*pairs, strict=True)] for hop, pairs in enumerate(pairwise(workers))]
    links = sorted({end for by_lane in ends for end in by_lane})
    by_lane = (
        tuple((links.index(end), row[:lane].count(end), row.count(end)) for lane, end in enumerate(row)) for row in ends
    )
    return Routes(homes, lanes, workers, tuple(links), tuple(by_lane))
