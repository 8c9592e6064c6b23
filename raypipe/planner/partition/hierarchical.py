"""Stages with replicas on levels of bandwidth (PipeDream, SOSP'19, section 3.1), solved by probing.

Devices form a tree: m_1 in a host, m_2 hosts in a rack, and so on, joined by bandwidth B_1, B_2, ... Seconds per
micro-batch of the best pipeline for nodes i..j on m components of level k, and of one stage replicated m times:

    T^k(i..j, m) = 1/m max( A^(k-1)(i..j, m_(k-1)), all-reduce of the stage's gradients over B_k )
    A^k(i..j, m) = min( T^k(i..j, m),  min over s, m' of max( A^k(i..s, m - m'), 2 a_s / B_k, T^k(s+1..j, m') ) )

    level 2     [ host 0      host 1 ] [ host 2 ]        two stages, of 2 and 1 hosts
    level 1       [ 0 1 ][ 2 ]                           inside a host again a pipeline: 2 replicas and 1

The tables of that recurrence cost O(N^3 m^2) per level. Asking instead whether a period can be kept, a pipeline
grows from the last node to the first, and of all with the same devices in use the one that has come furthest
is best: what is left for the others is a part of what any other leaves. That takes O(log N) per choice, and the
least period is searched for in whole picoseconds. The optimum is the recurrence's own, with two additions: a
component need not use all of its devices, and memory limits know the micro-batches in flight, ceil(workers from
the stage on / its replicas), because the walk starts at the end.

The recurrence gives a stage whole components: 15-1 on four hosts of four is none of its plans, although PipeDream's own
table has it. And it has an outer level add up gradients as often as a host completes a micro-batch, which replicas
inside the host do together only once each. So all devices are tried as one level too, a ring with the slowest link
between any two, and the better answer counts. Hosts of unequal size are one level only.

Replicas are equal: of unequal devices, those above some speed and some memory are taken, as if all were the least
of them, and every such choice is tried.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition
from raypipe.planner.columns import prefix
from raypipe.planner.partition.answer import Piece, make_answer, no_cut_fits
from raypipe.planner.partition.costs import EXCHANGE, PICO, Chain, chain_costs, exchange_ps, least_feasible
from raypipe.planner.partition.limits import Limits
from raypipe.planner.partition.prefix_sum import nearest_cut

__all__ = ["hierarchical"]


class _Level(NamedTuple):
    """Components of the level below that are joined here."""

    size: int
    bandwidth_bytes_s: float


class _Pool(NamedTuple):
    """Devices taken as equal.

    Attributes:
        devices: positions in the cluster; a component's are next to each other.
        levels: from the innermost.
    """

    devices: tuple[int, ...]
    speed: float
    capacity_bytes: int | None
    levels: tuple[_Level, ...]


class _Stage(NamedTuple):
    """Nodes between two places; workers count from the end of the component that they are in."""

    first: int
    last: int
    workers: tuple[int, ...]


class _Reach(NamedTuple):
    """The furthest that a pipeline on so many workers gets: the place where it begins, and its stages."""

    place: int
    stages: tuple[_Stage, ...]


def hierarchical(graph: ModelGraph, cluster: Cluster, limits: Limits) -> Partition:
    """Cut the nodes, in their own order, into stages with replicas; one stage on all devices is data parallelism.

    Raises:
        PlanError: ``limits.num_stages`` is set, nothing profiled, or the memory limits cannot be kept.
    """
    if limits.num_stages is not None:
        raise PlanError(
            f"hierarchical chooses the number of stages together with their replicas, so "
            f"num_stages={limits.num_stages} cannot be kept: leave it out, or use partitioner='prefix_sum'."
        )
    chain = chain_costs(graph, limits)
    answers: list[tuple[int, int, int, tuple[_Stage, ...], _Pool]] = []
    for pool in _pools(cluster, limits):
        probes = _Probes(graph, chain, pool, limits)
        lowest, highest = probes.bounds()
        if answers:  # one probe tells whether this pool can do as well as the best one so far
            highest = min(highest, min(answers)[0])
            if highest < lowest or probes.run(highest) is None:
                continue
        found = least_feasible(probes.run, lowest, highest)
        if found is not None:
            answers.append((found[0], len(found[1]), len(answers), found[1], pool))
    if not answers:
        raise no_cut_fits(graph, cluster, limits, nearest_cut(graph, cluster, limits))
    period_ps, _, _, stages, pool = min(answers)
    pieces = [_piece(chain, limits, pool, stage) for stage in stages]
    return make_answer(graph, cluster, limits, pieces, period_ps / PICO, "hierarchical")


def _piece(chain: Chain, limits: Limits, pool: _Pool, stage: _Stage) -> Piece:
    busy_ps = int(chain.time_ps[stage.last] - chain.time_ps[stage.first]) / pool.speed
    nodes = range(int(chain.positions[stage.first]), int(chain.positions[stage.last]))
    devices = tuple(sorted(pool.devices[len(pool.devices) - 1 - worker] for worker in stage.workers))
    crossing = int(chain.cut_bytes[stage.first]) // limits.memory.microbatch_size
    return Piece(nodes, devices, busy_ps / len(devices) / PICO, crossing)


class _Probes:
    """Whether a period can be kept on a pool of equal devices."""

    def __init__(self, graph: ModelGraph, chain: Chain, pool: _Pool, limits: Limits) -> None:
        self.pool, self.limits = pool, limits
        self.time_ps: list[int] = chain.time_ps.tolist()
        self.sync_bytes: list[int] = chain.sync_bytes.tolist()
        self.traffic_ps = [
            exchange_ps(chain.cut_bytes, level.bandwidth_bytes_s, limits.codecs) for level in pool.levels
        ]
        self.memory: list[list[int]] = []
        if pool.capacity_bytes is not None:
            parts = np.stack([prefix(part)[chain.positions] for part in limits.memory.node_parts(graph)])
            depths = range(1, len(pool.devices) + 1)
            self.memory = [limits.memory.at_depth(parts, depth).tolist() for depth in depths]
        self.open: dict[tuple[int, int], list[int]] = {}
        self.known: dict[tuple[int, ...], dict[int, _Reach]] = {}

    def bounds(self) -> tuple[int, int]:
        """Periods that no cut can beat, and that every cut keeps which memory allows."""
        total = self.time_ps[-1] / self.pool.speed
        traffic = max((int(x.max()) for x in self.traffic_ps), default=0)
        return int(total / len(self.pool.devices) * (1 - 1e-9)), math.ceil(total) + traffic + 1

    def run(self, period_ps: int) -> tuple[_Stage, ...] | None:
        """The stages that keep the period: of several answers the one with the fewest stages, then devices."""
        self.open, self.known = {}, {}
        found = self._fill(len(self.pool.levels), len(self.time_ps) - 1, period_ps, 1, 0)
        done = [(len(reach.stages), used, reach.stages) for used, reach in found.items() if reach.place == 0]
        return min(done)[2] if done else None

    def _fill(self, level: int, end: int, period_ps: int, copies: int, behind: int) -> dict[int, _Reach]:
        """By workers in use, the pipeline on one component of this level that ends at a place and reaches furthest.

        Args:
            copies: of the component that share the micro-batches; the period is for those of one.
            behind: workers of all stages after ``end``.
        """
        key = (level, end, period_ps, copies, behind if self.memory else 0)
        if key not in self.known:
            make = self._components if level else self._worker
            self.known[key] = make(level, end, period_ps, copies, behind)
        return self.known[key]

    def _worker(self, level: int, end: int, period_ps: int, copies: int, behind: int) -> dict[int, _Reach]:
        first = bisect_left(self.time_ps, self.time_ps[end] - math.floor(period_ps * self.pool.speed))
        if self.pool.capacity_bytes is not None:
            memory = self.memory[-(-(copies + behind) // copies) - 1]
            first = max(first, bisect_left(memory, memory[end] - self.pool.capacity_bytes))
        return {1: _Reach(first, (_Stage(first, end, (0,)),))} if first < end else {}

    def _components(self, level: int, end: int, period_ps: int, copies: int, behind: int) -> dict[int, _Reach]:
        """One stage after the other in front, each on some components of the level below."""
        count, below = self.pool.levels[level - 1].size, math.prod(x.size for x in self.pool.levels[: level - 1])
        best: list[dict[int, _Reach]] = [{0: _Reach(end, ())}, *({} for _ in range(count))]
        for taken in range(count):
            for used, behind_it in best[taken].items():
                start = self._closed_cut(level, behind_it, period_ps) if taken else behind_it
                if start is None or start.place == 0:
                    continue
                for more in range(1, self._most(count - taken, copies) + 1):
                    inner = self._fill(level - 1, start.place, period_ps * more, copies * more, behind + copies * used)
                    earliest = self._synchronised(level, start.place, period_ps, copies, more)
                    for workers, reach in inner.items():
                        moved = _begin(reach, max(reach.place, earliest))
                        if moved is None:
                            continue
                        front = [_spread(stage, taken, more, below) for stage in moved.stages]
                        row, total = best[taken + more], used + more * workers
                        if total not in row or moved.place < row[total].place:
                            row[total] = _Reach(moved.place, (*front, *start.stages))
        return _merge(best[1:])

    def _most(self, left: int, copies: int) -> int:
        most = self.limits.max_replicas
        return left if most is None else min(left, most // copies)

    def _synchronised(self, level: int, end: int, period_ps: int, copies: int, replicas: int) -> int:
        """The smallest place where a stage may begin whose replicas add up their gradients in time."""
        if replicas == 1:
            return 0
        rounds = max(self.limits.update_interval / copies, replicas)
        seconds = period_ps * rounds / PICO
        most = seconds * self.pool.levels[level - 1].bandwidth_bytes_s * replicas / (EXCHANGE * (replicas - 1))
        return bisect_left(self.sync_bytes, self.sync_bytes[end] - most)

    def _closed_cut(self, level: int, reach: _Reach, period_ps: int) -> _Reach | None:
        """The pipeline shortened to the next place whose traffic the level's links carry in time."""
        key = (level, period_ps)
        if key not in self.open:
            places = len(self.time_ps)
            numbers = np.where(self.traffic_ps[level - 1] <= period_ps, np.arange(places), places)
            self.open[key] = np.minimum.accumulate(numbers[::-1])[::-1].tolist()
        return _begin(reach, self.open[key][reach.place])


