"""Operations that change their input: which memory they touch, and their out-of-place twins."""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from raypipe.errors import CaptureError

if TYPE_CHECKING:
    from raypipe.engine.capture.traced import Traced

__all__ = ["functional_twin", "mutated_args", "storage_roots", "work_out_of_place"]

aten = torch.ops.aten


def functional_twin(op: Any) -> Any | None:
    """The out-of-place twin of an in-place aten operation, None where op is not one (``add_`` -> ``add``)."""
    name = op._schema.name.removeprefix("aten::")
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(aten, name[:-1], None)
    return getattr(packet, op._overloadname, None) if packet is not None else None


def mutated_args(node: fx.Node) -> list[fx.Node]:
    """Nodes whose memory the operation changes, by its schema; the norms' statistics are not in theirs."""
    target: Any = node.target
    if node.op != "call_function" or not hasattr(target, "_schema"):
        return []
    if target in (aten.batch_norm.default, aten.instance_norm.default):
        training = node.args[5] if len(node.args) > 5 else node.kwargs.get("training", False)
        return [a for a in node.args[3:5] if isinstance(a, fx.Node)] if training else []
    changed = []
    for place, argument in enumerate(target._schema.arguments):
        value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)  # out=, for one
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node):
            changed.append(value)
    return changed


def _viewed(node: fx.Node) -> fx.Node | None:
    """The node whose memory this one may share, None for an operation that makes its own."""
    target: Any = node.target
    if node.op != "call_function":
        return None
    first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if target is operator.getitem or str(target) in ("aten.dropout.default", "aten.feature_dropout.default"):
        return first
    schema = getattr(target, "_schema", None)
    if isinstance(out := node.kwargs.get("out"), fx.Node):  # is what it returns
        return out
    if schema is None or first is None:
        return None
    aliases = any(r.alias_info is not None for r in schema.returns)
    return first if aliases and schema.arguments[0].alias_info is not None else None


def storage_roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For every node the node that made its memory, as far as the schemas tell."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        base = _viewed(node)
        roots[node] = roots[base] if base is not None else node
    return roots


def work_out_of_place(traced: Traced) -> None:
    """relu_, add_ and the like on activations become relu, add; what cannot is pinned against cuts.

    A stage's inputs are leaves that autograd does not let anyone change, and what a link still sends must
    not change either. Safe means: no other view of the same memory is read afterwards.
    """
    graph = traced.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    roots: dict[fx.Node, fx.Node] = {}  # as they are once all before has been rewritten
    families: dict[fx.Node, list[fx.Node]] = {}
    stayed: list[fx.Node] = []
    for node in list(graph.nodes):
        base = _viewed(node)
        roots[node] = roots[base] if base is not None else node
        families.setdefault(roots[node], []).append(node)
        for changed in mutated_args(node):
            root = roots[changed]
            if root in traced.buffers:
                continue
            _refuse_lasting(root, node, traced)
            others = [v for v in families[root] if v is not changed and v is not node]
            still_read = any(order[user] > order[node] for v in others for user in v.users)
            functional = functional_twin(node.target)
            if functional is None or still_read:
                stayed.append(changed)
                continue
            node.target = functional
            _replace_after(changed, node, order)
            families[roots[node]].remove(node)
            roots[node], families[node] = node, [node]  # memory of its own, which later views are of
    for changed in stayed:
        family = families[roots[changed]]
        last = max((user for v in family for user in v.users), key=order.__getitem__, default=changed)
        traced.pinned.append((roots[changed], last))


def _refuse_lasting(root: fx.Node, node: fx.Node, traced: Traced) -> None:
    """A change of what lasts from call to call and is no buffer."""
    if root in traced.constants:
        raise CaptureError(
            f"forward changes a tensor in place that is an attribute of the model, a global or in a closure "
            f"({root.name.removeprefix('c_')!r}{_line_of(node)}); no stage would share it and no checkpoint "
            "hold it. Make it a buffer: self.register_buffer(name, tensor)."
        )
    if root in traced.parameters:
        raise CaptureError(
            f"forward changes the parameter {traced.parameters[root]!r} in place; a pipeline stage may only "
            "change buffers. Register it as a buffer or drop the update."
        )


def _line_of(node: fx.Node) -> str:
    """The user's own line, where the trace tells it."""
    places = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [(name, line) for name, line in places if "/torch/" not in name and "/raypipe/engine/" not in name]
    return f" at {own[-1][0]}:{own[-1][1]}" if own else ""


def _replace_after(old: fx.Node, new: fx.Node, order: dict[fx.Node, int]) -> None:
    """Whoever reads ``old`` after ``new`` reads ``new``, as it did when both were the same memory."""
    for user in list(old.users):
        if order[user] > order[new]:
            user.replace_input_with(old, new)
