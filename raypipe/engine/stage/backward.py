"""Backward of a stage: whole, or split into its input part (I), which the previous stage waits for, and its weight part
(W), which only the optimizer's step needs.

    loss <-- gelu <-- addmm <-- norm <-- received input     the path: I runs it
                        |
                        t <-- weight                        an island off the path: W runs it

A whole backward is one call of torch's autograd engine. torch.autograd.grad checks its arguments in Python for 60 to 90
us, which matters if an accelerator's stage launches a backward every few milliseconds. The engine's entry point takes
the same tensors but is private, so the public function replaces it if it is missing. Gradients are taken as autograd
computes them. ``leaf.grad`` has the layout of the leaf instead, and a convolution in an earlier stage, whose sums
depend on the layout of its gradient, would round differently.

A split backward divides the nodes of a micro-batch's graph: a node is on a path to a received input, or leads to
parameters only. The nodes that lead to parameters only form islands, which have no node in common. If a matrix product
or a convolution has an input on the path and a parameter off it, the gradients of the input and of the parameter are
two separate products. In I autograd computes the gradient of the input. W computes the gradient of the parameter by
autograd's formula from the saved operand, and continues into the island. Both parts together give the bits of one
backward, and between them only pairs of operands are kept. test_backward compares the formulas in three dtypes.

An island that is entered by anything but one product runs in I, and so does the whole backward if a root leads to no
received input. A node of another form, or with saved tensors that have hooks (torch.utils.checkpoint, offloading), is
not split. A stage that receives no input with a gradient has no I: its whole backward is W.

Zero bubble pipelines (Qi et al., arXiv:2401.10241) call the two parts B and W. torch.distributed.pipelining keeps the
whole graph between the parts, and runs nodes that belong to both parts twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

_engine = getattr(torch.autograd.Variable, "_execution_engine", None)
_run = getattr(_engine, "run_backward", None)


def gradients(
    roots: Sequence[torch.Tensor | GradientEdge],
    output_grads: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor | GradientEdge],
    *,
    keep_graph: bool = False,
) -> Sequence[torch.Tensor | None]:
    """Compute the gradients of sum(roots * output_grads) with respect to ``leaves``.

    Args:
        roots, leaves: tensors or edges of the graph, where gradients enter the graph (roots) and are taken (leaves).
        output_grads: one per root, of its shape and dtype.
        keep_graph: True keeps the roots' graph for another backward; else it is freed.

    Returns:
        One gradient per leaf; None for a leaf that the roots do not depend on.
    """
    if _run is None:
        return torch.autograd.grad(list(roots), list(leaves), list(output_grads), keep_graph, allow_unused=True)  # type: ignore[arg-type]
    # keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad
    grads: Sequence[torch.Tensor | None] = _run(
        tuple(roots), tuple(output_grads), keep_graph, False, tuple(leaves), True, False
    )
    return grads


Gradient = torch.Tensor | None
_Compute = Callable[[torch.Tensor], Sequence[Gradient]]


class Product(NamedTuple):
    """Formula for the parameter gradients of one node of autograd's graph, a matrix product or a convolution.

    Attributes:
        places: indices of the parameters among the node's inputs; their gradients are computed together.
        compute: maps the gradient of the node's output to the gradients of ``places``.
    """

    places: tuple[int, ...]
    compute: _Compute


def product_of(node: Any) -> Product | None:
    """Return the formula of a node's parameter gradients; None if the node is no supported product or convolution."""
    match node.name():
        case "MmBackward0":
            return _matrix_product(node, 1, "self")
        case "AddmmBackward0" if node._saved_alpha == 1:
            return _matrix_product(node, 2, "mat1")
        case "ConvolutionBackward0":
            return _convolution(node)
    return None


PLACES = {"MmBackward0": (1,), "AddmmBackward0": (2,), "ConvolutionBackward0": (1, 2)}
"""Indices of the inputs whose gradients the weight part of a split backward can compute, by the name of the node."""


class _Operand:
    """Tensor saved for the backward, without its graph. ``get`` raises RuntimeError after an in-place change."""

    def __init__(self, saved: torch.Tensor) -> None:
        self._tensor, self._version = saved.detach(), saved._version

    def get(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._tensor.shape)} that the backward needs was changed in place after its "
                "forward. Change a copy instead."
            )
        return self._tensor


