"""Comparison of data parallelism, pipelines and pipelines with replicas, by the seconds of a simulated step.

A shape is the number of workers of every stage:

    4 workers, up to 3 stages      2  3  4  |  1-2  2-1  1-3  3-1  2-2  |  1-1-2  1-2-1  2-1-1

More workers add shapes and remove none, so that the best plan for fewer workers is still a candidate with more.

    one worker per stage      planned as with num_replicas=1
    every other shape         ``ShapeSearch.best``, unless a lower bound shows that the shape cannot be the best
    best shape                least step time; of equals the one with the fewest workers, then the fewest replicas

The plan includes the table of compared shapes, with the reason for each shape that is not possible.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from raypipe.errors import PlanError
from raypipe.ir.plan import Candidate
from raypipe.ir.units import human_s
from raypipe.planner.cost.tolerance import EVEN, as_quick
from raypipe.planner.partition.antichain import antichain
from raypipe.planner.search.cut_costs import Shape
from raypipe.planner.search.predict import seconds_of
from raypipe.planner.search.problem import Decision, Problem, step_s_of
from raypipe.planner.search.recompute import is_open, most_recompute, settled
from raypipe.planner.search.replica_cuts import cut_for, slowest_link, summing_rates_s
from raypipe.planner.search.shape_search import ShapeError, ShapeSearch
from raypipe.planner.search.solvers import WORTH, branches

FEW = 3
"""Number of quickest shapes for which other execution orders of the model's nodes are tried."""
WEIGHTS = (1.0, 4.0, 16.0)
"""Weights, relative to computing, of the seconds in which replicas sum gradients; ``with_branches`` tries each. Weight
1 is right only if no stage waits for another. The first stage sums its gradients after everything else.
"""
FEW_WORKERS = 8
"""Largest number of workers for which every shape is compared."""
MOST_ROWS = 12
"""Most rows of the table of shapes."""


def shapes(workers: int, most_stages: int, most_each: int | None = None, num_stages: int | None = None) -> list[Shape]:
    """List the shapes on at most ``workers`` workers in which some stage has several workers, most workers first.

    Up to ``FEW_WORKERS`` workers, all shapes are listed. Shapes on more workers are listed only if they have one stage;
    two stages; three stages, the last with one worker; stages with equal numbers of workers; or one stage with several
    workers, first, last or in the middle of stages with one.

    Args:
        most_stages: largest number of stages that the model can be cut into.
        most_each: most workers of a stage; None for no limit.
        num_stages: number of stages of the shapes; None for any.
    """
    kept = (
        shape
        for shape in dict.fromkeys(_all(workers) if workers <= FEW_WORKERS else _paying(workers))
        if 1 < max(shape) <= (most_each or workers) and len(shape) <= most_stages and num_stages in (None, len(shape))
    )
    return sorted(kept, key=lambda shape: (-sum(shape), len(shape), shape))


def _all(workers: int) -> Iterator[Shape]:
    for count in range(2, workers + 1):
        for ends in itertools.product((False, True), repeat=count - 1):
            places = [0, *(at for at, end in enumerate(ends, 1) if end), count]
            yield tuple(b - a for a, b in itertools.pairwise(places))


