"""Data parallelism, pipelines and what lies between, compared by the seconds of a simulated step.

    one worker per stage      decided as if num_replicas=1 had been asked for
    every other shape         ``replicated``, unless a bound says that it cannot be the best
    least step; of those that are as good the fewest workers, then the fewest replicas

The table of what was compared goes into the plan, with the reason where a shape was refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence

from raypipe.errors import PlanError
from raypipe.ir.candidate import Candidate
from raypipe.ir.plan_table import human_s
from raypipe.planner.partition.antichain import antichain
from raypipe.planner.tolerance import EVEN, as_quick
from raypipe.planner.tune.decision import Decision, step_s_of
from raypipe.planner.tune.predict import seconds_of
from raypipe.planner.tune.problem import Problem
from raypipe.planner.tune.recompute import is_open, most_recompute, settled
from raypipe.planner.tune.replicas import cut_for, slowest_link, summing_rates_s
from raypipe.planner.tune.replicated import ShapeError, ShapeSearch
from raypipe.planner.tune.shapes import Shape, shapes
from raypipe.planner.tune.solvers import WORTH, branches

__all__ = ["best_shape", "of_shape", "shape_reason", "with_branches"]

FEW = 3
"""Shapes, the quickest, for which other orders of execution are looked at."""
WEIGHTS = (1.0, 4.0, 16.0)
"""Of sums of gradients against computing. As many seconds of either are as long only where no stage waits for another;
those of the first stage come behind everything else."""
MOST_ROWS = 12
"""Of the table: the quickest, and of the others those that were refused."""


def best_shape(problem: Problem, single: Sequence[Decision]) -> tuple[Decision | None, tuple[Candidate, ...]]:
    """The quickest decision with replicas, None where one without is as good, and the table of all.

    Args:
        problem: whose request leaves replicas open.
        single: decisions with one worker per stage; may be empty.

    Raises:
        PlanError: nothing fits, with one worker per stage neither.
    """
    request, asked = problem.request, problem.request.asked_stages
    most = len(problem.profile.graph.cut_positions()) + 1
    wanted = shapes(len(problem.cluster.devices), most, request.lanes, asked)
    rows = [_row(found) for found in single]
    best_s = min(map(step_s_of, single), default=math.inf)
    searches = [ShapeSearch(each) for each in _with_recompute(problem)]
    shown = _always_shown(searches[0], wanted)
    found: list[Decision] = []
    for shape in [*wanted, *_of_one_worker_each(problem, single, most, asked)]:
        if shape not in shown and searches[0].at_least_s(shape) > best_s * (1 + EVEN):
            continue
        try:
            decision = _first(searches, shape, math.inf if shape in shown else best_s * (1 + 2 * EVEN))
        except ShapeError as refusal:
            if max(shape) > 1 or not single:
                rows.append(Candidate(shape, refused=str(refusal)))
            continue
        if decision is not None:
            found.append(decision)
            best_s = min(best_s, step_s_of(decision))
    found.sort(key=step_s_of)
    found[:FEW] = [with_branches(each) for each in found[:FEW]]
    rows += map(_row, found)
    if not (single or found):
        raise PlanError(_nothing(rows))
    near = as_quick([*single, *found], step_s_of)
    chosen = min(near, key=lambda each: (sum(each.partition.replicas), max(each.partition.replicas)))
    table = _table(rows, chosen.partition.replicas)
    return (None if any(chosen is each for each in single) else chosen), table


def of_shape(problem: Problem, shape: Shape) -> Decision:
    """The best decision with replicas that were given.

    Raises:
        PlanError: it cannot be; a few words.
    """
    found = _first([ShapeSearch(each) for each in _with_recompute(problem)], shape, math.inf)
    assert found is not None, "any step is shorter than forever"
    return with_branches(found)


def with_branches(found: Decision) -> Decision:
    """The same shape with nodes in another order of execution, where the model allows one that is faster.

    PipeDream's optimizer looks for stages of a graph and for their replicas together. Here the antichain method is told
    how many workers each stage has, and what they take to sum the gradients of its parameters. How much of that lies
    beside other stages' work nobody knows before a plan is simulated, so it is asked with several weights.
    """
    request, graph = found.request, found.graph
    if request.split_points or request.partitioner not in ("auto", "antichain") or not branches(graph):
        return found
    stages, rates = found.partition.stages, []
    lanes = request.num_lanes(len(stages))
    for stage in stages:
        link = slowest_link(found.cluster, stage.devices, stage.devices)
        rates_s = summing_rates_s(len(stage.devices), lanes, link, request.sums_factor, shards=request.shards)
        rates.append(sum(rates_s) / found.num_microbatches)
    best = found
    for weight in WEIGHTS:
        limits = dataclasses.replace(found.limits, sync_s_per_byte=tuple(weight * rate for rate in rates))
        try:
            other = cut_for(request, antichain, graph, found.cluster, limits)
        except PlanError:  # too many orders, or none that fits
            return best
        moved = dataclasses.replace(found, partition=other)
        step_s = seconds_of(moved)
        if step_s < best.prediction.step_s * (1 - WORTH):
            best = dataclasses.replace(moved, prediction=dataclasses.replace(found.prediction, step_s=step_s))
    return best


def shape_reason(best: Decision, table: Sequence[Candidate]) -> str:
    """Why so many workers for each stage, with the next best of another kind."""
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


def _of_one_worker_each(
    problem: Problem, single: Sequence[Decision], most_stages: int, num_stages: int | None
) -> list[Shape]:
    """Pipelines whose cuts and numbers of micro-batches were not all compared before: on links of several speeds."""
    if not problem.described or (single and all(found.of_all for found in single)):
        return []
    counts = range(1, min(most_stages, len(problem.cluster.devices)) + 1)
    return [(1,) * count for count in counts if num_stages in (None, count)]


def _always_shown(search: ShapeSearch, wanted: Sequence[Shape]) -> set[Shape]:
    """Data parallelism on all workers, and the most promising of the other shapes, so that the table has every kind."""
    bounds_s: dict[Shape, float] = {}
    for shape in wanted:
        if len(shape) > 1 and search.at_least_s(shape) < min(bounds_s.values(), default=math.inf):
            with contextlib.suppress(ShapeError):
                bounds_s[shape] = search.bound_s(shape)
    largest = next((shape for shape in wanted if len(shape) == 1), None)
    return {shape for shape in (largest, min(bounds_s, key=bounds_s.__getitem__, default=None)) if shape is not None}


def _with_recompute(problem: Problem) -> list[Problem]:
    """The problem with no more recomputation than was asked for, then with all that is open."""
    if not is_open(problem.request):
        return [problem]
    none = problem.request.recompute
    least = tuple(bool(at) for at in none) if isinstance(none, tuple) else False
    return [settled(problem, least), *([settled(problem, most_recompute(problem.request))] if problem.bounded else [])]


def _first(searches: Sequence[ShapeSearch], shape: Shape, below_s: float) -> Decision | None:
    """Of the first search in which the shape can be."""
    for search in searches[:-1]:
        try:
            return search.best(shape, below_s)
        except ShapeError:
            continue
    return searches[-1].best(shape, below_s)


def _row(found: Decision) -> Candidate:
    memory = max(stage.memory_bytes for stage in found.partition.stages)
    step_s, count = found.prediction.step_s, found.num_microbatches
    return Candidate(found.partition.replicas, step_s, memory, count, found.microbatch_size)


def _table(rows: Sequence[Candidate], chosen: Shape) -> tuple[Candidate, ...]:
    """The quickest first, the best of each kind among them; then, as far as there is room, what was refused."""
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