def _operand(node: Any, name: str) -> _Operand | None:
    if getattr(getattr(node, f"_raw_saved_{name}"), "unpack_hook", _unknown) is not None:
        return None
    saved = getattr(node, f"_saved_{name}")
    plain = saved is not None and saved.layout is torch.strided and not saved.is_complex()
    return _Operand(saved) if plain else None


def _unknown() -> None:
    """Serve as the value of a node's unpack hooks in releases of torch that do not expose the hooks."""


def _matrix_product(node: Any, place: int, name: str) -> Product | None:
    """Return the formula for the gradient of a product's second factor, which is input ``place`` of the node.

    ``name`` is the name under which the node has saved the first factor.
    """
    operand = _operand(node, name)
    if operand is None:
        return None
    (rows, _), strides = node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides
    by_column = strides[0] == 1 and strides[1] == rows

    def compute(gradient: torch.Tensor) -> Sequence[Gradient]:
        if by_column:
            return (gradient.t().mm(operand.get()).t(),)
        return (operand.get().t().mm(gradient),)

    return Product((place,), compute)


def _convolution(node: Any) -> Product | None:
    operand, weight = _operand(node, "input"), _operand(node, "weight")
    places = tuple(place for place in PLACES[node.name()] if node.next_functions[place][0] is not None)
    if operand is None or weight is None or not places:
        return None
    bias_sizes = node._saved_bias_sym_sizes_opt
    form = (
        node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_transposed,
        node._saved_output_padding, node._saved_groups,
    )  # fmt: skip
    mask = [False, 1 in places, 2 in places]

    def compute(gradient: torch.Tensor) -> Sequence[Gradient]:
        grads = torch.ops.aten.convolution_backward(gradient, operand.get(), weight.get(), bias_sizes, *form, mask)
        return [grads[place] for place in places]

    return Product(places, compute)


_Edge = tuple[Any, int]
"""Node of autograd's graph and index of its output gradient, as in ``next_functions``."""


class SplitBackward(NamedTuple):
    """Result of the input part (I) of a split backward, with the function that runs the weight part (W).

    Attributes:
        received: one gradient per received input; None for an input on which the roots do not depend.
        own: one gradient per leaf of the stage's parameters; None for a leaf that is deferred to W.
        finish: function that runs W, once. It returns one gradient per leaf of the stage's parameters; None for a leaf
            whose gradient is in ``own``.
    """

    received: Sequence[Gradient]
    own: Sequence[Gradient]
    finish: Callable[[], Sequence[Gradient]]


class _Island(NamedTuple):
    """Connected component of the nodes from which no received input is reached.

    Attributes:
        edges: edges into the component from nodes that do lead to a received input.
        leaves: leaves of the stage's parameters in the component.
    """

    edges: list[_Edge]
    leaves: list[torch.Tensor]


class _Deferred(NamedTuple):
    """Island whose whole backward belongs to W, which starts from ``output_grads()``, the gradients at its edges."""

    island: _Island
    output_grads: Callable[[], Sequence[Gradient]]


def input_gradients(
    roots: Sequence[torch.Tensor],
    output_grads: Sequence[torch.Tensor],
    received: Sequence[torch.Tensor],
    own: Sequence[torch.Tensor],
) -> SplitBackward:
    """Run the input part (I) of a backward of sum(roots * output_grads); defer gradients of ``own`` to the part W.

    Args:
        output_grads: one per root, of its shape and dtype. The graph between roots and ``received`` is freed.
        received: inputs of the stage that require a gradient.
        own: leaves of the stage's parameters that require a gradient.
    """
    position = {id(leaf): place for place, leaf in enumerate(own)}
    begins = [get_gradient_edge(root) for root in roots]
    on_path = _on_path((edge.node for edge in begins), {id(leaf) for leaf in received})
    if not all(on_path[edge.node] for edge in begins):
        whole = gradients(roots, output_grads, [*received, *own]) if received or own else ()
        return SplitBackward(whole[: len(received)], whole[len(received) :], lambda: (None,) * len(own))
    entries = _entries(on_path)
    now: list[torch.Tensor] = []
    later: list[_Deferred] = []
    for island in _islands(list(entries), _groups(on_path, entries), position):
        if (deferred := _deferred(island, entries)) is not None:
            later.append(deferred)
        else:
            now += island.leaves
    wanted = [*received, *now]
    grads = gradients(roots, output_grads, wanted) if roots and wanted else (None,) * len(wanted)
    with_them: list[Gradient] = [None] * len(own)
    for leaf, gradient in zip(now, grads[len(received) :], strict=True):
        with_them[position[id(leaf)]] = gradient
    # Neither the path nor what it saved may outlive this call.
    return SplitBackward(grads[: len(received)], with_them, partial(_finish, later, position))