def _begin(reach: _Reach, place: int) -> _Reach | None:
    """The same pipeline from a later place on; None where that would leave nothing of its first stage."""
    first = reach.stages[0]
    if place >= first.last:
        return None
    return _Reach(place, (_Stage(place, first.last, first.workers), *reach.stages[1:]))


def _spread(stage: _Stage, taken: int, replicas: int, size: int) -> _Stage:
    """The stage of one component on several: worker numbers of all of them."""
    workers = tuple(c * size + worker for c in range(taken, taken + replicas) for worker in stage.workers)
    return _Stage(stage.first, stage.last, workers)


def _merge(rows: Sequence[dict[int, _Reach]]) -> dict[int, _Reach]:
    best: dict[int, _Reach] = {}
    for used, reach in itertools.chain.from_iterable(row.items() for row in rows):
        if used not in best or reach.place < best[used].place:
            best[used] = reach
    return best


def _pools(cluster: Cluster, limits: Limits) -> list[_Pool]:
    """Devices with at least some speed and memory, for every such bound that makes a difference: by hosts, and flat."""
    capacities = [limits.capacity_bytes(device) for device in cluster.devices]
    room = [math.inf if cap is None else cap for cap in capacities]
    pools: dict[tuple[int, ...], list[_Pool]] = {}
    for speed, least in itertools.product(sorted({d.speed for d in cluster.devices}), sorted(set(room))):
        chosen = tuple(i for i, d in enumerate(cluster.devices) if d.speed >= speed and room[i] >= least)
        if chosen:
            slowest = min(cluster.devices[i].speed for i in chosen)
            smallest = min(room[i] for i in chosen)
            capacity = None if math.isinf(smallest) else int(smallest)
            order, levels = _tree(cluster, chosen)
            either = (levels,) if len(levels) == 1 else (levels, _flat(cluster, order))
            pools[chosen] = [_Pool(order, slowest, capacity, kind) for kind in either]
    return list(itertools.chain.from_iterable(pools.values()))


