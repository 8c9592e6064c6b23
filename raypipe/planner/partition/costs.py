"""Prefix sums of a chain in whole picoseconds, and the search for the least bottleneck.

Whole numbers make sums exact in any order, and a bottleneck can be halved in on until nothing is left between
two numbers: the answer is exact to the picosecond.

    node        0    1    2    3    4
    place    0         1         2    3        positions where the chain may be cut, and its two ends
    time_ps  0         t01       ..   total    picoseconds of all nodes before the place
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import PlanError
from raypipe.ir.codec_cost import NO_CODEC, CodecCost
from raypipe.ir.graph import ModelGraph
from raypipe.planner.columns import columns_of, prefix
from raypipe.planner.partition.limits import Limits

__all__ = [
    "EXCHANGE",
    "PICO",
    "Chain",
    "Ints",
    "chain_costs",
    "exchange_ps",
    "least_feasible",
    "node_picoseconds",
]

Ints = NDArray[np.int64]
PICO = 1e12
EXCHANGE = 2
"""A micro-batch crosses a cut twice: its activations forward, their gradients backward (PipeDream's 2 a / B)."""

_T = TypeVar("_T")


class Chain(NamedTuple):
    """A chain by its places; every array has shape (places,).

    Attributes:
        positions: of the places in ``graph.nodes``, from 0 to their number.
        time_ps: of the nodes before.
        forward_ps: the part of it that a stage computes twice where it runs its forwards again.
        sync_bytes: of the trainable parameters before.
        cut_bytes: that cross there per micro-batch, one way; 0 at the ends.
    """

    positions: Ints
    time_ps: Ints
    forward_ps: Ints
    sync_bytes: Ints
    cut_bytes: Ints


def node_picoseconds(graph: ModelGraph) -> Ints:
    """Forward and backward of each node, per micro-batch.

    Raises:
        PlanError: nothing has been profiled.
    """
    seconds = columns_of(graph).busy_s
    if not seconds.any():
        raise PlanError("No node of the graph has seconds: profile the model first, or cut it by parameters.")
    if not (np.isfinite(seconds).all() and (seconds >= 0).all()):
        bad = graph.nodes[int(np.argmin(np.isfinite(seconds) & (seconds >= 0)))]
        raise PlanError(f"Node {bad.name!r} takes {bad.busy_s} s: seconds must be numbers from 0 up.")
    return np.rint(seconds * PICO).astype(np.int64)


def chain_costs(graph: ModelGraph, limits: Limits) -> Chain:
    """The graph's nodes in their own order, cut only where ``cut_bytes`` allows it."""
    found = columns_of(graph)
    return Chain(
        found.places,
        prefix(node_picoseconds(graph))[found.places],
        prefix(np.rint(found.forward_s * PICO).astype(np.int64))[found.places],
        prefix(found.trainable_bytes)[found.places],
        found.cut_bytes * limits.memory.microbatch_size,
    )


def exchange_ps(
    cut_bytes: Ints, bandwidth_bytes_s: float, codecs: tuple[CodecCost, CodecCost] = (NO_CODEC, NO_CODEC)
) -> Ints:
    """Picoseconds that a micro-batch keeps a link busy, there and back.

    Args:
        codecs: of messages forwards and backwards. Encoding, wire and decoding each keep a thread of its own busy, so
            that the longest of the three counts.
    """
    if codecs == (NO_CODEC, NO_CODEC):
        ps_per_byte = EXCHANGE * PICO / bandwidth_bytes_s
    else:
        ps_per_byte = PICO * sum(codec.taken_s(1.0, 1.0 / codec.ratio / bandwidth_bytes_s)[1] for codec in codecs)
    if ps_per_byte == 0.0:
        return np.zeros_like(cut_bytes)
    busy: Ints = np.ceil(cut_bytes * ps_per_byte).astype(np.int64)
    return busy


def least_feasible(
    probe: Callable[[int], _T | None],
    lowest: int,
    highest: int,
    *,
    following: Callable[[int], int] = lambda number: number + 1,
    enough: Callable[[_T], int] | None = None,
) -> tuple[int, _T] | None:
    """The smallest number from ``lowest`` to ``highest`` that ``probe`` has an answer for, with that answer.

    Where a number has an answer, all larger ones must. The lower bound is usually close, so strides from it
    grow before halving begins.

    Args:
        following: for a number without an answer, the next one above it that could have one.
        enough: for an answer, a number that has one too, often far below the one that was asked for.
    """
    below, stride, at = lowest - 1, max(1, lowest >> 8), lowest
    while (found := probe(at)) is None:
        if at >= highest:
            return None
        below = min(following(at), highest) - 1
        at, stride = min(highest, max(below + 1, at + stride)), 4 * stride
    asked = at
    at = _lower(at, found, below, enough)
    while at - below > 1:
        middle = (at + below) // 2
        answer = probe(middle)
        if answer is None:
            below = max(middle, min(following(middle), at) - 1)
        else:
            found, asked = answer, middle
            at = _lower(middle, answer, below, enough)
    if asked != at:  # the same number has the same answer, however it was found
        answer = probe(at)
        assert answer is not None
        found = answer
    return at, found


def _lower(at: int, answer: _T, below: int, enough: Callable[[_T], int] | None) -> int:
    return at if enough is None else max(below + 1, min(at, enough(answer)))
