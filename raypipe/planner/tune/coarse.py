"""A long graph with fewer, larger nodes, to compare numbers of stages and micro-batches with; never what is run.

node    a b c d e f g h i j        bytes at the cuts  9 2 9 9 2 9 9 2 9
group   [a b] [c d e] [f g h] [i j]        groups end where little would cross
"""

from __future__ import annotations

import numpy as np

from raypipe.ir.coarse import merge_nodes
from raypipe.ir.graph import ModelGraph, Node
from raypipe.planner.columns import columns_of

__all__ = ["coarse"]

ENOUGH = 400
"""Nodes up to which a graph is left as it is; of more, a stage of one of eight is still made of 50 groups."""


def coarse(graph: ModelGraph, enough: int = ENOUGH) -> ModelGraph:
    """About ``enough`` runs of nodes as one node each; sums are kept, cuts stay possible only where they were.

    A group is closed at the smallest cut in the second half of its fair share of seconds, parameters and activations.
    """
    if len(graph.nodes) <= enough:
        return graph
    shares = _shares(graph)
    groups: list[Node] = []
    pending: list[Node] = []
    fill, best = 0.0, -1
    for node, share in zip(graph.nodes, shares, strict=True):
        pending.append(node)
        fill += share
        if node.cut_bytes is not None and fill * enough >= 0.5:
            kept = None if best < 0 else pending[best].cut_bytes
            best = len(pending) - 1 if kept is None or node.cut_bytes <= kept else best
        if fill * enough >= 1 and best >= 0:
            groups.append(merge_nodes(pending[: best + 1]))
            pending = pending[best + 1 :]
            fill, best = 0.0, -1
    if pending:
        groups.append(merge_nodes(pending))
    return ModelGraph(tuple(groups))


def _shares(graph: ModelGraph) -> list[float]:
    """By node, its part of all seconds, parameters or activations, whichever is the largest."""
    found = columns_of(graph)
    parts = [column / max(1e-300, float(column.sum())) for column in (found.busy_s, found.param_bytes)]
    kept = found.activation_bytes / max(1e-300, float(found.activation_bytes.sum()))
    largest: list[float] = np.maximum(np.maximum(*parts), kept).tolist()
    return largest