def _flat(cluster: Cluster, order: tuple[int, ...]) -> tuple[_Level, ...]:
    """All devices on one level, with the slowest link between any two."""
    pairs = itertools.combinations(order, 2)
    slowest = min((cluster.link(a, b).bandwidth_bytes_s for a, b in pairs), default=math.inf)
    return (_Level(len(order), slowest),)


def _tree(cluster: Cluster, chosen: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[_Level, ...]]:
    """The devices in order of their hosts, and the levels; one level where the hosts are not alike."""
    paths = {i: tuple(cluster.devices[i].host.split("/")) for i in chosen}
    order = tuple(sorted(chosen, key=lambda i: (paths[i], i)))
    deep = {len(path) for path in paths.values()}
    levels, groups = [], [(*paths[i], i) for i in order]
    for link in range(max(deep) + 1):
        outer = [group[:-1] for group in groups]
        sizes = {outer.count(path) for path in set(outer)}
        if len(deep) > 1 or len(sizes) > 1:
            return order, _flat(cluster, order)
        bandwidth = cluster.links[min(link, len(cluster.links) - 1)].bandwidth_bytes_s
        levels.append(_Level(sizes.pop(), bandwidth))
        groups = list(dict.fromkeys(outer))
    kept = tuple(level for level in levels if level.size > 1) or (levels[0],)
    return order, kept
