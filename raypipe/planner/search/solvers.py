"""Choice of the partition solver for a graph and a request."""

from __future__ import annotations

import dataclasses

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition
from raypipe.planner.cost.memory import check_memory
from raypipe.planner.partition.antichain import antichain
from raypipe.planner.partition.chain import equal_parameters, split_before
from raypipe.planner.partition.chunks import in_chunks
from raypipe.planner.partition.costs import Limits
from raypipe.planner.partition.fit import Solver, limit_bytes, memory_of
from raypipe.planner.partition.prefix_sum import any_cut, prefix_sum
from raypipe.planner.search.request import DEFAULT_STAGES, Request
from raypipe.planner.search.request_schedule import placement_of

FEW_STATES = 20_000
"""Most states (sets of executed nodes) of the antichain method if "auto" tries other orders than the nodes' own."""
FEW_NODES = 2_000
"""Largest number of nodes for which "auto" tries other orders than the nodes' own."""
WORTH = 1e-3
"""Relative gain from which on another order of execution replaces the model's own."""


def branches(graph: ModelGraph) -> bool:
    """Return True if the nodes could run in another order than their own."""
    if graph.edges is None:
        return False
    joined = {*graph.edges, *graph.together}
    return not all((i, i + 1) in joined for i in range(len(graph.nodes) - 1))


def solver_of(request: Request, graph: ModelGraph) -> Solver:
    """Choose the solver for the final cut; it may reorder nodes if that is allowed and faster."""
    if request.split_points or request.partitioner not in ("auto", "antichain"):
        return own_order_solver(request)
    if request.partitioner == "antichain":
        return _chunked(request, antichain)
    return _chunked(request, _either) if branches(graph) else own_order_solver(request)


def own_order_solver(request: Request) -> Solver:
    """Choose a solver that keeps the nodes in the model's own order, which suffices for comparisons."""
    if request.split_points or request.partitioner == "parameters":
        return _chunked(request, _without_profile(request))
    return _chunked(request, prefix_sum)


def _chunked(request: Request, solver: Solver, within: Solver | None = None) -> Solver:
    """Adapt a solver to a schedule with several stages on each worker, as ``in_chunks``; return it for any other."""
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


def _either(graph: ModelGraph, cluster: Cluster, limits: Limits) -> Partition:
    """Cut in the nodes' own order, unless another is faster or the only one that fits; PlanError if no order fits."""
    refusal, own = None, None
    try:
        own = prefix_sum(graph, cluster, limits)
    except PlanError as error:
        refusal = error
    # The antichain method's bottleneck does not include recomputation.
    if len(graph.nodes) <= FEW_NODES and (own is None or not limits.memory.recompute):
        try:
            other = antichain(graph, cluster, dataclasses.replace(limits, max_states=FEW_STATES))
        except PlanError:
            other = None
        if other is not None and (own is None or other.bottleneck_s < own.bottleneck_s * (1 - WORTH)):
            return other
    if own is None:
        assert refusal is not None
        raise refusal
    return own


def _without_profile(request: Request) -> Solver:
    """Make a solver that cuts by module names or parameters, not by seconds, and adds the seconds and bytes."""

    def solve(graph: ModelGraph, cluster: Cluster, limits: Limits) -> Partition:
        if request.split_points:
            cut = split_before(graph, request.split_points)
        else:
            cut = equal_parameters(graph, limits.num_stages or min(DEFAULT_STAGES, len(cluster.devices)))
        if cut.num_stages > len(cluster.devices):
            raise PlanError(
                f"The plan has {cut.num_stages} stages, but there are {len(cluster.devices)} devices. Set num_stages "
                f"or the number of split points so that there are at most {len(cluster.devices)} stages."
            )
        cut = placed(cut, graph, cluster, limits)
        check_memory(
            memory_of(graph, cut, limits.memory),
            [limit_bytes(cluster, limits, device) for stage in cut.stages for device in stage.devices],
        )
        return cut

    return solve


def placed(partition: Partition, graph: ModelGraph, cluster: Cluster, limits: Limits) -> Partition:
    """Put each stage on the device with its number, and add the seconds and bytes of every stage."""
    on_devices = [dataclasses.replace(stage, devices=(stage.index,)) for stage in partition.stages]
    moved = dataclasses.replace(partition, stages=tuple(on_devices))
    memory = memory_of(graph, moved, limits.memory)
    stages = []
    for stage, bytes_of in zip(moved.stages, memory, strict=True):
        busy_s = sum(graph.nodes[i].busy_s for i in partition.nodes_of(stage))
        period_s = busy_s / cluster.devices[stage.index].speed
        stages.append(dataclasses.replace(stage, period_s=period_s, memory_bytes=bytes_of.total_bytes))
    return dataclasses.replace(moved, stages=tuple(stages), bottleneck_s=max(stage.period_s for stage in stages))
