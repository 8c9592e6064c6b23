"""How many micro-batches a request gets for some stages: by the slowest stage of a cut that memory leaves free."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition
from raypipe.planner.microbatch import Bounds, Hop, MicrobatchChoice, Pipe, choose_microbatches
from raypipe.planner.partition.fit import fitting_partition, solve_within
from raypipe.planner.partition.limits import Limits
from raypipe.planner.stage_time import StageTime, fit_stage_time
from raypipe.planner.tune.feasibility import memory_test
from raypipe.planner.tune.predict import hops_of, stages_of
from raypipe.planner.tune.problem import Problem, limits_of
from raypipe.planner.tune.request import Request, microbatches
from raypipe.planner.tune.resolve import spec_of
from raypipe.planner.tune.solvers import own_order_solver, quick_cut
from raypipe.planner.tune.workers import rounds_of

__all__ = ["Sizes", "chosen_sizes", "sizes_of"]


class Sizes(NamedTuple):
    """The mini-batch and its micro-batches.

    Attributes:
        choice: None where their number was given, or a rule stands in.
    """

    minibatch: int
    microbatch: int
    num_microbatches: int
    choice: MicrobatchChoice | None = None


def sizes_of(problem: Problem, request: Request, num_stages: int | None) -> Sizes:
    """As asked, or the best by the closed form where the model was timed at several sizes.

    Args:
        request: the problem's own, with a settled schedule.
        num_stages: None leaves their number to the solver.

    Raises:
        PlanError: nothing fits; names stage, action and numbers.
    """
    given = Sizes(*microbatches(request, num_stages or len(problem.cluster.devices)))
    # The closed form counts a bubble per step, which an asynchronous schedule does not have, and knows no replicas.
    open_ = request.num_microbatches is None and not request.replicated
    if not open_ or problem.times is None or not request.kind.synchronous:
        return given
    choice = chosen_sizes(problem, request, num_stages)
    return Sizes(given.minibatch, choice.microbatch_size, choice.num_microbatches, choice)


def chosen_sizes(
    problem: Problem, request: Request, num_stages: int | None, fits: Callable[[int, int], bool] | None = None
) -> MicrobatchChoice:
    """The number of micro-batches for the slowest stage of a cut that memory does not bind.

    Args:
        fits: (micro-batches, samples) -> whether memory holds them, where that is known.
    """
    cluster, solver = problem.cluster, own_order_solver(request)
    stages = num_stages or len(cluster.devices)
    minibatch, _, count = microbatches(request, stages)
    free = Cluster(tuple(dataclasses.replace(d, memory_bytes=None) for d in cluster.devices), cluster.links)
    unbound = limits_of(request, num_stages, stages, count, problem.profile.microbatch_size)
    unbound = dataclasses.replace(unbound, memory_limit_bytes=None)
    rough = solver(problem.short, free, unbound)
    if fits is None and problem.bounded:
        fits = _some_cut_fits(problem, request, num_stages, minibatch)
    try:
        return choose_microbatches(
            _slowest_stage(problem, rough, free, unbound),
            minibatch,
            _pipe(request, rough, cluster, count),
            Bounds(fits, partial(request.takes, minibatch), math.lcm(*rough.replicas)),
        )
    except PlanError:
        # The solver's refusal of the smallest micro-batches names stage, action and bytes.
        size = request.smallest_microbatch(minibatch)
        smallest = limits_of(request, num_stages, stages, -(-minibatch // size), size)
        fitting_partition(solver, problem.short, cluster, smallest)
        raise


def _slowest_stage(problem: Problem, cut: Partition, cluster: Cluster, limits: Limits) -> StageTime:
    """Its t(b). Stages do not all grow alike: which one is slowest, and by how much, depends on the size."""
    assert problem.times is not None
    graph = problem.short
    cut_at = problem.at(problem.profile.microbatch_size, graph)
    sizes = [size for size, _ in problem.times.points]
    return fit_stage_time({b: _slowest_s(problem.at(b, graph), cut, cluster, limits, cut_at) for b in sizes})


def _slowest_s(graph: ModelGraph, cut: Partition, cluster: Cluster, limits: Limits, cut_at: ModelGraph) -> float:
    """Seconds per micro-batch of the worker that takes longest, its stages together.

    Args:
        graph: with the seconds of some size.
        cut_at: with those that the cut was made for, and its periods.
    """
    busy_s: dict[tuple[int, ...], float] = {}
    for stage, found in zip(cut.stages, stages_of(cut_at, cut, cluster, limits), strict=True):
        here_s, then_s = (math.fsum(g.nodes[i].busy_s for i in cut.nodes_of(stage)) for g in (graph, cut_at))
        grown = here_s / then_s if then_s else 1.0
        busy_s[stage.devices] = busy_s.get(stage.devices, 0.0) + found.busy_s * grown
    return max(busy_s.values())


def _pipe(request: Request, cut: Partition, cluster: Cluster, count: int) -> Pipe:
    hops = [hop.busiest_s for hop in hops_of(cut, cluster, 1, request.codecs)]
    exposed = spec_of(request, cut.num_stages, count).kind == "1f1b"
    return Pipe(
        cut.num_stages,
        Hop(max(latency_s for latency_s, _ in hops), max(held_s for _, held_s in hops), exposed) if hops else None,
        chunks=cut.num_stages // request.workers(cut.num_stages),
        rounds=rounds_of(request, cut.num_stages),
        in_rounds=request.schedule == "interleaved",
    )


def _some_cut_fits(
    problem: Problem, request: Request, num_stages: int | None, minibatch: int
) -> Callable[[int, int], bool]:
    stages = num_stages or len(problem.cluster.devices)
    solver = quick_cut(request) if problem.searches else own_order_solver(request)
    return memory_test(
        lambda limits: solve_within(solver, problem.short, problem.cluster, limits),
        lambda n, b: limits_of(request, num_stages, stages, n, b),
        stages,
        minibatch,
    )
