"""Analysis of a traced model: which operations belong to exactly one stage, and which change memory in place.

Three kinds of value are never sent from stage to stage. Parameters and buffers are held in the stages that use them.
Data columns are read in the stages that use them. Values that depend only on shapes, constants and unchanging buffers
(masks, position tables, rotary angles, sizes) are *rebuilt*: computed again in every stage that uses them.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from raypipe.engine.stage.randomness import dropout, keyed_call
from raypipe.errors import CaptureError

UNCAST = "raypipe_uncast"
"""Key in a node's meta: device type for which the model switches autocast off around the node."""


@dataclass(slots=True)
class Traced:
    """A whole model in one mode, as a flat fx graph.

    Attributes:
        graph: the fx graph; its output node returns the leaves of the model's output.
        parameters, buffers: placeholder -> name in the user's model (the first one, if a tensor has several names).
        constants: placeholder -> tensor that forward reads and that is neither a parameter nor a buffer.
        columns: placeholder -> name of the data column.
        key: placeholder of the key from which all random numbers are derived.
        num_draws: number of random draws in the graph.
        out_spec: pytree spec of the model's output.
        pinned: (node that allocates the storage, last node that uses it), for each tensor storage that operations
            change in place, except buffers. All nodes that use such a storage must share a stage.
        checks: FILE:LINE of checks on values that the graph leaves out, see capture/branches.py.
        one_size: True if the graph takes the number of samples of the example only.
        conditions: expressions over symbolic sizes of the columns; the graph is valid only for sizes that meet all.
        fixed: reason why only the number of samples may differ from the example's sizes; "" if others may too.
    """

    graph: fx.Graph
    parameters: dict[fx.Node, str]
    buffers: dict[fx.Node, str]
    constants: dict[fx.Node, torch.Tensor]
    columns: dict[fx.Node, str]
    key: fx.Node
    num_draws: int
    out_spec: pytree.TreeSpec
    pinned: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    checks: tuple[str, ...] = ()
    one_size: bool = False
    conditions: tuple[str, ...] = ()
    fixed: str = ""


aten = torch.ops.aten
_OURS = str(Path(__file__).parents[1])
_FILE = re.compile(r'File "([^"]+)", line (\d+)')


def functional_twin(op: Any) -> Any | None:
    """Return the out-of-place variant of an in-place aten operation (``add_`` -> ``add``); None if ``op`` has none.

    The variant is the overload with the same arguments: ``pow_.Scalar`` gives ``pow.Tensor_Scalar``. ``copy_`` gives
    None, because ``aten.copy`` has no derivative.
    """
    name = op._schema.name.removeprefix("aten::")
    if not name.endswith("_") or name.endswith("__") or name == "copy_":
        return None
    packet = getattr(aten, name[:-1], None)
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return next((other for other in overloads if _parameters(other) == _parameters(op)), None)


def _parameters(op: Any) -> list[tuple[str, str, bool]]:
    """List (name, type, whether it has a default) of every parameter of an aten operation."""
    return [(one.name, str(one.type), one.has_default_value()) for one in op._schema.arguments]


def mutated_args(node: fx.Node) -> list[fx.Node]:
    """List the inputs whose memory an operation changes, according to its schema.

    Running statistics of batch_norm and instance_norm in training mode are added, because the schemas omit them.
    """
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
    """Return the input whose memory the output of ``node`` may share; None if the operation allocates its output."""
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
    """Map each node to the node that allocated the memory of its output: itself, or for a view that of its base."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        base = _viewed(node)
        roots[node] = roots[base] if base is not None else node
    return roots


def work_out_of_place(traced: Traced) -> None:
    """Replace in-place operations on activations (relu_, add_) by out-of-place variants, in ``traced.graph``.

    A stage's inputs are leaves, which autograd does not allow to change in place, and a tensor that is still being sent
    must not change either. A replacement is safe if no other view of the same memory is read afterwards. Operations
    that have no variant or no safe replacement stay; their memory is added to ``traced.pinned``.

    Raises:
        CaptureError: forward changes a parameter or a constant in place.
    """
    graph = traced.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    roots: dict[fx.Node, fx.Node] = {}  # after the nodes so far have been rewritten
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
            result = _of_type(node, changed.meta["val"].dtype)
            order[result] = order[node]
            _replace_after(changed, result, order)
            families[roots[node]].remove(node)
            roots[node] = roots[result] = result  # it allocates memory now, which later views share
            families[result] = [result]
    for changed in stayed:
        family = families[roots[changed]]
        last = max((user for v in family for user in v.users), key=order.__getitem__, default=changed)
        traced.pinned.append((roots[changed], last))


def _of_type(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Ensure that the result of ``node`` has a dtype: ``x.add_(y)`` keeps the dtype of x, ``x.add(y)`` may promote it.

    Returns:
        ``node`` if it has the dtype; else a new conversion, which the users of ``node`` now read.
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: _of_example(used.meta["val"]))
    if any(map(is_open, pytree.tree_leaves((args, kwargs)))) or node.target(*args, **kwargs).dtype == dtype:  # type: ignore[operator]
        return node
    graph = node.graph
    with graph.inserting_after(node):
        converted = graph.call_function(aten.to.dtype, (node, dtype))
    converted.meta = dict(node.meta)
    node.replace_all_uses_with(converted, delete_user_cb=lambda user: user is not converted)
    return converted


def _of_example(value: Any) -> Any:
    """Return a meta tensor with the example's sizes for a traced tensor, or a number for a symbolic number.

    Tensors with data-dependent sizes and other values are returned unchanged.
    """
    if isinstance(value, torch.Tensor) and not is_open(value):
        return torch.empty([_of_example(size) for size in value.shape], dtype=value.dtype, device="meta")
    return value.node.hint if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else value


def _refuse_lasting(root: fx.Node, node: fx.Node, traced: Traced) -> None:
    """Raise CaptureError if ``node`` changes ``root`` in place, and ``root`` is a constant or a parameter."""
    if root in traced.constants:
        raise CaptureError(
            f"forward changes a tensor in place that is an attribute of the model, a global or in a closure "
            f"({root.name.removeprefix('c_')!r}{line_of(node)}); no stage would share it and no checkpoint "
            "hold it. Make it a buffer: self.register_buffer(name, tensor)."
        )
    if root in traced.parameters:
        raise CaptureError(
            f"forward changes the parameter {traced.parameters[root]!r} in place; a pipeline stage may only "
            "change buffers. Register it as a buffer or drop the update."
        )


def line_of(node: fx.Node) -> str:
    """Return " at FILE:LINE" of the user's code that made an operation; "" if unknown."""
    places = _FILE.findall(node.meta.get("stack_trace") or "")
    own = [place for place in places if "/torch/" not in place[0] and not place[0].startswith(("<", _OURS))]
    return f" at {own[-1][0]}:{own[-1][1]}" if own else ""


