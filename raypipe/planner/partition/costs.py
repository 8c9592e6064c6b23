"""Limits of a partition, and costs of a chain as prefix sums in whole picoseconds.

Sums of whole numbers are exact in any order, and a bisection over them ends, so the bottleneck is exact to the
picosecond.

    node        0    1    2    3    4
    place    0         1         2    3        positions where the chain may be cut, and its two ends
    time_ps  0         t01       ..   total    picoseconds of all nodes before the place
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import PlanError
from raypipe.ir.cluster import ComputeDevice
from raypipe.ir.communication import NO_CODEC, CodecCost
from raypipe.ir.graph import ModelGraph
from raypipe.planner.cost.columns import KEPT, cached_by_graph, columns_of, prefix
from raypipe.planner.cost.memory import MemoryModel


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a partition.

    Attributes:
        num_stages: exact number of stages; None to optimize it, at most one per device.
        memory: model of a stage's bytes, by schedule and sizes.
        memory_limit_bytes: limit per device, in addition to the device's own; None for no limit.
        room_bytes: bytes kept free on every device for boundary messages and workspaces; ``fit`` sets them.
        in_order: True if stage s is placed on device s, and all devices are used.
        sync_s_per_byte: by stage, seconds per micro-batch in which replicas sum the gradients of one trainable byte;
            with ``in_order`` only. Empty without replicas.
        sums_factor: bytes exchanged by replicas per byte of gradients.
        shards: True if replicas exchange parameters after their steps instead of summed gradients (ZeRO-1).
        codecs: codec of forward messages, and of backward messages.
        max_states: most states (sets of executed nodes) of a graph that ``antichain`` accepts.
    """

    num_stages: int | None = None
    memory: MemoryModel = field(default_factory=MemoryModel)
    memory_limit_bytes: int | None = None
    room_bytes: int = 0
    in_order: bool = False
    sync_s_per_byte: tuple[float, ...] = ()
    sums_factor: float = 1.0
    shards: bool = False
    codecs: tuple[CodecCost, CodecCost] = (NO_CODEC, NO_CODEC)
    max_states: int = 100_000

    def __post_init__(self) -> None:
        if min(1 if x is None else x for x in (self.num_stages, self.memory_limit_bytes, self.max_states)) < 1:
            raise PlanError(f"{self}: each bound must be at least 1, or None where that is allowed.")

    def sync_ps_per_byte(self, depth: int) -> float:
        """Return ``sync_s_per_byte`` of the stage at this depth, in picoseconds; the last stage is at depth 1."""
        return self.sync_s_per_byte[-depth] * 1e12 if self.sync_s_per_byte else 0.0

    def limit_bytes(self, devices: Iterable[ComputeDevice]) -> int | None:
        """Return the memory limit of each worker on these devices: the smallest over them, None for no limit."""
        caps = (self.memory_limit_bytes, *(device.memory_bytes for device in devices))
        return min((cap for cap in caps if cap is not None), default=None)

    def capacity_bytes(self, device: ComputeDevice) -> int | None:
        """Return the bytes that the nodes of one stage may use on this device, None for no limit."""
        cap = self.limit_bytes([device])
        return None if cap is None else cap - self.memory.reserve_bytes - self.room_bytes


Ints = NDArray[np.int64]
PICO = 1e12
EXCHANGE = 2
"""A micro-batch crosses a cut twice: its activations forward, their gradients backward (PipeDream's 2 a / B)."""

_T = TypeVar("_T")


class Chain(NamedTuple):
    """Chain of nodes, described by the places where it may be cut; every array has shape (places,).

    Attributes:
        positions: number of nodes before each place.
        time_ps: picoseconds of the nodes before each place.
        forward_ps: the part of time_ps that is forwards, which a stage with recomputation runs twice.
        sync_bytes: bytes of the trainable parameters before each place.
        cut_bytes: bytes that cross each place per micro-batch, in one direction; 0 at the ends.
    """

    positions: Ints
    time_ps: Ints
    forward_ps: Ints
    sync_bytes: Ints
    cut_bytes: Ints


def node_picoseconds(graph: ModelGraph) -> Ints:
    """Return the picoseconds of forward plus backward of each node, for one micro-batch.

    Raises:
        PlanError: nothing has been profiled, or seconds are negative or not finite.
    """
    seconds = columns_of(graph).busy_s
    if not seconds.any():
        raise PlanError("No node of the graph has seconds: profile the model first, or cut it by parameters.")
    if not (np.isfinite(seconds).all() and (seconds >= 0).all()):
        bad = graph.nodes[int(np.argmin(np.isfinite(seconds) & (seconds >= 0)))]
        raise PlanError(f"Node {bad.name!r} takes {bad.busy_s} s: seconds must be numbers from 0 up.")
    return np.rint(seconds * PICO).astype(np.int64)


@cached_by_graph(KEPT)
def chain_costs(graph: ModelGraph, microbatch_size: int) -> Chain:
    """Return the cached chain of a graph's nodes in their own order; read-only.

    Raises:
        PlanError: see ``node_picoseconds``.
    """
    columns = columns_of(graph)
    return Chain(
        columns.places,
        prefix(node_picoseconds(graph))[columns.places],
        prefix(np.rint(columns.forward_s * PICO).astype(np.int64))[columns.places],
        prefix(columns.trainable_bytes)[columns.places],
        columns.cut_bytes * microbatch_size,
    )


def exchange_ps(
    cut_bytes: Ints, bandwidth_bytes_s: float, codecs: tuple[CodecCost, CodecCost] = (NO_CODEC, NO_CODEC)
) -> Ints:
    """Compute the picoseconds for which a micro-batch occupies a link, over both directions.

    Args:
        cut_bytes: bytes of a micro-batch that cross each cut, in one direction.
        codecs: codec of forward messages, and of backward messages. Encoding, sending and decoding run in three
            threads, so that the longest of the three counts.
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
    """Return the smallest feasible number from ``lowest`` to ``highest``, with the answer of ``probe``; else None.

    Feasibility must be monotone: if a number is feasible, all larger ones are. The result is usually close to
    ``lowest``, so the search begins there with growing strides, before it halves the interval.

    Args:
        probe: returns an answer for a feasible number, None for an infeasible one.
        following: returns the next larger number that could be feasible after an infeasible one.
        enough: returns a number, often far below the probed one, that an answer of ``probe`` shows to be feasible.
    """
    below, stride, at = lowest - 1, max(1, lowest >> 8), lowest
    while (result := probe(at)) is None:
        if at >= highest:
            return None
        below = min(following(at), highest) - 1
        at, stride = min(highest, max(below + 1, at + stride)), 4 * stride
    probed = at
    at = _lower(at, result, below, enough)
    while at - below > 1:
        middle = (at + below) // 2
        answer = probe(middle)
        if answer is None:
            below = max(middle, min(following(middle), at) - 1)
        else:
            result, probed = answer, middle
            at = _lower(middle, answer, below, enough)
    if probed != at:  # the same number has the same answer, however it was found
        answer = probe(at)
        assert answer is not None
        result = answer
    return at, result


def _lower(at: int, answer: _T, below: int, enough: Callable[[_T], int] | None) -> int:
    return at if enough is None else max(below + 1, min(at, enough(answer)))
