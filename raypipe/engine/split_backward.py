"""A backward in two halves: what the stage before waits for (I), and what only the optimizer's step needs (W).

    loss <-- gelu <-- addmm <-- norm <-- received input     the path: I runs it
                        |
                        t <-- weight                        off the path: W runs it

The nodes of a micro-batch's graph either lie on a path to a received input, or lead to parameters alone. I runs the
path and keeps the gradients that would go on off it. Where a matrix product or a convolution has an input on the path
and a parameter off it, autograd makes each one's gradient by a product of its own: I lets it make the input's, and W
makes the other by autograd's formula from the operand that was saved. So the halves do together what one backward does,
to the same bits, and between them nothing is kept but pairs of operands.

Any other node that has both is run once, in I, for both. A stage that receives nothing to pass a gradient to has no I:
the executor runs its whole backward as W.

Zero bubble pipelines (Qi et al., arXiv:2401.10241) call the halves B and W. torch.distributed.pipelining keeps the
whole graph between them, and runs a node that has both twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from raypipe.engine.backward import gradients

__all__ = ["Halves", "input_gradients"]

Gradient = torch.Tensor | None
_Edge = tuple[Any, int]
"""A node of autograd's graph and which of its outputs' gradients, as in ``next_functions``."""
FIRST = 1 << 62
"""Sequence of what no node of the path makes: one backward adds a root's own gradient before any other."""


class Halves(NamedTuple):
    """What I leaves behind.

    Attributes:
        received: gradients of the received inputs, None for those that the roots do not reach.
        own: gradients of the parameters' leaves that came with them, None for those left to W.
        finish: W, to be called once: the gradients that were left, None for the others.
    """

    received: Sequence[Gradient]
    own: Sequence[Gradient]
    finish: Callable[[], Sequence[Gradient]]


class _Source(NamedTuple):
    """Gradients that enter the graph off the path in W.

    Attributes:
        edges: where they enter.
        seeds: makes them.
        sequence: number in the forward of the node that they come from: one backward would run later ones first.
    """

    edges: Sequence[_Edge]
    seeds: Callable[[], Sequence[Gradient]]
    sequence: int


_Later = tuple[list[_Source], list[torch.Tensor]]
"""What enters one island, and the leaves that it leads to."""


class _Island(NamedTuple):
    """Nodes off the path that hang together: what enters them adds up somewhere, and nothing else does.

    Attributes:
        edges: where the path, or a root, enters.
        leaves: that it leads to.
    """

    edges: list[_Edge]
    leaves: list[torch.Tensor]


