"""What belongs to exactly one stage, and what need not cross a cut.

Three kinds of value never cross a link. Parameters and buffers are held where they are used. Data columns
are read where they are used. And whatever follows from shapes, constants and unchanging buffers alone
(masks, position tables, rotary angles, sizes) is *rebuilt* in every stage that uses it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from raypipe.engine.capture.inplace import mutated_args, storage_roots
from raypipe.engine.capture.traced import Traced
from raypipe.engine.randomness import dropout, keyed_call

__all__ = ["SYM_SIZE", "Analysis", "analyse", "column_with", "dim_with", "is_open", "nbytes"]

SYM_SIZE = torch.ops.aten.sym_size.int


@dataclass(slots=True)
class Analysis:
    """A traced model with everything that slicing asks.

    Attributes:
        traced: the flat graph.
        nodes: live operations that belong to exactly one stage, in execution order.
        rebuildable: live operations that are copied into the stages that use them.
        changing_buffers: placeholders of buffers that a forward updates.
        outputs: the model's outputs that are tensors.
        fixed: the others, by position.
        sites: (operation, parameter placeholder) -> number of this use of the parameter.
    """

    traced: Traced
    nodes: list[fx.Node]
    rebuildable: set[fx.Node]
    changing_buffers: set[fx.Node]
    outputs: tuple[fx.Node, ...]
    fixed: tuple[tuple[int, Any], ...]
    sites: dict[tuple[fx.Node, fx.Node], int]


def analyse(traced: Traced) -> Analysis:
    """Find live, rebuildable and buffer-changing operations, and number the uses of every parameter."""
    graph = traced.graph
    roots = storage_roots(graph)
    output = next(n for n in graph.nodes if n.op == "output")
    leaves: Any = output.args[0]
    outputs = tuple(n for n in leaves if isinstance(n, fx.Node))
    fixed = tuple((i, value) for i, value in enumerate(leaves) if not isinstance(value, fx.Node))
    effects = [n for n in graph.nodes if any(roots[a] in traced.buffers for a in mutated_args(n))]
    changing = {roots[a] for n in effects for a in mutated_args(n) if roots[a] in traced.buffers}
    live = _reachable([*outputs, *effects, *(n for n in graph.nodes if _pinned_effect(n, traced, roots))])
    rebuildable = _rebuildable(traced, live, changing, roots)
    nodes = [n for n in graph.nodes if n in live and n.op == "call_function" and n not in rebuildable]
    sites: dict[tuple[fx.Node, fx.Node], int] = {}
    uses: dict[fx.Node, int] = {}
    for node in nodes:
        for used in node.all_input_nodes:
            if used in traced.parameters:
                sites[node, used] = uses.get(used, 0)
                uses[used] = uses.get(used, 0) + 1
    return Analysis(traced, nodes, rebuildable, changing, outputs, fixed, sites)


def _pinned_effect(node: fx.Node, traced: Traced, roots: dict[fx.Node, fx.Node]) -> bool:
    """An operation that stayed in place changes a value that others read through another name."""
    pinned = {root for root, _ in traced.pinned}
    return any(roots[a] in pinned for a in mutated_args(node))


def _reachable(targets: list[fx.Node]) -> set[fx.Node]:
    live: set[fx.Node] = set()
    stack = list(targets)
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack += node.all_input_nodes
    return live


def _rebuildable(
    traced: Traced, live: set[fx.Node], changing: set[fx.Node], roots: dict[fx.Node, fx.Node]
) -> set[fx.Node]:
    pinned = {root for root, _ in traced.pinned}
    free = set(traced.constants) | (set(traced.buffers) - changing)
    found: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if node.op != "call_function" or node not in live or roots[node] in pinned:
            continue
        if node.target is SYM_SIZE:
            if column_with(traced, node.meta["val"]) is not None:
                found.add(node)
        elif node.target in (dropout, keyed_call) or mutated_args(node):
            continue
        elif all(used in found or used in free for used in node.all_input_nodes):
            found.add(node)
    return found


def column_with(traced: Traced, size: Any) -> tuple[fx.Node, int] | None:
    """A data column and a dimension of it that has this symbolic size."""
    for column in traced.columns:
        dim = dim_with(column, size)
        if dim is not None:
            return column, dim
    return None


def dim_with(node: fx.Node, size: Any) -> int | None:
    """The dimension of a traced tensor that has exactly this symbolic size."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(size, torch.SymInt):
        return None
    for dim, own in enumerate(value.shape):
        if isinstance(own, torch.SymInt) and own.node.expr == size.node.expr:
            return dim
    return None


def is_open(value: Any) -> bool:
    """Whether this is a traced tensor of a size that the values decide, as that of ``x[x > 0]`` and ``nonzero``."""
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    return any(isinstance(size, torch.SymInt) and size.node.hint is None for size in sizes)


def _hint(size: int | torch.SymInt) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size


def nbytes(value: torch.Tensor) -> int:
    """Bytes of a traced tensor at the example's batch size."""
    return math.prod(_hint(d) for d in value.shape) * value.element_size()
