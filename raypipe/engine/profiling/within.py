"""A profile within a budget of processor time: all of it where the model is small, else of what is alike only once.

    smallest size    every kind of operation once (alike.py), the whole model to scale them to
    largest size     the same once more, as large as the rest of the budget allows
    bytes            on the meta device, which computes nothing; where it cannot be, by one run of the smallest size

A model whose full measurement (measure.py) would take less than the budget gets that. Otherwise seconds at the two
sizes give every other size a line, and what was not measured is estimated from operations of the same function. An
operation that has begun is not cut short, and every kind is run forward once, so a model of few and very large
operations goes beyond the budget.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from raypipe.engine.capture import Capture
from raypipe.engine.one_thread import one_thread
from raypipe.engine.profiling.alike import Alike, Budget, Parts
from raypipe.engine.profiling.estimate import bytes_unrun
from raypipe.engine.profiling.measure import (
    Bench,
    Progress,
    advancing,
    device_name,
    larger_sizes,
    powers_of_two,
    profile_graph,
    settle_allocator,
    unprofiled,
)
from raypipe.engine.profiling.steps import Columns, first_of, samples_of
from raypipe.engine.profiling.workspace import workspaces
from raypipe.ir.lines import Lines
from raypipe.ir.profile import Profile

__all__ = ["PROFILE_BUDGET_S", "profile_within"]

PROFILE_BUDGET_S = 10.0
FULL_PASSES = 7
"""The full measurement takes about so many forwards and backwards per repetition, all sizes together."""
WHOLE_SHARE, WHOLES = 0.3, 4
"""Of what is left, that one run of the whole model may take; and how often it is run."""
AGAIN = 2.3
"""Times that an operation is measured, about, when it is long."""


def profile_within(
    captured: Capture,
    columns: Columns,
    larger: Columns | None = None,
    *,
    sizes: Sequence[int] | None = None,
    budget_s: float = PROFILE_BUDGET_S,
    repeats: int = 5,
    progress: Progress | None = None,
) -> Profile:
    """Measure a model on this machine's CPU with one intra-op thread, as the stages use.

    Args:
        columns: one micro-batch by column, targets included.
        larger: the same with more samples, which are tried where there is time.
        sizes: of micro-batches of interest; None for powers of two up to that of ``columns``.
        budget_s: seconds of processor time.
        repeats: measurements of everything, at most.
        progress: called with (done, total) operations.

    Raises:
        StageError: the model cannot run on these columns; ``estimate_graph`` needs no run.
    """
    samples, total = samples_of(columns), len(captured.graph.nodes)
    wanted = sorted({*(powers_of_two(samples) if sizes is None else sizes), samples})
    wanted = [size for size in wanted if size] or [samples]
    told = progress or (lambda done, total: None)
    with unprofiled(samples):
        settle_allocator()
        with one_thread():
            run = _Run(Budget(budget_s), Bench.of(captured), repeats, told)
            small = _smallest(run, columns, wanted if len(wanted) > 1 else [min(2, samples), samples])
            if FULL_PASSES * repeats * small.total_s * samples / small.size <= run.budget.left_s:
                return _all_operations(captured, columns, larger, sizes, run)
            small = dataclasses.replace(small, ratio=_ratio(run, first_of(columns, small.size), small))
            limit = [*wanted, *(larger_sizes(samples, larger or {}) if len(wanted) > 1 else ())]
            large = _largest(run, larger if larger and samples_of(larger) > samples else columns, limit, small)
            counts = _bytes(captured, run.bench, columns, small.size)
    told(total, total)
    return _profile(captured, small, large, counts, run.budget)


def _all_operations(
    captured: Capture, columns: Columns, larger: Columns | None, sizes: Sequence[int] | None, run: _Run
) -> Profile:
    """The full measurement, told as so many operations."""
    total = len(captured.graph.nodes)
    found = profile_graph(
        captured, columns, larger, sizes=sizes, repeats=run.repeats,
        progress=lambda done, of: run.told(round(total * done / of), total),
    )  # fmt: skip
    return dataclasses.replace(found, notes=(*found.notes, f"All {total} operations were measured."))


class _Run(NamedTuple):
    """What every pass needs.

    Attributes:
        repeats: measurements of an operation, at most.
        told: of (done, total) operations.
    """

    budget: Budget
    bench: Bench
    repeats: int
    told: Progress


@dataclasses.dataclass(frozen=True, slots=True)
class _Pass:
    """Of one size: seconds of every operation, the loss in the last one.

    Attributes:
        unique_s: seconds of one measurement of every kind.
        measured: kinds that were measured, and all of them.
        ratio: (forward, backward) of the operations over those of the whole model; None where that was not run.
    """

    size: int
    parts: list[Parts]
    unique_s: float
    measured: tuple[int, int]
    ratio: tuple[float, float] | None = None

    @property
    def total_s(self) -> float:
        return sum(p.forward_s + p.backward_s for p in self.parts)


def _pass(run: _Run, columns: Columns, repeats: int, advance: Callable[[], None]) -> _Pass:
    bench = run.bench
    leaves = [[bench.leaves[site] for site in sites] for sites in bench.steps.sites]
    observer = Alike(leaves, bench.steps.weight_like, run.budget, repeats, advance)
    outputs = bench.steps.run(bench.leaves, bench.buffers, columns, observer)
    loss = observer.loss_parts(bench.loss, outputs, columns)
    parts = observer.seconds()
    last = parts[-1]
    parts[-1] = dataclasses.replace(
        last,
        forward_s=last.forward_s + loss.forward_s,
        input_s=last.input_s + loss.input_s,
        measured=last.measured and loss.measured,
    )
    known = list(observer.found.values())
    unique_s = sum(p.forward_s + p.backward_s for p in (*known, loss))
    return _Pass(samples_of(columns), parts, unique_s, (sum(p.measured for p in known), len(known)))


def _smallest(run: _Run, columns: Columns, sizes: Sequence[int]) -> _Pass:
    """The pass of the smallest size that the model runs with, which is the first half of the work."""
    total = len(run.bench.steps.sites)
    for place, size in enumerate(sizes):
        try:
            advance = advancing(lambda done: run.told(done // 2, total))
            return _pass(run, first_of(columns, size), 5, advance)
        except (RuntimeError, ValueError):  # batch statistics of a single value, for one
            if place + 1 == len(sizes):
                raise
    raise AssertionError("unreachable: the last size either runs or raises")


def _largest(run: _Run, columns: Columns, sizes: Sequence[int], small: _Pass) -> _Pass:
    """The pass of the largest size that there is time for; ``small`` where there is none."""
    size = _affordable(sizes, small, run.budget)
    if size <= small.size:
        return small
    total, part = len(run.bench.steps.sites), first_of(columns, size)
    found = _pass(run, part, run.repeats, advancing(lambda done: run.told((total + done) // 2, total)))
    return dataclasses.replace(found, ratio=_ratio(run, part, found) or small.ratio)


def _ratio(run: _Run, columns: Columns, found: _Pass) -> tuple[float, float] | None:
    """(forward, backward) of the operations over those of the whole model; None where there is no time to run it."""
    wholes: list[tuple[float, float]] = []
    while len(wholes) < WHOLES and found.total_s <= WHOLE_SHARE * run.budget.left_s:
        wholes.append(run.bench.whole(columns))
    if len(wholes) < 2:  # the first touches memory that later ones find
        return None
    forward_s, backward_s = (min(seconds) for seconds in zip(*wholes[1:], strict=True))
    sums = sum(p.forward_s for p in found.parts), sum(p.backward_s for p in found.parts)
    return sums[0] / forward_s, (sums[1] / backward_s if backward_s and sums[1] else 1.0)


def _affordable(sizes: Sequence[int], small: _Pass, budget: Budget) -> int:
    """The largest size of which every kind can be measured in what is left."""
    costs = {size: AGAIN * small.unique_s * size / small.size for size in sizes if size > small.size}
    return max((size for size, cost_s in costs.items() if cost_s <= budget.left_s), default=small.size)


def _bytes(captured: Capture, bench: Bench, columns: Columns, size: int) -> tuple[list[int], list[Lines], int]:
    """By operation, kept bytes and workspaces, and the samples that the former are of."""
    samples = samples_of(columns)
    unrun = bytes_unrun(captured, samples, bench.loss)
    if unrun is not None:
        return *unrun, samples
    part, twice = first_of(columns, size), min(2 * size, samples)
    low = kept = bench.kept(part)
    if twice > size:  # a line through two sizes: not all of it grows with the samples
        high = bench.kept(first_of(columns, twice))
        grown = (samples - size) / (twice - size)
        kept = [round(a + (b - a) * grown) for a, b in zip(low, high, strict=True)]
    return kept, workspaces(bench.passes(), part), samples if twice > size else size


def _profile(
    captured: Capture, small: _Pass, large: _Pass, counts: tuple[list[int], list[Lines], int], budget: Budget
) -> Profile:
    kept, spaces, samples = counts
    by_size = {p.size: _scaled(p.parts, p.ratio or (1.0, 1.0)) for p in (small, large)}
    nodes = tuple(
        dataclasses.replace(
            node,
            forward_s=parts.forward_s,
            backward_input_s=parts.input_s,
            backward_weight_s=parts.weight_s + parts.sums_s,
            activation_bytes=-(-kept[i] // samples),
            workspace=spaces[i],
            source="measured" if parts.measured else "estimated",
        )
        for i, (node, parts) in enumerate(zip(captured.graph.nodes, by_size[large.size], strict=True))
    )
    return Profile(
        graph=dataclasses.replace(captured.graph, nodes=nodes),
        microbatch_size=large.size,
        seconds_by_size=tuple(sorted((size, math.fsum(_seconds(parts))) for size, parts in by_size.items())),
        raw_ratio=large.ratio or (1.0, 1.0),
        device=device_name(),
        notes=(_note(len(nodes), small, large, budget),),
        small=None if large is small else (small.size, tuple(_seconds(by_size[small.size]))),
    )


def _scaled(parts: Sequence[Parts], ratio: tuple[float, float]) -> list[Parts]:
    """Operations that together take what the whole model does."""
    forward, backward = 1 / ratio[0], 1 / ratio[1]
    return [
        dataclasses.replace(
            p,
            forward_s=p.forward_s * forward,
            input_s=p.input_s * backward,
            weight_s=p.weight_s * backward,
            sums_s=p.sums_s * backward,
        )
        for p in parts
    ]


def _seconds(parts: Sequence[Parts]) -> list[float]:
    return [p.forward_s + p.backward_s for p in parts]


def _note(operations: int, small: _Pass, large: _Pass, budget: Budget) -> str:
    measured, kinds = large.measured
    sizes = str(small.size) if small is large else f"{small.size} and {large.size}"
    rest = ""
    if kinds > measured:
        rest = f" Backwards of {kinds - measured} kinds are estimated from operations of the same function."
    stand = "were measured and stand for the others, which are like them," if measured else "were measured,"
    return (
        f"Of {operations} operations {measured} {stand} at micro-batches of {sizes}, in "
        f"{budget.spent_s:.1f} s of processor time (profile_budget_s={budget.total_s:g}); "
        f"other sizes are estimated.{rest}"
    )
