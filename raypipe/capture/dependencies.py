"""Dependencies between the operations of a traced model, and the planner's graph with one Node per operation.

    edges      a --> b      b reads the output of a
    together   a === b      both must share a stage, because a value between them cannot be sent: a tuple, a size, a
                            tensor whose size depends on values, a buffer that forward changes, memory that an
                            operation changes in place
    before     a ... b      no value is sent, but b must not run in an earlier stage than a

Three cases need ``before``. First, the gradients of a tensor with three or more uses are summed one by one, later uses
first. Sums of three floats depend on their order, so the users of the tensor keep their order. Second, an operation
without users (a counter of batches) stays before the next operation of its module. Third, an operation without inputs
from others could run at any time. It stays after its predecessor, because each such freedom doubles the number of
partitions that a planner has to search. An operation on a data column and a parameter (an embedding) is exempt.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from raypipe.capture.analyse import Analysis, is_open, nbytes, storage_roots
from raypipe.engine.stage.generated_source import Region
from raypipe.engine.stage.randomness import dropout, keyed_call
from raypipe.ir.graph import ModelGraph, Node, link_nodes

aten = torch.ops.aten

# Composite operations in whose backward each input gets one gradient; other composites count as two uses.
_USED_ONCE = {
    "aten::adaptive_avg_pool2d", "aten::avg_pool2d", "aten::batch_norm", "aten::chunk", "aten::contiguous",
    "aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::dropout", "aten::expand_as", "aten::flatten",
    "aten::group_norm", "aten::layer_norm", "aten::linear", "aten::log_softmax", "aten::matmul", "aten::max_pool2d",
    "aten::pad", "aten::reshape", "aten::scaled_dot_product_attention", "aten::softmax", "aten::split", "aten::to",
    "aten::type_as", "aten::upsample_nearest2d", "raypipe::cumulative_batch_norm",
}  # fmt: skip

Pair = tuple[int, int]


class Joins(NamedTuple):
    """Constraints between operations, as pairs (a, b) of positions in execution order.

    Attributes:
        edges: b reads the output of a.
        together: a and b must share a stage.
        before: b must not be in an earlier stage than a, although no value is sent.
    """

    edges: tuple[Pair, ...]
    together: tuple[Pair, ...]
    before: tuple[Pair, ...]


def find_joins(analysis: Analysis) -> Joins:
    """Find all pairs of operations that constrain where the model may be cut and how it may be reordered."""
    order = {node: i for i, node in enumerate(analysis.nodes)}
    roots = storage_roots(analysis.traced.graph)
    end = len(order) - 1
    edges: dict[Pair, None] = {}
    together: dict[Pair, None] = {}
    crossing = [0] * (end + 2)
    for node, at in order.items():
        users = _users(node, order, analysis, end)
        edges.update(dict.fromkeys((at, user) for user in users))
        # A view of a buffer must not be sent either: the next forward changes its memory.
        value = node.meta.get("val")
        travels = isinstance(value, torch.Tensor) and not is_open(value)
        travels = travels and roots[node] not in analysis.changing_buffers
        if travels and users:
            crossing[at] += 1
            crossing[users[-1]] -= 1
        else:
            together.update(dict.fromkeys((at, user) for user in users))
    for group in _shared_memory(analysis, order, roots):
        together.update(dict.fromkeys(itertools.pairwise(group)))
    alive = 0
    for at in range(end):  # every stage but the last must send something
        alive += crossing[at]
        if not alive:
            together[at, at + 1] = None
    before = dict.fromkeys((*_kept_sums(analysis, order), *_kept_places(analysis, order)))
    return Joins(tuple(sorted(edges)), tuple(sorted(together)), tuple(sorted(before.keys() - edges.keys())))


def _users(node: fx.Node, order: dict[fx.Node, int], analysis: Analysis, end: int) -> list[int]:
    users = {order[user] for user in node.users if user in order}
    if node in analysis.outputs and order[node] < end:
        users.add(end)  # outputs belong to the last stage
    return sorted(users)


def _shared_memory(analysis: Analysis, order: dict[fx.Node, int], roots: dict[fx.Node, fx.Node]) -> Iterator[list[int]]:
    """Yield, for each tensor storage that is changed in place, the ascending positions of the operations that use it.

    If the storage is that of a data column, position 0 is included.

    Args:
        order: position of each operation.
        roots: node that allocated each node's storage, see ``storage_roots``.
    """
    for root in dict.fromkeys((*analysis.changing_buffers, *(root for root, _ in analysis.traced.pinned))):
        family = [node for node, own in roots.items() if own is root]
        members = {order[n] for node in family for n in (node, *node.users) if n in order}
        if root in analysis.traced.columns:
            members.add(0)
        yield sorted(members)


def _kept_sums(analysis: Analysis, order: dict[fx.Node, int]) -> Iterator[Pair]:
    """Yield pairs of positions (a, b) of consecutive users of a tensor whose gradient is a sum of three or more terms.

    These users must keep their order, because rounding of such a sum depends on the order of its terms.
    """
    trained: set[fx.Node] = set()
    for node in analysis.nodes:
        if any(used in trained or used in analysis.traced.parameters for used in node.all_input_nodes):
            trained.add(node)
    for node in analysis.nodes:
        if node not in trained or not _floating(node):
            continue
        uses = {user: _num_gradients(node, user) for user in node.users if user in order}
        users = sorted(order[user] for user, count in uses.items() if count)
        if sum(uses.values()) + (node in analysis.outputs) > 2:
            yield from itertools.pairwise(users)


def _num_gradients(used: fx.Node, user: fx.Node) -> int:
    """Count the gradients that the backward of ``user`` adds to the gradient of its input ``used``, approximately."""
    if user.target is aten.detach.default or not _floating(user):
        return 0
    times = sum(leaf is used for leaf in pytree.tree_leaves((user.args, user.kwargs)))
    target: Any = user.args[0] if user.target is keyed_call else user.target
    if type(target) is Region:
        return 3 * times  # its operations may read it several times
    if target is dropout or not hasattr(target, "_schema"):
        return times
    name = target._schema.name
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return times if name in _USED_ONCE or not target.has_kernel_for_dispatch_key(key) else 2 * times


def _floating(node: fx.Node) -> bool:
    """Return True if a gradient can pass through a node's output: a floating-point or complex tensor, or a tuple."""
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor | torch.SymInt | int) or (
        isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    )


