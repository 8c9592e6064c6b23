"""Choice of the number of micro-batches for a given number of stages, from the slowest stage of a first cut.

The first cut ignores memory limits. Memory is then tested for many numbers and sizes of micro-batches with few cuts: a
stage's bytes grow with b x in_flight(depth), for micro-batches of b samples, and with the messages of b samples. What
needs no more than sizes that fit fits too, and what needs no less than sizes that do not fit does not fit either. Only
for the others a cut is searched.
"""

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
from raypipe.planner.cost.memory import MemoryModel
from raypipe.planner.cost.microbatch import (
    Bounds,
    Hop,
    MicrobatchChoice,
    Pipe,
    StageTime,
    choose_microbatches,
    fit_stage_time,
)
from raypipe.planner.partition.costs import Limits
from raypipe.planner.partition.fit import fitting_partition, solve_within
from raypipe.planner.search.predict import hops_of, stages_of
from raypipe.planner.search.problem import Problem, limits_of
from raypipe.planner.search.request import Request, microbatches
from raypipe.planner.search.request_schedule import spec_of
from raypipe.planner.search.solvers import own_order_solver, quick_cut
from raypipe.planner.search.workers import rounds_of


def memory_test(
    cut: Callable[[Limits], object], limits_of: Callable[[int, int], Limits], depth: int, minibatch_size: int
) -> Callable[[int, int], bool]:
    """Build a function (micro-batches, samples of each) -> True if some cut fits into memory.

    Args:
        cut: finds any cut within limits, or raises PlanError.
        limits_of: builds the limits for (micro-batches, samples of each).
        depth: depth of the first stage, which is the number of stages.
        minibatch_size: samples of a mini-batch.
    """
    good: list[tuple[int, ...]] = []
    bad: list[tuple[int, ...]] = []

    def fits(count: int, samples: int) -> bool:
        limits = limits_of(count, samples)
        need = _need(limits.memory, depth)
        if any(all(a <= b for a, b in zip(need, known, strict=True)) for known in good):
            return True
        if any(all(a >= b for a, b in zip(need, known, strict=True)) for known in bad):
            return False
        try:
            cut(limits)
        except PlanError:
            bad.append(need)
            return False
        good.append(need)
        return True

    low, high = 0, minibatch_size + 1  # a bisection fills good and bad, so that most later queries need no cut
    while high - low > 1:
        middle = (low + high) // 2
        if fits(-(-minibatch_size // middle), middle):
            low = middle
        else:
            high = middle
    return fits


def _need(memory: MemoryModel, depth: int) -> tuple[int, ...]:
    size = memory.microbatch_size
    depths = range(1, depth + 1)
    held = [count(d) for d in depths for count in (memory.activation_sets, memory.in_flight)]
    return (size * memory.message_slots, *(size * count for count in held))


class Sizes(NamedTuple):
    """Samples of a mini-batch and of a micro-batch, and the number of micro-batches.

    Attributes:
        choice: how the number was chosen; None if it was given, or follows from a fixed rule.
    """

    minibatch: int
    microbatch: int
    num_microbatches: int
    choice: MicrobatchChoice | None = None


def sizes_of(problem: Problem, request: Request, num_stages: int | None) -> Sizes:
    """Choose the sizes: the best by the closed form if they are open and the model was timed at several sizes.

    Otherwise, and for replicas and asynchronous schedules, they are those of ``microbatches``.

    Args:
        request: the problem's request, with a chosen schedule.
        num_stages: None leaves the number to the solver.

    Raises:
        PlanError: nothing fits; names stage, action and numbers.
    """
    default = Sizes(*microbatches(request, num_stages or len(problem.cluster.devices)))
    # The closed form assumes a bubble per step, which asynchronous schedules do not have, and no replicas.
    open_ = request.num_microbatches is None and not request.replicated
    if not open_ or problem.times is None or not request.kind.synchronous:
        return default
    choice = chosen_sizes(problem, request, num_stages)
    return Sizes(default.minibatch, choice.microbatch_size, choice.num_microbatches, choice)


def chosen_sizes(
    problem: Problem, request: Request, num_stages: int | None, fits: Callable[[int, int], bool] | None = None
) -> MicrobatchChoice:
    """Choose the number of micro-batches for the slowest stage of a cut that ignores memory limits.

    Args:
        fits: returns True if (micro-batches, samples of each) fit into memory; None tests this with cuts, if memory is
            limited.

    Raises:
        PlanError: nothing fits; names stage, action and numbers.
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
    """Fit t(b) of the slowest stage, which may be another one at each micro-batch size b."""
    assert problem.times is not None
    graph = problem.short
    cut_at = problem.at(problem.profile.microbatch_size, graph)
    sizes = [size for size, _ in problem.times.points]
    return fit_stage_time({b: _slowest_s(problem.at(b, graph), cut, cluster, limits, cut_at) for b in sizes})


def _slowest_s(graph: ModelGraph, cut: Partition, cluster: Cluster, limits: Limits, cut_at: ModelGraph) -> float:
    """Compute the seconds per micro-batch of the slowest worker, as the sum over its stages.

    Args:
        graph: graph with the seconds of the wanted micro-batch size.
        cut_at: graph with the seconds that ``cut`` was made for.
    """
    busy_s: dict[tuple[int, ...], float] = {}
    for stage, predicted in zip(cut.stages, stages_of(cut_at, cut, cluster, limits), strict=True):
        here_s, then_s = (math.fsum(g.nodes[i].busy_s for i in cut.nodes_of(stage)) for g in (graph, cut_at))
        grown = here_s / then_s if then_s else 1.0
        busy_s[stage.devices] = busy_s.get(stage.devices, 0.0) + predicted.busy_s * grown
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
