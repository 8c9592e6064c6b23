"""Comparison of data parallelism, pipelines and pipelines with replicas, by the seconds of a simulated step.

A shape is the number of workers of every stage:

    4 workers, up to 3 stages      2  3  4  |  1-2  2-1  1-3  3-1  2-2  |  1-1-2  1-2-1  2-1-1

More workers add shapes and remove none, so that the best plan for fewer workers is still a candidate with more.

    one worker per stage      planned as with num_replicas=1
    every other shape         ``ShapeSearch.best``, unless a lower bound shows that the shape cannot be the best
    best shape                least step time; of equally quick ones the one with the fewest workers, then replicas

The plan includes the table of compared shapes, with the reason for each shape that is not possible.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from raypipe.ir.plan import Candidate
from raypipe.ir.units import human_s
from raypipe.planner.cost.tolerance import EVEN
from raypipe.planner.search.cut_costs import Shape
from raypipe.planner.search.cut_search import ShapeError, ShapeSearch
from raypipe.planner.search.problem import Decision

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


def shape_reason(best: Decision, table: Sequence[Candidate]) -> str:
    """Explain the number of workers of each stage, compared with the best plan of another kind of parallelism.

    Args:
        table: table of compared shapes, from ``table_of``.
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


def always_shown(search: ShapeSearch, wanted: Sequence[Shape]) -> set[Shape]:
    """Pick the shapes that are compared in any case: at most one with one stage, and one with several.

    They are data parallelism on the most workers, and, of the shapes with several stages, the one whose step has the
    lowest lower bound in seconds.

    Args:
        wanted: shapes to pick from, most workers first.
    """
    bounds_s: dict[Shape, float] = {}
    for shape in wanted:
        if len(shape) > 1 and search.at_least_s(shape) < min(bounds_s.values(), default=math.inf):
            with contextlib.suppress(ShapeError):
                bounds_s[shape] = search.bound_s(shape)
    largest = next((shape for shape in wanted if len(shape) == 1), None)
    return {shape for shape in (largest, min(bounds_s, key=bounds_s.__getitem__, default=None)) if shape is not None}


def row_of(decision: Decision) -> Candidate:
    """Convert the plan of a shape to a row of the table of compared shapes."""
    memory = max(stage.memory_bytes for stage in decision.partition.stages)
    step_s, count = decision.prediction.step_s, decision.num_microbatches
    return Candidate(decision.partition.replicas, step_s, memory, count, decision.microbatch_size)


def table_of(rows: Sequence[Candidate], chosen: Shape) -> tuple[Candidate, ...]:
    """Shorten the table to MOST_ROWS: possible shapes, quickest first, then impossible ones.

    If a shape has several rows, only the quickest remains. The chosen shape and the best of each kind of parallelism
    are always kept.
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