def _kept_places(analysis: Analysis, order: dict[fx.Node, int]) -> Iterator[Pair]:
    """Yield pairs of positions (a, b) that keep neighbours together: b must not be in an earlier stage than a.

    An operation without users stays before the next operation of its module. An operation without inputs from others
    stays after its predecessor, unless it reads both a data column and a parameter.
    """
    columns, parameters = analysis.traced.columns, analysis.traced.parameters
    end = len(analysis.nodes) - 1
    for at, node in enumerate(analysis.nodes):
        if at < end and node not in analysis.outputs and not any(user in order for user in node.users):
            yield at, _next_of_module(analysis.nodes, at)
        inputs = node.all_input_nodes
        begins = any(n in columns for n in inputs) and any(n in parameters for n in inputs)
        if at and not begins and not any(used in order for used in inputs):
            yield at - 1, at


def _next_of_module(nodes: list[fx.Node], at: int) -> int:
    own = nodes[at].meta.get("nn_module_stack")
    near: Iterable[int] = range(at + 1, min(at + 4, len(nodes)))
    return next((i for i in near if own and nodes[i].meta.get("nn_module_stack") == own), at + 1)


def model_graph(
    analysis: Analysis, samples: int, held: Mapping[str, int], frozen: frozenset[str] = frozenset()
) -> ModelGraph:
    """Build the planner's graph: one Node per operation, with the bytes per sample that a cut after it sends.

    Args:
        samples: batch size of the example that was traced.
        held: bytes of every parameter and buffer, by name, in the dtype in which a stage stores it.
        frozen: names of the parameters that are not trained.
    """
    traced = analysis.traced
    names = {**traced.parameters, **traced.buffers}

    def bytes_of(placeholders: Iterable[fx.Node]) -> int:
        return sum(held[names[p]] for p in placeholders)

    seen: set[fx.Node] = set()
    nodes = []
    output_bytes: dict[fx.Node, int] = {}
    for node in analysis.nodes:
        fresh = [p for p in _read(node, analysis.rebuildable) if p not in seen]
        seen.update(fresh)
        own = [p for p in fresh if p in traced.parameters]
        stack = list(node.meta.get("nn_module_stack", {}).values())
        output_bytes[node] = _output_bytes(node, output_bytes)
        nodes.append(
            Node(
                name=node.name,
                module=stack[-1][0] if stack else "",
                param_names=tuple(traced.parameters[p] for p in own),
                param_bytes=bytes_of(own),
                cut_bytes=None,
                output_bytes=-(-output_bytes[node] // samples),
                frozen_bytes=bytes_of(p for p in own if traced.parameters[p] in frozen),
                buffer_bytes=bytes_of(p for p in fresh if p in traced.buffers),
            )
        )
    return link_nodes(nodes, *find_joins(analysis))


def _output_bytes(node: fx.Node, known: dict[fx.Node, int]) -> int:
    """Count an operation's output bytes; if the size depends on values, those of its largest input (by ``known``)."""
    value = node.meta.get("val")
    if is_open(value):
        return max(_output_bytes(used, known) if used not in known else known[used] for used in node.all_input_nodes)
    return nbytes(value) if isinstance(value, torch.Tensor) else 0


def _read(node: fx.Node, rebuildable: set[fx.Node]) -> list[fx.Node]:
    """List the placeholders that an operation reads, directly or through values that its stage computes again."""
    placeholders: dict[fx.Node, None] = {}
    stack = list(node.all_input_nodes)
    seen = set(stack)
    while stack:
        used = stack.pop(0)
        if used.op == "placeholder":
            placeholders[used] = None
        elif used in rebuildable:
            stack += (more := [n for n in used.all_input_nodes if n not in seen])
            seen.update(more)
    return list(placeholders)
