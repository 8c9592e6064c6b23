"""Partition with several stages on each worker, by a solver that assumes a device of its own for every stage.

    workers     0           1                    stage s is on worker placement[s]
    stages      0  2        1  3                 placement 0 1 0 1 (interleaved), 0 1 1 0 (a V)
    solver      #0 #1 #0 #1                      a device per stage in the order of the pipeline, with a part of its
                                                 worker's memory; links between parts of one worker cost nothing

A worker computes one of its stages at a time, so equal stages make equal workers. If stages cannot be equal, the
slowest stage is minimized, not the slowest worker. The cut without memory limits is tried first. If it is too much for
a worker, the worker's memory is divided among its stages in several ways, one after the other:

    1. the fullest stage keeps its need, and the others share the rest
    2. in proportion to the needs of the stages in the cut without limits
    3. in proportion to the needs of stages of equal contents
    4. evenly

A cut that none of these finds is not found, though a better search might. The sum over the stages of a worker is an
upper bound: see ``planner.cost.memory``.

The model leaves out that all hops between two workers share one link, and that stages of one worker never need their
workspaces at the same time.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, ComputeDevice, Link
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition
from raypipe.ir.schedule import single_homes
from raypipe.ir.units import human_bytes
from raypipe.planner.cost.memory import MemoryModel, StageMemory
from raypipe.planner.partition.costs import Limits
from raypipe.planner.partition.fit import Solver, fitting_partition, memory_of

Shares = Sequence[int | None]
"""Bytes of its worker's memory that each stage may use; None for no limit."""


def stages_by_worker(placement: Sequence[int]) -> list[list[int]]:
    """Return the stages of each worker, in the order of the pipeline."""
    stages: list[list[int]] = [[] for _ in range(max(placement) + 1)]
    for stage, worker in enumerate(placement):
        stages[worker].append(stage)
    return stages


def in_chunks(solver: Solver, placement: Sequence[int], within: Solver | None = None) -> Solver:
    """Adapt a solver to several stages on each device.

    Args:
        solver: solver for one stage on each device.
        placement: position in the cluster of each stage's device.
        within: solver used if memory has to be divided among the stages of a worker; None for the same solver.
    """

    def solve(graph: ModelGraph, cluster: Cluster, limits: Limits) -> Partition:
        assert limits.num_stages in (None, len(placement)), "the placement determines the number of stages"
        caps = [limits.limit_bytes([device]) for device in cluster.devices[: max(placement) + 1]]
        single = dataclasses.replace(limits, num_stages=len(placement), memory_limit_bytes=None, in_order=True)

        def cut(solver: Solver, shares: Shares) -> tuple[Partition, tuple[StageMemory, ...]]:
            partition = fitting_partition(solver, graph, _one_each(cluster, placement, shares), single)
            return partition.on_workers(single_homes(placement)), memory_of(graph, partition, limits.memory)

        free, memory = cut(solver, [None] * len(placement))
        try:
            check_workers(memory, placement, caps)
        except PlanError:
            for shares in _shares(graph, limits.memory, [m.total_bytes for m in memory], placement, caps):
                with contextlib.suppress(PlanError):
                    partition, memory = cut(within or solver, shares)
                    check_workers(memory, placement, caps)
                    return partition
            raise
        return free

    return solve


def check_workers(memory: Sequence[StageMemory], placement: Sequence[int], limits: Sequence[int | None]) -> None:
    """Raise PlanError if the stages of a worker together need more memory than the worker has.

    Args:
        memory: memory of each stage.
        placement: worker of each stage.
        limits: bytes by worker, None for no limit.

    Raises:
        PlanError: names the worker that is over its limit by most, its stages, and their bytes.
    """
    resident = [[memory[stage] for stage in stages] for stages in stages_by_worker(placement)]
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
    """Yield divisions of each worker's memory among its stages, in the sequence in which they are tried.

    ``resident`` are the bytes by stage of a cut that is too much for some worker; ``caps`` are the workers' limits.
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
    """Build a cluster with one device per stage; links between stages of the same worker cost nothing."""
    devices = []
    for worker, share in zip(placement, shares, strict=True):
        device = cluster.devices[worker]
        # One step further down than any host: only parts of one device are so close to each other.
        devices.append(ComputeDevice(device.name, device.speed, share, f"{device.host}/#{worker}"))
    return Cluster(tuple(devices), (Link(), *cluster.links))
