"""Throughput of four mini-batch sizes at every number of micro-batches: does the number decide it, or the size?

    number      samples of a mini-batch       size       samples of a mini-batch
    N = 1       16   32   64   128            b = 1      16   32   64   128
    N = 2       16   32   64   128            b = 2      16   32   64   128
    ...                                       ...

Hu (2024) claims that throughput follows the number N of micro-batches and not their size b. Each table has the same
measured steps. In a row of the first one N is the same, so where the claim holds its columns are alike; in a row of the
second b is. ``spread_by_number`` is the most over the least throughput of a row with two columns or more, in the median
over rows; ``spread_by_size`` the same of the second table. 1 where the row alone decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jobs.bench.microbatch.sweeps import Key, divisors
from jobs.lib import common
from jobs.lib.common import median

__all__ = ["figures_of", "tables_of", "throughputs"]

Throughputs = dict[tuple[int, int], float]
"""Samples per second by (mini-batch size, number of micro-batches)."""


def throughputs(steps: Mapping[Key, Sequence[float]], sizes: Sequence[int]) -> Throughputs:
    """Of every divisor of every mini-batch size, from the median step."""
    return {(size, n): size / median(steps[Key(size, n)]) for size in sizes for n in divisors(size)}


def figures_of(found: Throughputs) -> dict[str, float]:
    """How far throughput varies where the number is the same, and where the size is."""
    return {
        "spread_by_number": _spread(found, lambda size, number: number),
        "spread_by_size": _spread(found, lambda size, number: size // number),
    }


def _spread(found: Throughputs, row_of: Callable[[int, int], int]) -> float:
    rows: dict[int, list[float]] = {}
    for key, throughput in found.items():
        rows.setdefault(row_of(*key), []).append(throughput)
    return median(max(row) / min(row) for row in rows.values() if len(row) > 1)


def tables_of(name: str, found: Throughputs) -> str:
    """Both tables, over the best throughput of all."""
    sizes = sorted({size for size, _ in found})
    best = max(found.values())
    by_number: list[list[Any]] = []
    by_size: list[list[Any]] = []
    for row in sorted({number for _, number in found}):
        by_number.append([row, *(found[size, row] / best if (size, row) in found else "" for size in sizes)])
        numbers = [size // row if size % row == 0 else 0 for size in sizes]
        by_size.append(
            [row, *(found.get((s, n), 0.0) / best if n else "" for s, n in zip(sizes, numbers, strict=True))]
        )
    columns = [f"of {size}" for size in sizes]
    return "\n\n".join(
        common.table(f"{name}: throughput over the best, by {title}", (head, *columns), rows)
        for title, head, rows in (("number of micro-batches", "N", by_number), ("size of a micro-batch", "b", by_size))
    )