def _paying(workers: int) -> Iterator[Shape]:
    every = range(1, workers + 1)
    yield from ((count,) for count in every)
    yield from ((first, second) for first in every for second in range(1, workers - first + 1))
    yield from ((first, second, 1) for first in every for second in range(1, workers - first))
    yield from ((each,) * stages for each in every for stages in range(1, workers // each + 1))
    for several in every:
        for single in range(1, workers - several + 1):
            for before in (0, single // 2, single):
                yield (1,) * before + (several,) + (1,) * (single - before)
    yield from _all(FEW_WORKERS)


def best_shape(problem: Problem, single: Sequence[Decision]) -> tuple[Decision, tuple[Candidate, ...]]:
    """Find the quickest decision among all shapes.

    Args:
        problem: problem whose request leaves replicas open.
        single: decisions with one worker per stage, made before; may be empty.

    Returns:
        (the quickest decision, one of ``single`` if that is as good; the table of compared shapes).

    Raises:
        PlanError: nothing fits, not even with one worker per stage.
    """
    request, num_stages = problem.request, problem.request.requested_stages
    most = len(problem.profile.graph.cut_positions()) + 1
    wanted = shapes(len(problem.cluster.devices), most, request.lanes, num_stages)
    rows = [_row(decisions) for decisions in single]
    best_s = min(map(step_s_of, single), default=math.inf)
    searches = [ShapeSearch(each) for each in _with_recompute(problem)]
    shown = _always_shown(searches[0], wanted)
    decisions: list[Decision] = []
    for shape in wanted:
        if shape not in shown and searches[0].at_least_s(shape) > best_s * (1 + EVEN):
            continue
        try:
            decision = _first(searches, shape, math.inf if shape in shown else best_s * (1 + 2 * EVEN))
        except ShapeError as refusal:
            rows.append(Candidate(shape, refused=str(refusal)))
            continue
        if decision is not None:
            decisions.append(decision)
            best_s = min(best_s, step_s_of(decision))
    decisions.sort(key=step_s_of)
    decisions[:FEW] = [with_branches(each) for each in decisions[:FEW]]
    rows += map(_row, decisions)
    if not (single or decisions):
        raise PlanError(_nothing(rows))
    near = as_quick([*single, *decisions], step_s_of)
    chosen = min(near, key=lambda each: (sum(each.partition.replicas), max(each.partition.replicas)))
    table = _table(rows, chosen.partition.replicas)
    return chosen, table


def of_shape(problem: Problem, shape: Shape) -> Decision:
    """Find the best decision of a given shape.

    Raises:
        ShapeError: no plan of this shape is possible; the message is a short reason.
    """
    decision = _first([ShapeSearch(each) for each in _with_recompute(problem)], shape, math.inf)
    assert decision is not None, "any step is shorter than forever"
    return with_branches(decision)


def with_branches(decision: Decision) -> Decision:
    """Cut the graph for the same shape with other execution orders of its nodes; return the fastest decision.

    The antichain method gets the workers of each stage, and their seconds to sum gradients. The part of these that
    overlaps with other stages' work is unknown before a plan is simulated, so the method runs once for each of WEIGHTS.
    A graph without branches has one order: the decision is returned unchanged.
    """
    request, graph = decision.request, decision.graph
    if request.split_points or request.partitioner not in ("auto", "antichain") or not branches(graph):
        return decision
    stages, rates = decision.partition.stages, []
    lanes = request.num_lanes(len(stages))
    for stage in stages:
        link = slowest_link(decision.cluster, stage.devices, stage.devices)
        rates_s = summing_rates_s(len(stage.devices), lanes, link, request.sums_factor, shards=request.shards)
        rates.append(sum(rates_s) / decision.num_microbatches)
    best = decision
    for weight in WEIGHTS:
        limits = dataclasses.replace(decision.limits, sync_s_per_byte=tuple(weight * rate for rate in rates))
        try:
            other = cut_for(request, antichain, graph, decision.cluster, limits)
        except PlanError:  # too many orders, or none that fits
            return best
        moved = dataclasses.replace(decision, partition=other)
        step_s = seconds_of(moved)
        if step_s < best.prediction.step_s * (1 - WORTH):
            best = dataclasses.replace(moved, prediction=dataclasses.replace(decision.prediction, step_s=step_s))
    return best


def shape_reason(best: Decision, table: Sequence[Candidate]) -> str:
    """Explain the number of workers of each stage, compared with the best plan of another kind of parallelism.

    Args:
        table: table of compared shapes from ``best_shape``.
    """
    chosen = next(each for each in table if each.chosen)
    what = f"{chosen.kind} on {'-'.join(map(str, chosen.workers))} workers"
    others = [each for each in table if not each.refused and each.kind != chosen.kind]
    if not others:
        return f"{what}; no other kind of plan fits or comes near"
    other = min(others, key=lambda each: each.step_s)
    shape, step_s = "-".join(map(str, other.workers)), best.prediction.step_s
    faster = other.step_s / step_s - 1 if step_s else 0.0
    if faster < EVEN:
        return f"{what}; as fast as {other.kind} {shape}"
    how = f"{faster:.0%} faster than" if faster < 1 else f"{faster + 1:.1f} times as fast as"
    return f"{what}, {how} {other.kind} {shape}; {human_s(step_s)} against {human_s(other.step_s)}"


def _always_shown(search: ShapeSearch, wanted: Sequence[Shape]) -> set[Shape]:
    """Pick the shapes to compare in any case: data parallelism on the most workers, and the other of least bound."""
    bounds_s: dict[Shape, float] = {}
    for shape in wanted:
        if len(shape) > 1 and search.at_least_s(shape) < min(bounds_s.values(), default=math.inf):
            with contextlib.suppress(ShapeError):
                bounds_s[shape] = search.bound_s(shape)
    largest = next((shape for shape in wanted if len(shape) == 1), None)
    return {shape for shape in (largest, min(bounds_s, key=bounds_s.__getitem__, default=None)) if shape is not None}


def _with_recompute(problem: Problem) -> list[Problem]:
    """List the problem with the least recomputation that the request allows; if memory is limited, also the most."""
    if not is_open(problem.request):
        return [problem]
    none = problem.request.recompute
    least = tuple(bool(at) for at in none) if isinstance(none, tuple) else False
    return [settled(problem, least), *([settled(problem, most_recompute(problem.request))] if problem.bounded else [])]


def _first(searches: Sequence[ShapeSearch], shape: Shape, below_s: float) -> Decision | None:
    """Return the result of the first search in which the shape is possible; see ``ShapeSearch.best``.

    Raises:
        ShapeError: the shape is possible in no search; the reason is that of the last one.
    """
    for search in searches[:-1]:
        try:
            return search.best(shape, below_s)
        except ShapeError:
            continue
    return searches[-1].best(shape, below_s)


def _row(decision: Decision) -> Candidate:
    memory = max(stage.memory_bytes for stage in decision.partition.stages)
    step_s, count = decision.prediction.step_s, decision.num_microbatches
    return Candidate(decision.partition.replicas, step_s, memory, count, decision.microbatch_size)


def _table(rows: Sequence[Candidate], chosen: Shape) -> tuple[Candidate, ...]:
    """Sort the table and shorten it to MOST_ROWS: possible shapes, quickest first, then impossible ones.

    The chosen shape and the best of each kind of parallelism are always kept.
    """
    slowest_first = sorted((row for row in rows if not row.refused), key=lambda row: -row.step_s)
    quick = [*{row.workers: row for row in slowest_first}.values()]
    quick.sort(key=lambda row: row.step_s)
    refused = sorted((row for row in rows if row.refused), key=lambda row: (len(row.workers) > 1, -sum(row.workers)))
    best = {row.kind: row for row in reversed(quick)}.values()
    kept = [row for row in quick if row.workers == chosen or row in best]
    kept += [row for row in quick if row not in kept][: MOST_ROWS - 4 - len(kept)]
    kept += refused[: MOST_ROWS - len(kept)]
    order = {id(row): place for place, row in enumerate((*quick, *refused))}
    kept.sort(key=lambda row: order[id(row)])
    return tuple(dataclasses.replace(row, chosen=row.workers == chosen) for row in kept)


def _nothing(rows: Sequence[Candidate]) -> str:
    shown = "; ".join(f"{'-'.join(map(str, row.workers))}: {row.refused}" for row in rows[:3])
    return f"No plan fits, with replicas of stages or without ({shown}). Use smaller micro-batches or more memory."
