"""What a cut would cost, and what need not cross it.

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
from raypipe.engine.capture.trace import Traced
from raypipe.engine.randomness import dropout, keyed_call
from raypipe.ir.graph import ModelGraph, Node

__all__ = ["Analysis", "analyse"]

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


def _hint(size: int | torch.SymInt) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size


def nbytes(value: torch.Tensor) -> int:
    """Bytes of a traced tensor at the example's batch size."""
    return math.prod(_hint(d) for d in value.shape) * value.element_size()


def model_graph(analysis: Analysis, samples: int) -> ModelGraph:
    """The planner's view: one Node per operation, with the bytes of a cut after it for one sample.

    Args:
        samples: batch size of the example that was traced.
    """
    traced = analysis.traced
    order = {node: i for i, node in enumerate(analysis.nodes)}
    end = len(analysis.nodes)
    roots = storage_roots(traced.graph)  # a view of a buffer that the next forward changes must not be on its way
    crossing = [0] * (end + 1)
    forbidden = [0] * (end + 1)
    some = [0] * (end + 1)
    for node, at in order.items():
        uses = [order[user] for user in node.users if user in order]
        last = end - 1 if node in analysis.outputs else max(uses, default=at)
        value = node.meta.get("val")
        if last == at:
            continue
        if isinstance(value, torch.Tensor) and roots[node] not in analysis.changing_buffers:
            for counter, amount in ((crossing, nbytes(value)), (some, 1)):
                counter[at] += amount
                counter[last] -= amount
        else:
            forbidden[at] += 1
            forbidden[last] -= 1
    for root, last_use in traced.pinned:
        first = order.get(root, 0)
        forbidden[first] += 1
        forbidden[max(first, order.get(last_use, first))] -= 1
    for buffer in analysis.changing_buffers:
        uses = [order[user] for user in buffer.users if user in order]
        if uses:
            forbidden[min(uses)] += 1
            forbidden[max(uses)] -= 1
    seen: set[fx.Node] = set()
    nodes = []
    live_bytes = live_forbidden = live_some = 0
    for i, node in enumerate(analysis.nodes):
        live_bytes, live_forbidden, live_some = (
            live_bytes + crossing[i],
            live_forbidden + forbidden[i],
            live_some + some[i],
        )
        fresh = [p for p in node.all_input_nodes if p in traced.parameters and p not in seen]
        seen.update(fresh)
        stack = list(node.meta.get("nn_module_stack", {}).values())
        nodes.append(
            Node(
                name=node.name,
                module=stack[-1][0] if stack else "",
                param_names=tuple(traced.parameters[p] for p in fresh),
                param_bytes=sum(nbytes(p.meta["val"]) for p in fresh),
                cut_bytes=None if live_forbidden or not live_some else live_bytes // samples,
            )
        )
    return ModelGraph(tuple(nodes))