def _replace_after(old: fx.Node, new: fx.Node, order: dict[fx.Node, int]) -> None:
    """Replace ``old`` by ``new`` in those users of ``old`` that come after ``new``; ``order`` has all positions.

    The operation ``new`` changed ``old`` in place until now. It has become an operation that returns a new tensor.
    """
    for user in list(old.users):
        if order[user] > order[new]:
            user.replace_input_with(old, new)


def write_buffers_early(graph: fx.Graph, buffers: Collection[fx.Node]) -> None:
    """Move each assignment to a buffer of the model right after the operation that computes its new value.

        forward                              traced graph
        self.steps += 1                      add_(steps, 1) ................................ copy_(steps, add_)
        self.mean = 0.9 * self.mean + m      add = 0.9 * mean + m .......................... copy_(mean, add)

    torch.export puts the ``copy_`` at the end of the graph. That would join all stages, since all uses of a buffer
    must share a stage. In the first example ``copy_`` copies a tensor onto itself and is removed. In the second it is
    moved, and operations that read the old value get a clone of the old value, which the backward uses too.

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
    """Return the operations that change the memory of a tensor in place; ``roots`` is from ``storage_roots``."""
    sharing = [one for one, root in roots.items() if root is roots[tensor]]
    return {user for one in sharing for user in one.users if one in mutated_args(user)}


def _itself(value: fx.Node) -> fx.Node:
    """Return the tensor from which ``value`` came by in-place operations and detach() only."""
    while value.op == "call_function" and (
        value.target is aten.detach.default or (str(value.target).split(".")[1].endswith("_") and mutated_args(value))
    ):
        value = value.args[0]  # type: ignore[assignment]
    return value


SYM_SIZE = torch.ops.aten.sym_size.int


@dataclass(slots=True)
class Analysis:
    """A traced model with all facts that cutting it into stages needs.

    An operation is live if an output of the model, or a change of a buffer or of pinned memory, depends on it.

    Attributes:
        traced: the flat graph.
        nodes: live operations that belong to exactly one stage, in execution order.
        rebuildable: live operations that are copied into every stage that uses them.
        changing_buffers: placeholders of buffers that a forward updates.
        outputs: the model's outputs that are tensors.
        fixed: (position, value) of every output that is not a tensor.
        sites: (operation, parameter placeholder) -> index of this use among all uses of the parameter, from 0.
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
    live = reachable([*outputs, *effects, *(n for n in graph.nodes if _pinned_effect(n, traced, roots))])
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
    """Return True if an operation changes memory in ``traced.pinned`` in place; ``roots`` is from ``storage_roots``.

    Other operations read the change through an alias, so the operation is live even if its output has no users.
    """
    pinned = {root for root, _ in traced.pinned}
    return any(roots[a] in pinned for a in mutated_args(node))


def reachable(targets: Iterable[fx.Node]) -> set[fx.Node]:
    """Collect the nodes ``targets`` and all nodes from which they are computed."""
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
    rebuildable: set[fx.Node] = set()
    for node in traced.graph.nodes:
        if node.op != "call_function" or node not in live or roots[node] in pinned:
            continue
        if node.target is SYM_SIZE:
            if column_with(traced, node.meta["val"]) is not None:
                rebuildable.add(node)
        elif node.target in (dropout, keyed_call) or mutated_args(node):
            continue
        elif all(used in rebuildable or used in free for used in node.all_input_nodes):
            rebuildable.add(node)
    return rebuildable


def column_with(traced: Traced, size: Any) -> tuple[fx.Node, int] | None:
    """Return (data column, dimension) of the first column with this symbolic size; None if not found."""
    for column in traced.columns:
        dim = dim_with(column, size)
        if dim is not None:
            return column, dim
    return None


def dim_with(node: fx.Node, size: Any) -> int | None:
    """Return the first dimension of a traced tensor that has exactly this symbolic size; None if not found."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(size, torch.SymInt):
        return None
    for dim, own in enumerate(value.shape):
        if isinstance(own, torch.SymInt) and own.node.expr == size.node.expr:
            return dim
    return None


def is_open(value: Any) -> bool:
    """Return True for a traced tensor with a data-dependent size, such as ``x[x > 0]`` or the result of ``nonzero``."""
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    return any(isinstance(size, torch.SymInt) and size.node.hint is None for size in sizes)


def nbytes(value: torch.Tensor) -> int:
    """Count the bytes of a traced tensor at the example's batch size."""
    sizes = (size.node.hint if isinstance(size, torch.SymInt) else size for size in value.shape)
    return int(math.prod(sizes)) * value.element_size()
