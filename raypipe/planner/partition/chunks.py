"""Several stages on one worker: the solvers cut as if every stage had a device of its own, and the sum is checked.

    workers     0           1                    stage s is on worker placement[s]
    stages      0  2        1  3                 placement 0 1 0 1 (interleaved), 0 1 1 0 (a V)
    solver      #0 #1 #0 #1                      a device per stage in the order of the pipeline, with a part of its
                                                 worker's memory; two parts of one worker are joined for nothing

A worker computes one of its stages at a time, so equal stages make equal workers; where they cannot be equal, it is the
slowest stage that is kept short, not the slowest worker. The cut without limits comes first. Where it is too much for a
worker, the worker's memory is shared out between its stages in several ways, one after the other: the fullest stage
keeps what it needs and the others part with the rest, all part with something, by what equal stages would need, and
evenly. What no way finds is refused, though a cleverer search might find it. The sum over the stages of a worker is an
upper bound: see ``planner.memory``.

The model leaves out that all hops between two workers share one link, and that stages of one worker never need their
workspaces at the same time.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, Device, Link
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition, human_bytes
from raypipe.planner.memory import MemoryModel, StageMemory
from raypipe.planner.partition.fit import Solver, limit_bytes, memory_of, solve_within
from raypipe.planner.partition.limits import Limits

__all__ = ["check_workers", "in_chunks", "stages_by_worker"]

Shares = Sequence[int | None]
"""Bytes by stage, of its worker's memory; None for no limit."""


def stages_by_worker(placement: Sequence[int]) -> list[list[int]]:
    """The stages of each worker, in the order of the pipeline."""
    found: list[list[int]] = [[] for _ in range(max(placement) + 1)]
    for stage, worker in enumerate(placement):
        found[worker].append(stage)
    return found


def in_chunks(solver: Solver, placement: Sequence[int], within: Solver | None = None) -> Solver:
    """The solver for stages that are placed already, several on a device; ``limits.num_stages`` must be their number.

    Args:
        placement: device of each stage, by its position in the cluster.
        within: what cuts where memory is shared out; None for the same solver.
    """

    def solve(graph: ModelGraph, cluster: Cluster, limits: Limits) -> Partition:
        assert limits.num_stages in (None, len(placement)), "the placement says how many stages there are"
        caps = [limit_bytes(cluster, limits, device) for device in range(max(placement) + 1)]
        single = dataclasses.replace(limits, num_stages=len(placement), memory_limit_bytes=None, in_order=True)

        def cut(solver: Solver, shares: Shares) -> tuple[Partition, tuple[StageMemory, ...]]:
            found = solve_within(solver, graph, _one_each(cluster, placement, shares), single)
            return _on_workers(found, placement), memory_of(graph, found, limits.memory)

        free, memory = cut(solver, [None] * len(placement))
        try:
            check_workers(memory, placement, caps)
        except PlanError:
            for shares in _shares(graph, limits.memory, [m.total_bytes for m in memory], placement, caps):
                with contextlib.suppress(PlanError):
                    found, memory = cut(within or solver, shares)
                    check_workers(memory, placement, caps)
                    return found
            raise
        return free

    return solve


def check_workers(found: Sequence[StageMemory], placement: Sequence[int], limits: Sequence[int | None]) -> None:
    """Refuse a plan whose stages do not fit on their workers together.

    Args:
        found: by stage.
        placement: worker of each stage.
        limits: bytes by worker, None for no limit.

    Raises:
        PlanError: names the worker that is over its limit by most, its stages, and their bytes.
    """
    resident = [[found[stage] for stage in stages] for stages in stages_by_worker(placement)]
    over = [(sum(m.total_bytes for m in resident[w]) - cap, w) for w, cap in enumerate(limits) if cap is not None]
    excess, worst = max(over, default=(0, 0))
    if excess <= 0:
        return
    cap = limits[worst] or 0
    stages = " and ".join(str(m.stage) for m in resident[worst])
    each = "; ".join(f"stage {m.stage} {human_bytes(m.total_bytes)} at {m.action} ({m})" for m in resident[worst])
    raise PlanError(
        f"Worker {worst} needs {human_bytes(cap + excess)} for its stages {stages}, {human_bytes(excess)} more than "
        f"its limit of {human_bytes(cap)}: {each}. Use smaller micro-batches, more workers, or a schedule that holds "
        "fewer micro-batches, such as '1f1b' with one stage per worker."
    )


def _shares(
    graph: ModelGraph,
    memory: MemoryModel,
    resident: Sequence[int],
    placement: Sequence[int],
    caps: Sequence[int | None],
) -> Iterator[Shares]:
    """What each stage may use of its worker's memory, in the order in which it is tried; never more than there is.

    Args:
        resident: bytes by stage of a cut that is too much for some worker.
    """
    workers, whole = stages_by_worker(placement), memory.node_parts(graph).sum(axis=1)
    equal = [int(memory.at_depth(whole, len(placement) - s)) + memory.reserve_bytes for s in range(len(placement))]
    for keep, needs in ((True, resident), (False, resident), (False, equal), (False, [1] * len(placement))):
        shares: list[int | None] = [None] * len(placement)
        for stages, cap in zip(workers, caps, strict=True):
            if cap is None:
                continue
            left, rest = cap, list(stages)
            if keep and len(stages) > 1 and cap < sum(resident[s] for s in stages):
                # It may be one large operation, which no smaller share would hold.
                fullest = max(stages, key=resident.__getitem__)
                shares[fullest] = min(resident[fullest], cap - len(stages) + 1)
                left, rest = cap - resident[fullest], [s for s in stages if s != fullest]
            total = sum(needs[s] for s in rest) or 1
            for s in rest:
                shares[s] = max(1, left * needs[s] // total)
        yield shares


def _one_each(cluster: Cluster, placement: Sequence[int], shares: Shares) -> Cluster:
    """A device for every stage; those of one worker are joined by a link that costs nothing."""
    devices = []
    for worker, share in zip(placement, shares, strict=True):
        device = cluster.devices[worker]
        # One step further down than any host: only parts of one device are so close to each other.
        devices.append(Device(device.name, device.speed, share, f"{device.host}/#{worker}"))
    return Cluster(tuple(devices), (Link(), *cluster.links))


def _on_workers(partition: Partition, placement: Sequence[int]) -> Partition:
    stages = (dataclasses.replace(s, devices=(placement[s.index],)) for s in partition.stages)
    return dataclasses.replace(partition, stages=tuple(stages))
