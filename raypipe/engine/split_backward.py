"""A split backward: its input part (I), which the stage before waits for, and its weight part (W), which only the
optimizer's step needs.

    loss <-- gelu <-- addmm <-- norm <-- received input     the path: I runs it
                        |
                        t <-- weight                        an island off the path: W runs it

The nodes of a micro-batch's graph either lie on a path to a received input, or lead to parameters alone; these fall
into islands that have no node in common. Where a matrix product or a convolution has an input on the path and a
parameter off it, autograd makes each one's gradient by a product of its own: I lets it make the input's, and W makes
the other by autograd's formula from the operand that was saved, and goes on into the island. So both parts do together
what one backward does, to the same bits, and between them nothing is kept but pairs of operands.

An island that is entered by anything but one product is run in I, and where a root leads to no received input, all of
the backward is. A stage that receives nothing to pass a gradient to
has no I: its whole backward is W.

Zero bubble pipelines (Qi et al., arXiv:2401.10241) call the two parts B and W. torch.distributed.pipelining keeps the
whole graph between them, and runs a node that has both twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from raypipe.engine.backward import gradients
from raypipe.engine.products import PLACES, Gradient, Product, product_of

__all__ = ["SplitBackward", "input_gradients"]

_Edge = tuple[Any, int]
"""A node of autograd's graph and which of its outputs' gradients, as in ``next_functions``."""


class SplitBackward(NamedTuple):
    """What I leaves behind.

    Attributes:
        received: gradients of the received inputs, None for those that the roots do not reach.
        own: gradients of the parameters' leaves that came with them, None for those left to W.
        finish: W, to be called once: the gradients that were left, None for the others.
    """

    received: Sequence[Gradient]
    own: Sequence[Gradient]
    finish: Callable[[], Sequence[Gradient]]


class _Island(NamedTuple):
    """Nodes off the path that hang together: what enters them adds up somewhere, and nothing else does.

    Attributes:
        edges: where the path enters.
        leaves: of the stage's own that it leads to.
    """

    edges: list[_Edge]
    leaves: list[torch.Tensor]


class _Later(NamedTuple):
    """What W does for one island: ``output_grads`` makes the gradients that enter it."""

    island: _Island
    output_grads: Callable[[], Sequence[Gradient]]


def input_gradients(
    roots: Sequence[torch.Tensor],
    output_grads: Sequence[torch.Tensor],
    received: Sequence[torch.Tensor],
    own: Sequence[torch.Tensor],
) -> SplitBackward:
    """I: gradients of sum(roots * output_grads) with respect to ``received``, and what W needs for those of ``own``.

    Args:
        output_grads: one per root, of its shape and dtype. The roots' graph is freed on the path.
        received, own: leaves that require a gradient.
    """
    position = {id(leaf): place for place, leaf in enumerate(own)}
    begins = [get_gradient_edge(root) for root in roots]
    on_path = _on_path((edge.node for edge in begins), {id(leaf) for leaf in received})
    if not all(on_path[edge.node] for edge in begins):
        whole = gradients(roots, output_grads, [*received, *own]) if received or own else ()
        return SplitBackward(whole[: len(received)], whole[len(received) :], lambda: (None,) * len(own))
    entries = _entries(on_path)
    now: list[torch.Tensor] = []
    later: list[_Later] = []
    for island in _islands(list(entries), _together(on_path, entries), position):
        if (deferred := _deferred(island, entries)) is not None:
            later.append(deferred)
        else:
            now += island.leaves
    wanted = [*received, *now]
    found = gradients(roots, output_grads, wanted) if roots and wanted else (None,) * len(wanted)
    with_them: list[Gradient] = [None] * len(own)
    for leaf, gradient in zip(now, found[len(received) :], strict=True):
        with_them[position[id(leaf)]] = gradient
    # Neither the path nor what it saved may outlive this call.
    return SplitBackward(found[: len(received)], with_them, partial(_finish, later, position))


@torch.no_grad()
def _finish(later: list[_Later], position: dict[int, int]) -> Sequence[Gradient]:
    """W: one engine call per island, so that a hook gives a large gradient back before the next is made."""
    found: list[Gradient] = [None] * len(position)
    while later:
        island, make = later.pop()
        pairs = [(GradientEdge(*edge), seed) for edge, seed in zip(island.edges, make(), strict=True)]
        known = [(edge, seed) for edge, seed in pairs if seed is not None]
        if known:
            made = gradients([edge for edge, _ in known], [seed for _, seed in known], island.leaves)
            for leaf, gradient in zip(island.leaves, made, strict=True):
                found[position[id(leaf)]] = gradient
    return found


def _deferred(island: _Island, entries: dict[_Edge, list[tuple[Any, int]]]) -> _Later | None:
    """An island that one product alone leads to, of which W shall make the gradients; None for any other."""
    users = [user for edge in island.edges for user in entries[edge]]
    node = users[0][0]
    if any(other is not node for other, _ in users) or not island.leaves:
        return None
    product = product_of(node)
    if product is None or sorted(place for _, place in users) != list(product.places):
        return None
    edges = [node.next_functions[place] for place in product.places]
    came: list[torch.Tensor] = []
    # A hook of the node's, not a gradient captured at its edge: those of tensors have run when it is called.
    node.register_prehook(partial(_keep, came))
    return _Later(_Island(edges, island.leaves), partial(_made, product, came))


def _keep(came: list[torch.Tensor], arrived: tuple[Gradient, ...]) -> None:
    came.extend(gradient for gradient in arrived if gradient is not None)


def _made(product: Product, came: list[torch.Tensor]) -> Sequence[Gradient]:
    return product.compute(came.pop()) if came else (None,) * len(product.places)


def _leaf(node: Any) -> torch.Tensor | None:
    """The leaf whose gradient the node accumulates; None for any other node."""
    return getattr(node, "variable", None) if not node.next_functions else None


def _on_path(begins: Iterable[Any], received: set[int]) -> dict[Any, bool]:
    """By node, whether it leads to one of the leaves ``received`` (by id)."""
    found: dict[Any, bool] = {}
    stack = list(begins)
    while stack:
        node = stack[-1]
        ahead = [after for after, _ in node.next_functions if after is not None]
        unknown = [after for after in ahead if after not in found]
        if unknown and node not in found:
            stack.extend(unknown)
            continue
        stack.pop()
        if node not in found:
            found[node] = any(found[after] for after in ahead) or id(_leaf(node)) in received
    return found


def _entries(on_path: dict[Any, bool]) -> dict[_Edge, list[tuple[Any, int]]]:
    """Where the path is left: edges off it, each with the nodes that lead there and which of their inputs it is."""
    found: dict[_Edge, list[tuple[Any, int]]] = {}
    for node, leads in on_path.items():
        if leads:
            for place, edge in enumerate(node.next_functions):
                if edge[0] is not None and not on_path[edge[0]]:
                    found.setdefault(edge, []).append((node, place))
    return found


def _together(on_path: dict[Any, bool], entries: dict[_Edge, list[tuple[Any, int]]]) -> list[list[_Edge]]:
    """Entries whose gradients one product makes at once."""
    found = []
    for node, leads in on_path.items():
        if leads and len(places := PLACES.get(node.name(), ())) > 1:
            edges = [node.next_functions[place] for place in places]
            found.append([edge for edge in edges if edge in entries])
    return found


def _islands(edges: Sequence[_Edge], together: Iterable[Sequence[_Edge]], own: dict[int, int]) -> list[_Island]:
    """Everything behind the edges, in parts that have no node in common.

    Args:
        together: edges that are of one part in any case.
        own: ids of the leaves that count; others, which the model made itself, get no gradient.
    """
    number: dict[Any, int] = {}
    same: list[int] = []

    def root_of(one: int) -> int:
        while same[one] != one:
            one = same[one]
        return one

    for edge in edges:
        mark = len(same)
        same.append(mark)
        stack = [edge[0]]
        while stack:
            node = stack.pop()
            if node in number:
                same[root_of(number[node])] = root_of(mark)
                continue
            number[node] = mark
            stack.extend(after for after, _ in node.next_functions if after is not None)
    for group in together:
        for edge in group[1:]:
            same[root_of(number[edge[0]])] = root_of(number[group[0][0]])
    islands: dict[int, _Island] = {}
    for edge in dict.fromkeys(edges):
        islands.setdefault(root_of(number[edge[0]]), _Island([], [])).edges.append(edge)
    for node in number:
        if (leaf := _leaf(node)) is not None and id(leaf) in own:
            islands[root_of(number[node])].leaves.append(leaf)
    return list(islands.values())
