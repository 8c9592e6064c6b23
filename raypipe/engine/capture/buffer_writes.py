"""Where forward assigns to a buffer of the model itself, torch.export writes the new value as its very last operation.

    self.steps += 1                      add_(steps, 1) ................................ copy_(steps, add_)
    self.mean = 0.9 * self.mean + m      add = 0.9 * mean + m .......................... copy_(mean, add)

No cut may part two uses of a buffer, so neither model could be cut. The first copy is of a tensor onto itself and goes.
The second one is done as soon as there is a new value; what reads the old one, now or in the backward, as plain PyTorch
lets it, is given a copy of that.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from raypipe.engine.capture.inplace import mutated_args, storage_roots

__all__ = ["write_buffers_early"]

aten = torch.ops.aten


def write_buffers_early(graph: fx.Graph, buffers: Collection[fx.Node]) -> None:
    """Change the graph so.

    Args:
        buffers: placeholders of the model's buffers.
    """
    written = [n for n in graph.nodes if n.target is aten.copy_.default and n.args[0] in buffers and not n.users]
    for node in written:
        buffer, value = node.args[:2]
        if _itself(value) is buffer:
            graph.erase_node(node)
            continue
        roots, order = storage_roots(graph), {one: place for place, one in enumerate(graph.nodes)}
        if _changes(buffer, roots) - {node}:  # in place as well
            continue
        readers = sorted(buffer.users.keys() - {node}, key=order.__getitem__)
        if readers:
            with graph.inserting_before(readers[0]):
                old = graph.call_function(aten.clone.default, (buffer,))
            old.meta = dict(buffer.meta)
            for reader in readers:
                reader.replace_input_with(buffer, old)
        if value.op != "placeholder":
            max((value, *(_changes(value, roots) - {node})), key=order.__getitem__).append(node)


def _changes(tensor: fx.Node, roots: dict[fx.Node, fx.Node]) -> set[fx.Node]:
    """Operations that change the memory of a tensor."""
    sharing = [one for one, root in roots.items() if root is roots[tensor]]
    return {user for one in sharing for user in one.users if one in mutated_args(user)}


def _itself(value: fx.Node) -> fx.Node:
    """The tensor that operations in place have returned."""
    while value.op == "call_function" and (
        value.target is aten.detach.default or (str(value.target).split(".")[1].endswith("_") and mutated_args(value))
    ):
        value = value.args[0]  # type: ignore[assignment]
    return value
