"""Cuts of a partition solver, from which the search of a shape starts if not all cuts can be compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from raypipe.errors import PlanError
from raypipe.planner.search.cut_costs import CutTables, Groups, Shape
from raypipe.planner.search.problem import Problem, limits_of
from raypipe.planner.search.replica_cuts import cut_for
from raypipe.planner.search.request import Request
from raypipe.planner.search.request_schedule import memory_model
from raypipe.planner.search.shape_options import ShapeOptions
from raypipe.planner.search.solvers import own_order_solver, quick_cut

SolverCut = tuple[Groups, tuple[int, ...]]
"""(devices of each stage, positions); the positions are the first node of each stage, and the number of nodes."""
MANY_STAGES = 256
"""Most stages for which a solver cuts more than once if memory is not limited."""
MOST_TRIES = 4
"""Most numbers of micro-batches for which a solver cuts within memory limits, for each kind of schedule."""


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
        limits = limits_of(request, num_stages, num_stages, *size)
        solver = quick_cut(request) if quick else own_order_solver(request)
        try:
            cut = cut_for(request, solver, problem.at(size[1]), problem.cluster, limits)
        except PlanError:
            return None
        return tuple(stage.devices for stage in cut.stages), (0, *cut.cuts, len(problem.profile.graph.nodes))

    def _able(self, request: Request, num_stages: int, sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """List the numbers of micro-batches at which some cut fits, by bisection: smaller micro-batches need less."""
        by_size = sorted(sizes, key=lambda size: size[1])
        low, high = 0, len(by_size)
        while low < high:
            middle = (low + high) // 2
            if self._cut(self._problem, request, num_stages, by_size[middle], quick=True) is None:
                high = middle
            else:
                low = middle + 1
        return by_size[:low]
