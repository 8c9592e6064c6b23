"""Partition solvers for a request, and their cuts.

Solvers are adapted to schedules with several stages on each worker. The search of a shape starts from the cuts of a
solver if not all cuts can be compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition
from raypipe.ir.schedule import single_homes
from raypipe.planner.partition.antichain import antichain
from raypipe.planner.partition.chunks import in_chunks
from raypipe.planner.partition.costs import Limits
from raypipe.planner.partition.fit import Solver, memory_of
from raypipe.planner.partition.prefix_sum import any_cut, prefix_sum
from raypipe.planner.search.cut_costs import CutTables, Groups, Shape
from raypipe.planner.search.problem import Problem, limits_of
from raypipe.planner.search.replica_cuts import cut_for
from raypipe.planner.search.request import Request
from raypipe.planner.search.schedule_settings import memory_model, placement_of
from raypipe.planner.search.shape_options import ShapeOptions

SolverCut = tuple[Groups, tuple[int, ...]]
"""(devices of each stage, positions); the positions are the first node of each stage, and the number of nodes."""
MANY_STAGES = 256
"""Most stages for which a solver cuts more than once if memory is not limited."""
MOST_TRIES = 4
"""Most numbers of micro-batches for which a solver cuts within memory limits, for each kind of schedule."""
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
    moved = partition.on_workers(single_homes(range(partition.num_stages)))
    memory = memory_of(graph, moved, limits.memory)
    stages = []
    for stage, bytes_of in zip(moved.stages, memory, strict=True):
        busy_s = sum(graph.nodes[i].busy_s for i in partition.nodes_of(stage))
        period_s = busy_s / cluster.devices[stage.index].speed
        stages.append(dataclasses.replace(stage, period_s=period_s, memory_bytes=bytes_of.total_bytes))
    return dataclasses.replace(moved, stages=tuple(stages), bottleneck_s=max(stage.period_s for stage in stages))


class SolverCuts:
    """Cuts by a partition solver, for the shapes of one problem.

    Args:
        tables: cuts of the problem's graph, and their costs.
    """

    def __init__(self, problem: Problem, tables: CutTables) -> None:
        self._problem, self._tables, self._options = problem, tables, ShapeOptions(problem)

    def cuts(self, shape: Shape) -> list[SolverCut]:
        """List a solver's cuts, for each kind of schedule at the most promising numbers of micro-batches.

        These numbers have the least lower bounds of the step, computed for a cut that ignores memory limits.
        """
        problem, sizes, kinds = self._problem, self._options.sizes(shape), self._options.kinds(shape)
        free = self._cut(problem.unlimited, kinds[0], len(shape), sizes[len(sizes) // 2])
        if free is None:
            return []
        if not problem.bounded and len(shape) > MANY_STAGES:
            return [free]
        found: dict[SolverCut, None] = {} if problem.bounded else {free: None}
        # Without memory limits the cut does not depend on the schedule.
        for request in kinds if problem.bounded else kinds[:1]:
            able, tries = sizes, 1
            if problem.bounded:
                able, tries = self._able(request, len(shape), sizes), MOST_TRIES
            bounds_s, lanes = [], request.num_lanes(len(shape))
            for size in able:
                placed = self._tables.placed(free[0], self._tables.at_nodes(free[1]), *size, lanes)
                model = memory_model(request, len(shape), *size)
                in_flight = [model.in_flight(depth) for depth in range(len(shape), 0, -1)]
                bounds_s.append(float(placed.least_s(request.kind, np.array([in_flight]))[0]))
            for at in np.argsort(bounds_s, kind="stable")[:tries].tolist():
                cut = self._cut(problem, request, len(shape), able[at])
                if cut is not None:
                    found[cut] = None
        return list(found)

    def _cut(
        self, problem: Problem, request: Request, num_stages: int, size: tuple[int, int], *, quick: bool = False
    ) -> SolverCut | None:
        """Cut by a solver; return None if no cut fits.

        Args:
            size: (number of micro-batches, samples in each).
            quick: True to return any cut that fits, False for the best one.
        """
        request = dataclasses.replace(request, memory_limit_bytes=problem.request.memory_limit_bytes)
        limits = limits_of(request, num_stages, *size)
        solver = quick_cut(request) if quick else own_order_solver(request)
        try:
            cut = cut_for(request, solver, problem.at(size[1]), problem.cluster, limits)
        except PlanError:
            return None
        return tuple(stage.devices for stage in cut.stages), (0, *cut.cuts, len(problem.profile.graph.nodes))

    def _able(self, request: Request, num_stages: int, sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """List the sizes at which some cut fits into memory, by bisection, because smaller micro-batches need less.

        Args:
            sizes: (number of micro-batches, samples in each) to examine.
        """
        by_size = sorted(sizes, key=lambda size: size[1])
        low, high = 0, len(by_size)
        while low < high:
            middle = (low + high) // 2
            if self._cut(self._problem, request, num_stages, by_size[middle], quick=True) is None:
                high = middle
            else:
                low = middle + 1
        return by_size[:low]
