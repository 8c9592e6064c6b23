"""Partition solvers for a request: adapted to schedules with several stages on each worker."""

from __future__ import annotations

import dataclasses

from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition
from raypipe.planner.partition.antichain import antichain
from raypipe.planner.partition.chunks import in_chunks
from raypipe.planner.partition.costs import Limits
from raypipe.planner.partition.fit import Solver, memory_of
from raypipe.planner.partition.prefix_sum import any_cut, prefix_sum
from raypipe.planner.search.request import Request
from raypipe.planner.search.request_schedule import placement_of

FEW_STATES = 20_000
"""Most states (sets of executed nodes) of the antichain method if "auto" tries other orders than the nodes' own."""
FEW_NODES = 2_000
"""Largest number of nodes for which "auto" tries other orders than the nodes' own."""


def branches(graph: ModelGraph) -> bool:
    """Return True if the nodes could run in another order than their own."""
    if graph.edges is None:
        return False
    joined = {*graph.edges, *graph.together}
    return not all((i, i + 1) in joined for i in range(len(graph.nodes) - 1))


def own_order_solver(request: Request) -> Solver:
    """Choose a solver that keeps the nodes in the model's own order."""
    return _chunked(request, prefix_sum)


def other_order_solver(request: Request) -> Solver:
    """Choose a solver that may execute nodes in another order."""
    return _chunked(request, antichain)


def _chunked(request: Request, solver: Solver, within: Solver | None = None) -> Solver:
    """Adapt a solver by ``in_chunks`` if the schedule puts several stages on each worker, else return it as it is."""
    if not request.kind.several_stages:
        return solver
    assert request.num_stages is not None, "settled_workers has set it"
    return in_chunks(solver, placement_of(request, request.num_stages), within)


def quick_cut(request: Request) -> Solver:
    """Choose a solver that finds some cut within the limits, not the best, for frequent tests of feasibility."""
    if not request.kind.several_stages:
        return any_cut
    # Stages on one worker share its memory in the proportions of a balanced cut.
    return _chunked(request, prefix_sum, any_cut)


def placed(partition: Partition, graph: ModelGraph, cluster: Cluster, limits: Limits) -> Partition:
    """Put each stage on the device of the same number, and add the seconds and bytes of every stage."""
    on_devices = [dataclasses.replace(stage, devices=(stage.index,)) for stage in partition.stages]
    moved = dataclasses.replace(partition, stages=tuple(on_devices))
    memory = memory_of(graph, moved, limits.memory)
    stages = []
    for stage, bytes_of in zip(moved.stages, memory, strict=True):
        busy_s = sum(graph.nodes[i].busy_s for i in partition.nodes_of(stage))
        period_s = busy_s / cluster.devices[stage.index].speed
        stages.append(dataclasses.replace(stage, period_s=period_s, memory_bytes=bytes_of.total_bytes))
    return dataclasses.replace(moved, stages=tuple(stages), bottleneck_s=max(stage.period_s for stage in stages))
