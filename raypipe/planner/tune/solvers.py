"""Which solver cuts which graph, and what every cut says of itself: devices, seconds and bytes by stage."""

from __future__ import annotations

import dataclasses

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition
from raypipe.planner.memory import check_memory
from raypipe.planner.partition.antichain import antichain
from raypipe.planner.partition.chain import equal_parameters, split_before
from raypipe.planner.partition.chunks import in_chunks
from raypipe.planner.partition.fit import Solver, limit_bytes, memory_of
from raypipe.planner.partition.hierarchical import hierarchical
from raypipe.planner.partition.limits import Limits
from raypipe.planner.partition.prefix_sum import any_cut, prefix_sum
from raypipe.planner.tune.request import DEFAULT_STAGES, Request
from raypipe.planner.tune.resolve import placement_of
from raypipe.planner.tune.workers import settled_workers

__all__ = ["branches", "make_partition", "own_order_solver", "placed", "quick_cut", "solver_of"]

FEW_STATES = 20_000
"""Sets of executed nodes up to which "auto" looks at other orders than the nodes' own."""
FEW_NODES = 2_000
WORTH = 1e-3
"""Another order of execution must be this much faster; otherwise the model's own is kept."""


def make_partition(graph: ModelGraph, request: Request) -> Partition:
    """The cut that needs no profile: where the user says, or of equal parameters.

    Raises:
        PlanError: stages that do not share out over the workers, or too few places to cut.
    """
    if request.split_points:
        settled_workers(request, len(request.split_points) + 1)
        return split_before(graph, request.split_points)
    places = len(graph.cut_positions())
    request = settled_workers(request, places + 1)
    num_stages = request.num_stages or request.num_workers or min(DEFAULT_STAGES, places + 1)
    return equal_parameters(graph, num_stages)


def branches(graph: ModelGraph) -> bool:
    """Whether the nodes could run in another order than their own."""
    if graph.edges is None:
        return False
    joined = {*graph.edges, *graph.together}
    return not all((i, i + 1) in joined for i in range(len(graph.nodes) - 1))


def solver_of(request: Request, graph: ModelGraph) -> Solver:
    """What cuts the graph for good: in another order of execution where that is allowed and faster."""
    if request.split_points or request.partitioner not in ("auto", "antichain"):
        return own_order_solver(request)
    if request.partitioner == "antichain":
        return _chunked(request, antichain)
    return _chunked(request, _either) if branches(graph) else own_order_solver(request)


def own_order_solver(request: Request) -> Solver:
    """One that keeps the nodes in their own order, which is good enough to compare with."""
    if request.split_points or request.partitioner == "parameters":
        return _chunked(request, _without_profile(request))
    return _chunked(request, hierarchical if request.partitioner == "hierarchical" else prefix_sum)


def _chunked(request: Request, solver: Solver, within: Solver | None = None) -> Solver:
    """The same solver, for stages that share workers where the schedule of a settled request asks for that."""
    if not request.kind.several_stages:
        return solver
    assert request.num_stages is not None, "settled_workers has set it"
    return in_chunks(solver, placement_of(request, request.num_stages), within)


def quick_cut(request: Request) -> Solver:
    """Some cut within the limits, for who asks often and wants no fast one."""
    if not request.kind.several_stages:
        return any_cut
    # Shares of a worker's memory follow from what a sensible cut needs.
    return _chunked(request, prefix_sum, any_cut)


def _either(graph: ModelGraph, cluster: Cluster, limits: Limits) -> Partition:
    """The nodes' own order, unless another one is faster or the only one that fits."""
    refusal, found = None, None
    try:
        found = prefix_sum(graph, cluster, limits)
    except PlanError as error:
        refusal = error
    # The bottleneck of another order does not know of forwards that are run again.
    if len(graph.nodes) <= FEW_NODES and (found is None or not limits.memory.recompute):
        try:
            other = antichain(graph, cluster, dataclasses.replace(limits, max_states=FEW_STATES))
        except PlanError:
            other = None
        if other is not None and (found is None or other.bottleneck_s < found.bottleneck_s * (1 - WORTH)):
            return other
    if found is None:
        assert refusal is not None
        raise refusal
    return found


def _without_profile(request: Request) -> Solver:
    """A solver that cuts by names or parameters and then says what that costs."""

    def solve(graph: ModelGraph, cluster: Cluster, limits: Limits) -> Partition:
        if request.split_points:
            found = split_before(graph, request.split_points)
        else:
            found = equal_parameters(graph, limits.num_stages or min(DEFAULT_STAGES, len(cluster.devices)))
        if found.num_stages > len(cluster.devices):
            raise PlanError(
                f"The plan has {found.num_stages} stages, but there are {len(cluster.devices)} devices. Set num_stages "
                f"or the number of split points so that there are at most {len(cluster.devices)} stages."
            )
        found = placed(found, graph, cluster, limits)
        check_memory(
            memory_of(graph, found, limits.memory),
            [limit_bytes(cluster, limits, device) for stage in found.stages for device in stage.devices],
        )
        return found

    return solve


def placed(partition: Partition, graph: ModelGraph, cluster: Cluster, limits: Limits) -> Partition:
    """A cut that somebody else chose, on the first devices of the cluster, with its seconds and bytes."""
    on_devices = [dataclasses.replace(stage, devices=(stage.index,)) for stage in partition.stages]
    found = dataclasses.replace(partition, stages=tuple(on_devices))
    memory = memory_of(graph, found, limits.memory)
    stages = []
    for stage, bytes_of in zip(found.stages, memory, strict=True):
        busy_s = sum(graph.nodes[i].busy_s for i in partition.nodes_of(stage))
        period_s = busy_s / cluster.devices[stage.index].speed
        stages.append(dataclasses.replace(stage, period_s=period_s, memory_bytes=bytes_of.total_bytes))
    return dataclasses.replace(found, stages=tuple(stages), bottleneck_s=max(stage.period_s for stage in stages))
