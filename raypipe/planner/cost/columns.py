"""Columns of a graph: numbers of its nodes as arrays, and their sums over ranges of nodes.

The planner needs the same numbers of a few graphs hundreds of times, so the columns of the latest graphs are cached.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from raypipe.ir.graph import Lines, ModelGraph, pruned

Ints = NDArray[np.int64]
KEPT = 24
"""Number of graphs whose columns are cached: one for each micro-batch size that is compared, and variants of them."""
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Sums(NamedTuple):
    """Sums of the bytes of some nodes; activation_bytes are those of one sample."""

    param_bytes: int
    trainable_bytes: int
    buffer_bytes: int
    activation_bytes: int


class Columns(NamedTuple):
    """Numbers by node, shape (nodes,) unless stated otherwise.

    Attributes:
        busy_s: seconds of one micro-batch, forward and backward.
        forward_s, backward_s: the forward's part of busy_s, and the backward's.
        weight_s: the part of the backward that computes gradients of parameters.
        param_bytes, trainable_bytes, buffer_bytes, activation_bytes: bytes of the node; activations of one sample.
        workspace: lines of all nodes (``Node.workspace``): fixed bytes, bytes per sample, and bytes per sample of
            activations up to that node; shape (3, lines).
        workspace_at: index of each node's first line; shape (nodes + 1,).
        places: positions where the graph may be cut, and its two ends; shape (places,).
        cut_bytes: bytes of one sample that cross each place; 0 at the ends; shape (places,).
        before: sums of the four byte columns over the nodes before each position; shape (4, nodes + 1).
    """

    busy_s: NDArray[np.float64]
    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    weight_s: NDArray[np.float64]
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
    """Cache key of a graph, equal only for the same object: comparing all nodes would take longer than reading them."""

    def __init__(self, graph: ModelGraph) -> None:
        self.graph = graph

    def __hash__(self) -> int:
        return id(self.graph)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.graph is self.graph


def cached_by_graph(maxsize: int) -> Callable[[_Function], _Function]:
    """Return a decorator that caches the latest ``maxsize`` results of a function of a graph and hashable arguments."""

    def cached(function: _Function) -> _Function:
        of_same = functools.lru_cache(maxsize)(lambda same, *args: function(same.graph, *args))

        @functools.wraps(function)
        def of_graph(graph: ModelGraph, *args: Any) -> Any:
            return of_same(_Same(graph), *args)

        return cast(_Function, of_graph)

    return cached


@cached_by_graph(KEPT)
def columns_of(graph: ModelGraph) -> Columns:
    """Return the cached columns of a graph; read-only."""
    nodes = graph.nodes
    rows_s = [(n.forward_s, n.backward_input_s + n.backward_weight_s, n.backward_weight_s) for n in nodes]
    forward_s, backward_s, weight_s = np.array(rows_s, dtype=np.float64).reshape(-1, 3).T
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
        forward_s + backward_s,
        forward_s,
        backward_s,
        weight_s,
        params,
        trainable,
        buffers,
        activations,
        lines,
        lines_at,
        places,
        cut_bytes,
        before,
    )


def prefix(values: Ints) -> Ints:
    """Return the prefix sums of the values, from 0 to the sum of all; shape (len(values) + 1,)."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(values)))


def sums_of(graph: ModelGraph, nodes: Sequence[int]) -> Sums:
    """Sum the bytes of the nodes at these positions.

    Args:
        nodes: positions; a contiguous range is computed as a difference of prefix sums.
    """
    columns = columns_of(graph)
    if isinstance(nodes, range) and nodes.step == 1:
        start, stop = (nodes.start, nodes.stop) if len(nodes) else (0, 0)
        return Sums(*(columns.before[:, stop] - columns.before[:, start]).tolist())
    at = np.asarray(nodes, dtype=np.int64)
    four = (columns.param_bytes, columns.trainable_bytes, columns.buffer_bytes, columns.activation_bytes)
    return Sums(*(int(column[at].sum()) for column in four))


