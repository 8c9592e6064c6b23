"""Over which links the messages of a step go: with replicas of stages, a hop has several.

    stages 2-1, lanes 2       link 0: worker 0 - 2, micro-batches 0 2 4 ...       link 1: worker 1 - 2, 1 3 5 ...
    stages 1-1-1              link 0: worker 0 - 1, all micro-batches             link 1: worker 1 - 2, all

Every link is a connection of its own and keeps its messages in order, both ways.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from raypipe.ir.schedule import Homes
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.schedule.replicas import Replicas

__all__ = ["Routes", "routes_of"]


@dataclass(frozen=True, slots=True)
class Routes:
    """Of synchronous schedules with a stage on each worker.

    Attributes:
        homes: workers by stage.
        lanes: L, into which the micro-batches of a step are dealt out.
        ends: by link, (hop, worker that has the lower stage, worker that has the higher); hop after hop.
        by_lane: by hop and lane, (link, lanes before this one that share it, all lanes that do).
    """

    homes: Homes
    lanes: int
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

    def worker_of(self, stage: int, microbatch: int) -> int:
        """Who runs the stage for this micro-batch, counted from 0 in its step."""
        workers = self.homes[stage]
        return workers[microbatch % self.lanes % len(workers)]

    def place_of(self, hop: int, microbatch: int) -> tuple[int, int]:
        """The link that a message of this micro-batch crosses, and how many of its step cross it before."""
        link, before, each = self.by_lane[hop][microbatch % self.lanes]
        return link, microbatch // self.lanes * each + before

    def microbatches_of(self, worker: int, count: int) -> Iterator[int]:
        """Those of ``count`` that a worker runs, in their order."""
        stage = self.stages[worker]
        return (m for m in range(count) if self.worker_of(stage, m) == worker)

    def messages(self, num_microbatches: int) -> tuple[int, ...]:
        """By link, how many of a step cross it, each way."""
        found = [0] * len(self.ends)
        for hop in range(self.num_stages - 1):
            for microbatch in range(num_microbatches):
                found[self.place_of(hop, microbatch)[0]] += 1
        return tuple(found)


def routes_of(spec: ScheduleSpec, num_stages: int) -> Routes:
    """The links of a schedule."""
    return _routes(Replicas(spec.replicas, spec.lanes), num_stages)


@functools.lru_cache(maxsize=64)
def _routes(replicas: Replicas, num_stages: int) -> Routes:
    homes = replicas.homes(num_stages)
    ends = [
        [
            (hop, homes[hop][lane % len(homes[hop])], homes[hop + 1][lane % len(homes[hop + 1])])
            for lane in range(replicas.lanes)
        ]
        for hop in range(num_stages - 1)
    ]
    links = sorted({end for by_lane in ends for end in by_lane})
    by_lane = (
        tuple((links.index(end), row[:lane].count(end), row.count(end)) for lane, end in enumerate(row)) for row in ends
    )
    return Routes(homes, replicas.lanes, tuple(links), tuple(by_lane))
