"""What joins the operations of a model: values that travel, values that cannot, and orders that must be kept.

    edges      a --> b      b reads what a made
    together   a === b      and it cannot travel: a tuple, a size, a tensor whose size depends on values, a buffer
                            that forward changes, memory that is changed in place under another name
    before     a ... b      nothing travels, but b must not come before a

Three things need ``before``. A tensor with three or more uses gets its gradients summed one by one, later uses
first; sums of two commute, of three they do not, so its users keep their order. An operation that feeds nothing
(a counter of batches) keeps its place before the next one of its module. And what reads no data, or no parameter,
could run at any time: it stays behind its predecessor, for every such freedom doubles the states of a graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from raypipe.engine.capture.analyse import Analysis, is_open
from raypipe.engine.capture.inplace import storage_roots
from raypipe.engine.randomness import dropout, keyed_call
from raypipe.engine.region import Region

__all__ = ["Joins", "find_joins"]

aten = torch.ops.aten

# Made of other operations, but each tensor enters the derivative once; other composites count as two uses.
_USED_ONCE = {
    "aten::adaptive_avg_pool2d", "aten::avg_pool2d", "aten::batch_norm", "aten::chunk", "aten::contiguous",
    "aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::dropout", "aten::expand_as", "aten::flatten",
    "aten::group_norm", "aten::layer_norm", "aten::linear", "aten::log_softmax", "aten::matmul", "aten::max_pool2d",
    "aten::pad", "aten::reshape", "aten::scaled_dot_product_attention", "aten::softmax", "aten::split", "aten::to",
    "aten::type_as", "aten::upsample_nearest2d", "raypipe::cumulative_batch_norm",
}  # fmt: skip

Pair = tuple[int, int]


class Joins(NamedTuple):
    """Pairs of positions in execution order; see ModelGraph."""

    edges: tuple[Pair, ...]
    together: tuple[Pair, ...]
    before: tuple[Pair, ...]


def find_joins(analysis: Analysis) -> Joins:
    """Every pair that a cut or another order must respect."""
    order = {node: i for i, node in enumerate(analysis.nodes)}
    roots = storage_roots(analysis.traced.graph)
    end = len(order) - 1
    edges: dict[Pair, None] = {}
    together: dict[Pair, None] = {}
    crossing = [0] * (end + 2)
    for node, at in order.items():
        users = _users(node, order, analysis, end)
        edges.update(dict.fromkeys((at, user) for user in users))
        # A view of a buffer that the next forward changes must not be on its way either.
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
    for at in range(end):  # a stage that sends nothing would be no stage
        alive += crossing[at]
        if not alive:
            together[at, at + 1] = None
    before = dict.fromkeys((*_kept_sums(analysis, order), *_kept_places(analysis, order)))
    return Joins(tuple(sorted(edges)), tuple(sorted(together)), tuple(sorted(before.keys() - edges.keys())))


def _users(node: fx.Node, order: dict[fx.Node, int], analysis: Analysis, end: int) -> list[int]:
    found = {order[user] for user in node.users if user in order}
    if node in analysis.outputs and order[node] < end:
        found.add(end)  # outputs belong to the last stage
    return sorted(found)


def _shared_memory(analysis: Analysis, order: dict[fx.Node, int], roots: dict[fx.Node, fx.Node]) -> Iterator[list[int]]:
    """For memory that is changed in place: positions of everything that makes, reads or changes it, in order."""
    for root in dict.fromkeys((*analysis.changing_buffers, *(root for root, _ in analysis.traced.pinned))):
        family = [node for node, own in roots.items() if own is root]
        members = {order[n] for node in family for n in (node, *node.users) if n in order}
        if root in analysis.traced.columns:
            members.add(0)
        yield sorted(members)


def _kept_sums(analysis: Analysis, order: dict[fx.Node, int]) -> Iterator[Pair]:
    """Uses of a tensor that gets three gradients or more, one after the other."""
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
    """Gradients that the backward of ``user`` adds to that of ``used``; at least, where nobody knows."""
    if user.target is aten.detach.default or not _floating(user):
        return 0
    times = sum(leaf is used for leaf in pytree.tree_leaves((user.args, user.kwargs)))
    target: Any = user.args[0] if user.target is keyed_call else user.target
    if type(target) is Region:
        return 3 * times  # as often as its operations read it
    if target is dropout or not hasattr(target, "_schema"):
        return times
    name = target._schema.name
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return times if name in _USED_ONCE or not target.has_kernel_for_dispatch_key(key) else 2 * times


def _floating(node: fx.Node) -> bool:
    """Whether a gradient can pass; several outputs count as floating."""
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor | torch.SymInt | int) or (
        isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    )


def _kept_places(analysis: Analysis, order: dict[fx.Node, int]) -> Iterator[Pair]:
    """Operations that feed nothing, and those that wait for nothing that is worth waiting for."""
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
