"""A long graph with fewer, larger nodes, to compare numbers of stages and micro-batches with; never what is run.

node    a b c d e f g h i j        bytes at the cuts  9 2 9 9 2 9 9 2 9
group   [a b] [c d e] [f g h] [i j]        groups end where little would cross
"""

from __future__ import annotations

from raypipe.ir.coarse import merge_nodes
from raypipe.ir.graph import ModelGraph, Node

__all__ = ["coarse"]

ENOUGH = 400
"""Nodes up to which a graph is left as it is; of more, a stage of one of eight is still made of 50 groups."""


def coarse(graph: ModelGraph, enough: int = ENOUGH) -> ModelGraph:
    """About ``enough`` runs of nodes as one node each; sums are kept, cuts stay possible only where they were.

    A group is closed at the smallest cut in the second half of its fair share of seconds, parameters and activations.
    """
    if len(graph.nodes) <= enough:
        return graph
    totals = [max(1e-300, float(sum(getattr(n, f) for n in graph.nodes))) for f in _SHARED]
    groups: list[Node] = []
    pending: list[Node] = []
    fill, best = 0.0, -1
    for node in graph.nodes:
        pending.append(node)
        fill += max(getattr(node, field) / total for field, total in zip(_SHARED, totals, strict=True))
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


_SHARED = ("busy_s", "param_bytes", "activation_bytes")
