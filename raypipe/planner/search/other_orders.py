"""Cuts of a graph with branches by the antichain method, which may change the order in which the nodes run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from raypipe.errors import PlanError
from raypipe.planner.search.cut_costs import Shape
from raypipe.planner.search.predict import seconds_of
from raypipe.planner.search.problem import Decision, Problem, limits_of, step_s_of
from raypipe.planner.search.recompute import most_recompute
from raypipe.planner.search.replica_cuts import cut_for, slowest_link, summing_rates_s
from raypipe.planner.search.request import Request, microbatches
from raypipe.planner.search.solver_cuts import FEW_NODES, FEW_STATES, branches, other_order_solver

WORTH = 1e-3
"""Least relative gain in step time for which another order of execution replaces the model's own."""
WEIGHTS = (1.0, 4.0, 16.0)
"""Factors of the seconds in which replicas sum gradients, when the solver adds them to computing; each is tried. Factor
1 is right only if no stage waits for another. The first stage sums its gradients after everything else.
"""


def in_another_order(problem: Problem, decision: Decision) -> Decision:
    """Cut the graph again, with other execution orders and the same workers per stage; return the quickest decision.

    Returns ``decision`` itself if no order is quicker by ``WORTH``. The antichain method gets the workers of each
    stage, and the seconds in which they sum gradients. How many of these seconds overlap with other stages' work is
    unknown before a plan is simulated, so the method runs once for each of WEIGHTS.

    Raises:
        PlanError: the request names the antichain method, and the graph has too many orders or no cut that fits.
    """
    if not _may_reorder(problem):
        return decision
    request, graph, best, asked = decision.request, decision.graph, decision, problem.request.partitioner == "antichain"
    stages = decision.partition.stages
    lanes, rates = request.num_lanes(len(stages)), []
    for stage in stages:
        link = slowest_link(decision.cluster, stage.devices, stage.devices)
        rates_s = summing_rates_s(len(stage.devices), lanes, link, request.sums_factor, shards=request.shards)
        rates.append(sum(rates_s) / decision.num_microbatches)
    for weight in WEIGHTS if any(rates) else (0.0,):
        limits = dataclasses.replace(
            decision.limits,
            num_stages=len(stages),
            sync_s_per_byte=tuple(weight * rate for rate in rates) if any(rates) else (),
            max_states=decision.limits.max_states if asked else FEW_STATES,
        )
        try:
            other = cut_for(request, other_order_solver(request), graph, decision.cluster, limits)
        except PlanError:  # too many orders, or none that fits
            if asked:
                raise
            return best
        moved = dataclasses.replace(decision, partition=other)
        step_s = seconds_of(moved)
        if step_s < step_s_of(best) * (1 - WORTH):
            best = moved.taking(step_s)
    return best


def only_in_another_order(problem: Problem, shapes: Sequence[Shape]) -> Decision | None:
    """Find a plan that fits into memory only with another execution order of the nodes; None if no such plan is found.

    Recomputation and schedule are those with the least memory that the request allows.

    Args:
        shapes: workers by stage of the plans that were compared.
    """
    if not _may_reorder(problem) or not problem.bounded:
        return None
    least = dataclasses.replace(problem.request, recompute=most_recompute(problem.request))
    for shape in shapes:
        request = least.thriftiest(len(shape))
        for count, size in _sizes(request, len(shape)):
            limits = limits_of(request, len(shape), count, size)
            limits = dataclasses.replace(limits, max_states=FEW_STATES)
            graph = problem.at(size)
            try:
                cut = cut_for(request, other_order_solver(request), graph, problem.cluster, limits)
            except PlanError:
                continue
            minibatch, _, _ = microbatches(request, len(shape))
            found = Decision(request, graph, problem.cluster, limits, cut, minibatch, size, count)
            return found.taking(seconds_of(found))
    return None


def _may_reorder(problem: Problem) -> bool:
    request, graph = problem.request, problem.profile.graph
    if problem.cut_is_given or not branches(graph):
        return False
    return request.partitioner == "antichain" or (request.partitioner == "auto" and len(graph.nodes) <= FEW_NODES)


def _sizes(request: Request, stages: int) -> list[tuple[int, int]]:
    """List (number of micro-batches, samples in each): the default, and the smallest possible if the number is open."""
    minibatch, size, count = microbatches(request, stages)
    sizes = [(count, size)]
    if request.num_microbatches is None and not request.in_lanes:
        smallest = request.smallest_microbatch(minibatch)
        sizes.append((-(-minibatch // smallest), smallest))
    return sizes
