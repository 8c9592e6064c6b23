"""Which shapes and which cuts are compared where the number of replicas is left to the planner.

    4 workers, up to 3 stages      2  3  4  |  1-2  2-1  1-3  3-1  2-2  |  1-1-2  1-2-1  2-1-1

A shape is the number of workers of every stage. More workers add shapes and take none away, and neither shapes nor cuts
depend on links or memory: what was the best with fewer workers or slower links can still be chosen with more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from raypipe.ir.graph import ModelGraph
from raypipe.planner.columns import columns_of

__all__ = ["Shape", "cuts_into", "shapes"]

Ints = NDArray[np.int64]
Shape = tuple[int, ...]
"""Workers by stage."""
FEW_WORKERS = 8
"""Workers up to which every shape is looked at."""
MOST_CUTS = 3000
"""Cuts into one number of stages that are compared; of longer graphs, between the places where least crosses."""


def shapes(workers: int, most_stages: int, most_each: int | None = None, num_stages: int | None = None) -> list[Shape]:
    """Every shape on at most so many workers that has a stage with several.

    Above ``FEW_WORKERS`` those that are known to pay: one stage; two, of any numbers; three, the last with one worker;
    stages with as many workers each; one stage with several and the others with one.

    Args:
        most_stages: that the model can be cut into.
        most_each: workers of a stage; None for no limit.
        num_stages: of the shapes; None for any.
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


def cuts_into(graph: ModelGraph, num_stages: int) -> Ints | None:
    """Cuts as indices into the places of the graph, ends included, shape (cuts, stages + 1); None if there are too few.

    Every cut of a short graph. Of a longer one those between as many places as ``MOST_CUTS`` allows: one for each equal
    share of seconds, parameters and activations, where least crosses.
    """
    inner = len(columns_of(graph).places) - 2
    if inner < num_stages - 1:
        return None
    chosen = range(1, inner + 1) if _number(inner, num_stages) <= MOST_CUTS else _thinned(graph, num_stages)
    cuts = [(0, *some, inner + 1) for some in itertools.combinations(chosen, num_stages - 1)]
    return np.array(cuts, dtype=np.int64)


def _number(places: int, num_stages: int) -> int:
    return math.comb(places, num_stages - 1)


def _thinned(graph: ModelGraph, num_stages: int) -> list[int]:
    found = columns_of(graph)
    inner = len(found.places) - 2
    most = next(count for count in range(inner, 0, -1) if _number(count, num_stages) <= MOST_CUTS)
    most = max(most, num_stages - 1)
    grown = np.zeros(inner)
    for column in (found.busy_s, found.param_bytes, found.activation_bytes):
        share = np.append(0.0, np.cumsum(column)) / max(1e-300, float(column.sum()))
        grown += share[found.places[1:-1]] / 3
    bucket = np.minimum((grown * most).astype(np.int64), most - 1)
    order = np.lexsort((np.arange(inner), found.cut_bytes[1:-1], bucket))
    first = order[np.unique(bucket[order], return_index=True)[1]]
    # Buckets without a place of their own leave room for those where least crosses among the others.
    left = np.setdiff1d(np.arange(inner), first)
    more = left[np.argsort(found.cut_bytes[1:-1][left], kind="stable")][: most - len(first)]
    return [int(at) + 1 for at in np.sort(np.concatenate([first, more]))]