def input_gradients(
    roots: Sequence[torch.Tensor],
    seeds: Sequence[torch.Tensor],
    received: Sequence[torch.Tensor],
    own: Sequence[torch.Tensor],
) -> Halves:
    """I: the gradients of sum(roots * seeds) with respect to ``received``, and what W needs for those of ``own``.

    Args:
        seeds: one per root, of its shape and dtype. The roots' graph is freed on the path.
        received, own: leaves that require a gradient.
    """
    begins = [get_gradient_edge(root) for root in roots]
    on_path = _on_path((edge.node for edge in begins), {id(leaf) for leaf in received})
    entries = _entries(on_path)
    apart: dict[_Edge, list[torch.Tensor]] = {}
    for edge, seed in zip(begins, seeds, strict=True):
        if not on_path[edge.node]:
            apart.setdefault((edge.node, edge.output_nr), []).append(seed)
    products = _products(entries)
    places: list[_Edge | torch.Tensor] = []
    waiting: list[tuple[list[_Product], _Island]] = []
    for island in _islands([*entries, *apart], [product.edges for product in products.values()]):
        if all(edge in products or (edge in apart and edge not in entries) for edge in island.edges):
            used = {id(product): product for edge in island.edges if (product := products.get(edge))}
            waiting.append((list(used.values()), island))
        elif not apart.keys().isdisjoint(island.edges):
            # Gradients of roots and of the path meet there: they are added up in one backward.
            found = gradients(roots, seeds, [*received, *own])
            return Halves(found[: len(received)], found[len(received) :], lambda: (None,) * len(own))
        else:
            # One entry is kept as it is; where several meet, I goes on to the leaves.
            through = len(island.edges) > 1 or _leaf(island.edges[0][0]) is not None
            places += island.leaves if through else island.edges
    nodes = [product.node for some, _ in waiting for product in some]
    wanted = [*places, *((node, 0) for node in nodes)]
    ran = [(root, seed) for root, seed, edge in zip(roots, seeds, begins, strict=True) if on_path[edge.node]]
    found = _run(ran, [*received, *wanted])
    answers, taken, arrived = (iter(part) for part in _parts(found, len(received), len(places)))
    position = {id(leaf): place for place, leaf in enumerate(own)}
    now: list[Gradient] = [None] * len(own)
    later: list[_Later] = []
    for some, island in waiting:
        sources = [_Source(p.edges, _made(p.compute, next(arrived)), p.node._sequence_nr()) for p in some]
        sources += [_kept(edge, seed) for edge in island.edges for seed in apart.get(edge, ())]
        later.append((sources, island.leaves))
    for place, gradient in zip(places, taken, strict=True):
        if isinstance(place, torch.Tensor):
            now[position[id(place)]] = gradient  # its hooks have run
        elif gradient is not None:
            later.append(([_kept(place, gradient)], _leaves(place)))
    # Neither the path nor what it saved may outlive this call.
    return Halves(list(answers), now, partial(_finish, later, position))


def _run(
    ran: Sequence[tuple[torch.Tensor, torch.Tensor]], wanted: Sequence[torch.Tensor | _Edge]
) -> Sequence[Gradient]:
    """Gradients at leaves and edges, from roots and their seeds."""
    if not ran:
        return (None,) * len(wanted)
    leaves = [place if isinstance(place, torch.Tensor) else GradientEdge(*place) for place in wanted]
    return gradients([root for root, _ in ran], [seed for _, seed in ran], leaves)


def _parts(found: Sequence[Gradient], *counts: int) -> list[Sequence[Gradient]]:
    """The first so many, the next so many, ..., the rest."""
    ends = list(accumulate(counts, initial=0))
    return [*(found[a:b] for a, b in pairwise(ends)), found[ends[-1] :]]


@torch.no_grad()
def _finish(later: list[_Later], position: dict[int, int]) -> Sequence[Gradient]:
    """W: one engine call per island, so that a hook gives a large gradient back before the next is made."""
    found: list[Gradient] = [None] * len(position)
    while later:
        sources, leaves = later.pop()
        edges, seeds = [], []
        for source in sorted(sources, key=lambda source: -source.sequence):
            for edge, seed in zip(source.edges, source.seeds(), strict=False):
                if seed is not None:
                    edges.append(GradientEdge(*edge))
                    seeds.append(seed)
        if edges:
            for leaf, gradient in zip(leaves, gradients(edges, seeds, leaves), strict=True):
                found[position[id(leaf)]] = gradient
    return found


def _kept(edge: _Edge, seed: torch.Tensor) -> _Source:
    return _Source([edge], lambda: [seed], FIRST)


def _made(compute: Callable[[torch.Tensor], Sequence[Gradient]], arrived: Gradient) -> Callable[[], Sequence[Gradient]]:
    return lambda: () if arrived is None else compute(arrived)


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


def _islands(edges: Sequence[_Edge], joined: Sequence[Sequence[_Edge]]) -> list[_Island]:
    """Everything behind the edges, in parts that have no node in common.

    Args:
        joined: edges that belong together in any case.
    """
    number: dict[Any, int] = {}
    same: list[int] = []

    def root_of(one: int) -> int:
        while same[one] != one:
            one = same[one]
        return one

    for edge in edges:
        own = len(same)
        same.append(own)
        stack = [edge[0]]
        while stack:
            node = stack.pop()
            if node in number:
                same[root_of(number[node])] = root_of(own)
                continue
            number[node] = own
            stack.extend(after for after, _ in node.next_functions if after is not None)
    for group in joined:
        for edge in group[1:]:
            same[root_of(number[edge[0]])] = root_of(number[group[0][0]])
    islands: dict[int, _Island] = {}
    for edge in dict.fromkeys(edges):
        islands.setdefault(root_of(number[edge[0]]), _Island([], [])).edges.append(edge)
    for node in number:
        if (leaf := _leaf(node)) is not None:
            islands[root_of(number[node])].leaves.append(leaf)
    return list(islands.values())


