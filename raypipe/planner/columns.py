"""The numbers of a graph's nodes as arrays, and their sums over runs of nodes; made once for each graph.

A decision asks the same few graphs for the same numbers hundreds of times. A graph cannot change, so what was read from
it is kept, for the graphs that were asked about last.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.ir.graph import ModelGraph
from raypipe.ir.lines import Lines, pruned

__all__ = ["Columns", "Sums", "columns_of", "prefix", "sums_of", "workspace_bytes", "workspace_lines"]

Ints = NDArray[np.int64]
KEPT = 8
"""Graphs whose columns are kept."""


class Sums(NamedTuple):
    """Bytes of some nodes together; activations per sample."""

    param_bytes: int
    trainable_bytes: int
    buffer_bytes: int
    activation_bytes: int


class Columns(NamedTuple):
    """By node, shape (nodes,), unless said otherwise.

    Attributes:
        busy_s: seconds of one micro-batch, forward and backward.
        forward_s: the forward's part of it.
        param_bytes, trainable_bytes, buffer_bytes, activation_bytes: of Node; activations per sample.
        workspace: all nodes' lines: fixed bytes, bytes per sample, activations up to that node; shape (3, lines).
        workspace_at: where each node's lines begin; shape (nodes + 1,).
        places: positions where the graph may be cut, and its two ends; shape (places,).
        cut_bytes: that cross at each place, for one sample; 0 at the ends; shape (places,).
        before: sums of the four byte columns over the nodes before each position; shape (4, nodes + 1).
    """

    busy_s: NDArray[np.float64]
    forward_s: NDArray[np.float64]
    param_bytes: Ints
    trainable_bytes: Ints
    buffer_bytes: Ints
    activation_bytes: Ints
    workspace: Ints
    workspace_at: Ints
    places: Ints
    cut_bytes: Ints
    before: Ints


class _Same:
    """A graph that equals itself only: comparing all nodes would take longer than reading them."""

    def __init__(self, graph: ModelGraph) -> None:
        self.graph = graph

    def __hash__(self) -> int:
        return id(self.graph)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.graph is self.graph


def columns_of(graph: ModelGraph) -> Columns:
    """The columns of a graph; not to be written to."""
    return _columns(_Same(graph))


@functools.lru_cache(maxsize=KEPT)
def _columns(same: _Same) -> Columns:
    nodes = same.graph.nodes
    busy_s = np.array([n.forward_s + (n.backward_input_s + n.backward_weight_s) for n in nodes], dtype=np.float64)
    forward_s = np.array([n.forward_s for n in nodes], dtype=np.float64)
    rows = [(n.param_bytes, n.param_bytes - n.frozen_bytes, n.buffer_bytes, n.activation_bytes) for n in nodes]
    parts = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    counts = np.array([len(n.workspace) for n in nodes], dtype=np.int64)
    inside = [(i + 1, n.cut_bytes) for i, n in enumerate(nodes[:-1]) if n.cut_bytes is not None]
    places = np.array([0, *(place for place, _ in inside), len(nodes)], dtype=np.int64)
    cut_bytes = np.array([0, *(crossing for _, crossing in inside), 0], dtype=np.int64)
    params, trainable, buffers, activations = parts
    before = np.stack([prefix(part) for part in parts])
    lines = np.array([line for n in nodes for line in n.workspace], dtype=np.int64).reshape(-1, 2).T
    lines, lines_at = np.concatenate((lines, np.repeat(before[3][1:], counts)[None])), prefix(counts)
    return Columns(
        busy_s, forward_s, params, trainable, buffers, activations, lines, lines_at, places, cut_bytes, before
    )


def prefix(values: Ints) -> Ints:
    """Sums of the first 0, 1, ... all values."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(values)))


def sums_of(graph: ModelGraph, nodes: Sequence[int]) -> Sums:
    """Bytes of the nodes at these positions.

    Args:
        nodes: a range is taken as a difference of two sums.
    """
    found = columns_of(graph)
    if isinstance(nodes, range) and nodes.step == 1:
        start, stop = (nodes.start, nodes.stop) if len(nodes) else (0, 0)
        return Sums(*(found.before[:, stop] - found.before[:, start]).tolist())
    at = np.asarray(nodes, dtype=np.int64)
    four = (found.param_bytes, found.trainable_bytes, found.buffer_bytes, found.activation_bytes)
    return Sums(*(int(column[at].sum()) for column in four))


def workspace_bytes(graph: ModelGraph, nodes: Sequence[int], samples: int) -> int:
    """Above what these nodes keep for one micro-batch of so many samples, at the worst moment of its life."""
    fixed, slopes = _lines_of(graph, nodes)
    return max(0, int((fixed + samples * slopes).max(initial=0)))


def workspace_lines(graph: ModelGraph, nodes: Sequence[int]) -> Lines:
    """The same for any number of samples."""
    fixed, slopes = _lines_of(graph, nodes)
    return pruned(zip(fixed.tolist(), slopes.tolist(), strict=True))


def _lines_of(graph: ModelGraph, nodes: Sequence[int]) -> tuple[Ints, Ints]:
    """Fixed bytes and bytes per sample of all lines, less what later nodes have let go when a node's backward runs."""
    found = columns_of(graph)
    if isinstance(nodes, range) and nodes.step == 1:
        start, stop = (nodes.start, nodes.stop) if len(nodes) else (0, 0)
        lines = slice(found.workspace_at[start], found.workspace_at[stop])
        kept = found.before[3]
        return found.workspace[0, lines], found.workspace[1, lines] - (kept[stop] - found.workspace[2, lines])
    at = np.asarray(nodes, dtype=np.int64)
    kept = found.activation_bytes[at]
    counts = found.workspace_at[at + 1] - found.workspace_at[at]
    # The lines of the first of these nodes, then those of the second, ...
    within = np.arange(counts.sum()) - np.repeat(prefix(counts)[:-1], counts)
    lines = np.repeat(found.workspace_at[at], counts) + within
    return found.workspace[0, lines], found.workspace[1, lines] - np.repeat(kept.sum() - np.cumsum(kept), counts)