def workspace_bytes(graph: ModelGraph, nodes: Sequence[int], samples: int) -> int:
    """Return the peak bytes beyond kept activations while these nodes run one micro-batch of ``samples`` samples."""
    fixed, slopes = _lines_of(graph, nodes)
    return max(0, int((fixed + samples * slopes).max(initial=0)))


def stages_workspace(graph: ModelGraph, positions: Ints, samples: int) -> Ints:
    """Compute ``workspace_bytes`` of every stage of many cuts, shape (cuts, stages).

    Args:
        positions: the first node of each stage, and the number of nodes, by cut; shape (cuts, stages + 1).
    """
    columns = columns_of(graph)
    fixed, slopes, kept = columns.workspace
    lines, stops = columns.workspace_at[positions], positions[:, 1:]
    if not len(fixed):
        return np.zeros(stops.shape, dtype=np.int64)
    # peaks[i, at]: the largest of 2**i lines from ``at`` on; two such ranges cover any range of lines.
    peaks = [fixed + samples * (slopes + kept)]
    for width in (1 << i for i in range(len(fixed).bit_length() - 1)):
        peaks.append(np.maximum(peaks[-1], np.append(peaks[-1][width:], np.repeat(peaks[-1][-1:], width))))
    counts = np.diff(lines, axis=1)
    level = np.frexp(np.maximum(1, counts))[1] - 1
    starts, ends = np.minimum(lines[:, :-1], len(fixed) - 1), np.maximum(0, lines[:, 1:] - (1 << level))
    table = np.stack(peaks)
    peak = np.maximum(table[level, starts], table[level, ends]) - samples * columns.before[3][stops]
    found: Ints = np.where(counts > 0, np.maximum(0, peak), 0)
    return found


def neediest(graph: ModelGraph, nodes: Sequence[int], samples: int) -> int:
    """Return the position of the node at which ``workspace_bytes`` is reached; of several such nodes, the last.

    Some node must have a workspace.
    """
    columns, (fixed, slopes) = columns_of(graph), _lines_of(graph, nodes)
    at = np.asarray(nodes, dtype=np.int64)
    owners = np.repeat(at, columns.workspace_at[at + 1] - columns.workspace_at[at])
    return int(owners[::-1][(fixed + samples * slopes)[::-1].argmax()])


def workspace_lines(graph: ModelGraph, nodes: Sequence[int]) -> Lines:
    """Return lines (fixed bytes, bytes per sample) whose maximum is ``workspace_bytes`` at any number of samples."""
    fixed, slopes = _lines_of(graph, nodes)
    return pruned(zip(fixed.tolist(), slopes.tolist(), strict=True))


def _lines_of(graph: ModelGraph, nodes: Sequence[int]) -> tuple[Ints, Ints]:
    """Return (fixed bytes, bytes per sample) of the workspace lines of these nodes.

    Activations that later nodes have released when the node runs backward are subtracted.
    """
    columns = columns_of(graph)
    if isinstance(nodes, range) and nodes.step == 1:
        start, stop = (nodes.start, nodes.stop) if len(nodes) else (0, 0)
        lines = slice(columns.workspace_at[start], columns.workspace_at[stop])
        kept = columns.before[3]
        return columns.workspace[0, lines], columns.workspace[1, lines] - (kept[stop] - columns.workspace[2, lines])
    at = np.asarray(nodes, dtype=np.int64)
    kept = columns.activation_bytes[at]
    counts = columns.workspace_at[at + 1] - columns.workspace_at[at]
    # The lines of the first of these nodes, then those of the second, ...
    within = np.arange(counts.sum()) - np.repeat(prefix(counts)[:-1], counts)
    lines = np.repeat(columns.workspace_at[at], counts) + within
    return columns.workspace[0, lines], columns.workspace[1, lines] - np.repeat(kept.sum() - np.cumsum(kept), counts)