@torch.no_grad()
def _finish(later: list[_Deferred], position: dict[int, int]) -> Sequence[Gradient]:
    """Run W, the weight part, one island at a time, so that hooks free a large gradient before the next is computed.

    Args:
        later: deferred islands; removed as they run.
        position: index of each leaf in the result, by the id of the leaf.
    """
    own: list[Gradient] = [None] * len(position)
    while later:
        island, make = later.pop()
        pairs = [(GradientEdge(*edge), output_grad) for edge, output_grad in zip(island.edges, make(), strict=True)]
        known = [(edge, output_grad) for edge, output_grad in pairs if output_grad is not None]
        if known:
            grads = gradients([edge for edge, _ in known], [output_grad for _, output_grad in known], island.leaves)
            for leaf, gradient in zip(island.leaves, grads, strict=True):
                own[position[id(leaf)]] = gradient
    return own


def _deferred(island: _Island, entries: dict[_Edge, list[tuple[Any, int]]]) -> _Deferred | None:
    """Defer an island to W if all edges into it (``_entries``) come from one supported product; else return None."""
    users = [user for edge in island.edges for user in entries[edge]]
    node = users[0][0]
    if any(other is not node for other, _ in users) or not island.leaves:
        return None
    product = product_of(node)
    if product is None or sorted(place for _, place in users) != list(product.places):
        return None
    edges = [node.next_functions[place] for place in product.places]
    arrived_grads: list[torch.Tensor] = []
    # A hook of the node, instead of a gradient captured at its edge: hooks of tensors have run when it is called.
    node.register_prehook(partial(_keep, arrived_grads))
    return _Deferred(_Island(edges, island.leaves), partial(_computed, product, arrived_grads))


def _keep(kept: list[torch.Tensor], arrived: tuple[Gradient, ...]) -> None:
    kept.extend(gradient for gradient in arrived if gradient is not None)


def _computed(product: Product, arrived_grads: list[torch.Tensor]) -> Sequence[Gradient]:
    return product.compute(arrived_grads.pop()) if arrived_grads else (None,) * len(product.places)


def _leaf(node: Any) -> torch.Tensor | None:
    """Return the leaf whose gradient an AccumulateGrad node accumulates; None for any other node."""
    return getattr(node, "variable", None) if not node.next_functions else None


def _on_path(begins: Iterable[Any], received: set[int]) -> dict[Any, bool]:
    """Map each node reachable from ``begins`` to True if it leads to a leaf whose id is in ``received``."""
    leads: dict[Any, bool] = {}
    stack = list(begins)
    while stack:
        node = stack[-1]
        ahead = [after for after, _ in node.next_functions if after is not None]
        unknown = [after for after in ahead if after not in leads]
        if unknown and node not in leads:
            stack.extend(unknown)
            continue
        stack.pop()
        if node not in leads:
            leads[node] = any(leads[after] for after in ahead) or id(_leaf(node)) in received
    return leads


def _entries(on_path: dict[Any, bool]) -> dict[_Edge, list[tuple[Any, int]]]:
    """Map each edge into an island (nodes with False in ``on_path``) to the (node, input index) that have the edge."""
    entries: dict[_Edge, list[tuple[Any, int]]] = {}
    for node, leads in on_path.items():
        if leads:
            for place, edge in enumerate(node.next_functions):
                if edge[0] is not None and not on_path[edge[0]]:
                    entries.setdefault(edge, []).append((node, place))
    return entries


def _groups(on_path: dict[Any, bool], entries: dict[_Edge, list[tuple[Any, int]]]) -> list[list[_Edge]]:
    """Group the edges whose gradients one formula computes together: those to weight and bias of a convolution."""
    groups = []
    for node, leads in on_path.items():
        if leads and len(places := PLACES.get(node.name(), ())) > 1:
            edges = [node.next_functions[place] for place in places]
            groups.append([edge for edge in edges if edge in entries])
    return groups


def _islands(edges: Sequence[_Edge], together: Iterable[Sequence[_Edge]], own: dict[int, int]) -> list[_Island]:
    """Divide the nodes that are reachable from the edges into islands that have no node in common.

    Args:
        together: groups of edges whose nodes must be in one island.
        own: ids of the leaves of the stage's parameters; other leaves, which the forward created, get no gradient.
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