def _leaves(edge: _Edge) -> list[torch.Tensor]:
    (island,) = _islands([edge], ())
    return island.leaves


def _products(entries: dict[_Edge, list[tuple[Any, int]]]) -> dict[_Edge, _Product]:
    """By edge, the products that can be left to W: those whose result nothing else is added to."""
    single: dict[Any, dict[int, _Edge]] = {}
    for edge, users in entries.items():
        if len(users) == 1:
            node, place = users[0]
            single.setdefault(node, {})[place] = edge
    found = {}
    for node, edges in single.items():
        rule = _RULES.get(node.name())
        places = [] if rule is None else [p for p in rule.places if node.next_functions[p][0] is not None]
        if rule is not None and places and edges.keys() >= set(places):
            compute = rule.made(node, places)
            if compute is not None:
                product = _Product(node, [edges[place] for place in places], compute)
                found.update(dict.fromkeys(product.edges, product))
    return found


class _Product(NamedTuple):
    """A node on the path that makes the gradients of some edges off it by a product of their own.

    Attributes:
        compute: the gradients of ``edges`` from that of the node's output.
    """

    node: Any
    edges: list[_Edge]
    compute: Callable[[torch.Tensor], Sequence[Gradient]]


# Products, by autograd's own formulas.


class _Rule(NamedTuple):
    """How a kind of node makes the gradients of its parameters.

    Attributes:
        places: of the inputs that can be left to W, all together, among the node's.
        made: (node, places that are there) -> gradient of the node's output -> gradients of those; None where the node
            is of a form that has another formula.
    """

    places: tuple[int, ...]
    made: Callable[[Any, Sequence[int]], Callable[[torch.Tensor], Sequence[Gradient]] | None]


def _matrix_product(operand: torch.Tensor, sizes: Sequence[int], strides: Sequence[int]) -> Any:
    """Gradient of the second factor, of these sizes and strides; ``operand`` is the first."""
    if operand.layout is not torch.strided or operand.is_complex():
        return None
    operand = operand.detach()  # as it was saved it holds the graph that made it
    by_column = strides[0] == 1 and strides[1] == sizes[0]

    def compute(gradient: torch.Tensor) -> Sequence[torch.Tensor]:
        if by_column:
            return (gradient.t().mm(operand).t(),)
        return (operand.t().mm(gradient),)

    return compute


def _of_mm(node: Any, places: Sequence[int]) -> Any:
    return _matrix_product(node._saved_self, node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides)


def _of_addmm(node: Any, places: Sequence[int]) -> Any:
    if node._saved_alpha != 1:
        return None
    return _matrix_product(node._saved_mat1, node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides)


def _of_convolution(node: Any, places: Sequence[int]) -> Any:
    operand, weight = node._saved_input.detach(), node._saved_weight.detach()
    bias_sizes = node._saved_bias_sym_sizes_opt
    form = (
        node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_transposed,
        node._saved_output_padding, node._saved_groups,
    )  # fmt: skip
    # The bias goes with the weight: the kernels make both at once.
    mask = [False, 1 in places, 2 in places]

    def compute(gradient: torch.Tensor) -> Sequence[Gradient]:
        made = torch.ops.aten.convolution_backward(gradient, operand, weight, bias_sizes, *form, mask)
        return [made[place] for place in places]

    return compute


_RULES = {
    "MmBackward0": _Rule((1,), _of_mm),
    "AddmmBackward0": _Rule((2,), _of_addmm),
    "ConvolutionBackward0": _Rule((1, 2), _of_convolution),
}
