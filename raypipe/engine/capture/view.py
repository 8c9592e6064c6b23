"""The planner's view of a traced model: one Node per operation, and what joins them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx

from raypipe.engine.capture.analyse import Analysis, is_open, nbytes
from raypipe.engine.capture.joins import find_joins
from raypipe.ir.graph import ModelGraph, Node, link_nodes

__all__ = ["model_graph"]


def model_graph(
    analysis: Analysis, samples: int, held: Mapping[str, int], frozen: frozenset[str] = frozenset()
) -> ModelGraph:
    """One Node per operation, with the bytes of a cut after it for one sample.

    Args:
        samples: batch size of the example that was traced.
        held: bytes of every parameter and buffer, by name; as a stage keeps them, whatever it computes in.
        frozen: names of the parameters that are not trained.
    """
    traced = analysis.traced
    names = {**traced.parameters, **traced.buffers}

    def bytes_of(placeholders: Iterable[fx.Node]) -> int:
        return sum(held[names[p]] for p in placeholders)

    seen: set[fx.Node] = set()
    nodes = []
    made: dict[fx.Node, int] = {}
    for node in analysis.nodes:
        fresh = [p for p in _read(node, analysis.rebuildable) if p not in seen]
        seen.update(fresh)
        own = [p for p in fresh if p in traced.parameters]
        stack = list(node.meta.get("nn_module_stack", {}).values())
        made[node] = _output_bytes(node, made)
        nodes.append(
            Node(
                name=node.name,
                module=stack[-1][0] if stack else "",
                param_names=tuple(traced.parameters[p] for p in own),
                param_bytes=bytes_of(own),
                cut_bytes=None,
                output_bytes=-(-made[node] // samples),
                frozen_bytes=bytes_of(p for p in own if traced.parameters[p] in frozen),
                buffer_bytes=bytes_of(p for p in fresh if p in traced.buffers),
            )
        )
    return link_nodes(nodes, *find_joins(analysis))


def _output_bytes(node: fx.Node, made: dict[fx.Node, int]) -> int:
    """Bytes of the output of an operation; as much as its largest input where the values decide."""
    value = node.meta.get("val")
    if is_open(value):
        return max(_output_bytes(used, made) if used not in made else made[used] for used in node.all_input_nodes)
    return nbytes(value) if isinstance(value, torch.Tensor) else 0


def _read(node: fx.Node, rebuildable: set[fx.Node]) -> list[fx.Node]:
    """Placeholders that the operation reads, through what is rebuilt for it too."""
    found: dict[fx.Node, None] = {}
    stack = list(node.all_input_nodes)
    seen = set(stack)
    while stack:
        used = stack.pop(0)
        if used.op == "placeholder":
            found[used] = None
        elif used in rebuildable:
            stack += (more := [n for n in used.all_input_nodes if n not in seen])
            seen.update(more)
    return list(found)
