"""Matrix products and convolutions of autograd's graph, and how each makes the gradient of its parameters.

The formulas are autograd's own, on the operand that it saved, so the bits are the same; test_split_backward compares
them in three dtypes. A node of another form, or one whose saved tensors are behind hooks
(torch.utils.checkpoint, offloading), is none of these: it keeps its backward whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["PLACES", "Gradient", "Product", "product_of"]

Gradient = torch.Tensor | None
_Compute = Callable[[torch.Tensor], Sequence[Gradient]]


class Product(NamedTuple):
    """What one node does for its parameters.

    Attributes:
        places: which of the node's inputs they are, all of them to be made together.
        compute: from the gradient of the node's output, those of ``places``.
    """

    places: tuple[int, ...]
    compute: _Compute


def product_of(node: Any) -> Product | None:
    """None where the node is no product, or one of another form."""
    make = _MAKERS.get(node.name())
    return None if make is None else make(node)


PLACES = {"MmBackward0": (1,), "AddmmBackward0": (2,), "ConvolutionBackward0": (1, 2)}
"""By kind of node, the inputs whose gradients can wait; those of a convolution are made at once."""


class _Operand:
    """A saved tensor without the graph that made it, which nobody may change until it is used."""

    def __init__(self, saved: torch.Tensor) -> None:
        self._tensor, self._version = saved.detach(), saved._version

    def get(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._tensor.shape)} that the backward needs was changed in place since its "
                "forward: change a copy instead"
            )
        return self._tensor


def _operand(node: Any, name: str) -> _Operand | None:
    if getattr(getattr(node, f"_raw_saved_{name}"), "unpack_hook", _unknown) is not None:
        return None
    saved = getattr(node, f"_saved_{name}")
    plain = saved is not None and saved.layout is torch.strided and not saved.is_complex()
    return _Operand(saved) if plain else None


def _unknown() -> None:
    """Stands for hooks that this release of torch does not tell of."""


def _mm(node: Any) -> Product | None:
    return _matrix_product(node, 1, "self")


def _addmm(node: Any) -> Product | None:
    return _matrix_product(node, 2, "mat1") if node._saved_alpha == 1 else None


def _matrix_product(node: Any, place: int, name: str) -> Product | None:
    """The second factor's gradient; ``name`` is the first."""
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
        made = torch.ops.aten.convolution_backward(gradient, operand.get(), weight.get(), bias_sizes, *form, mask)
        return [made[place] for place in places]

    return Product(places, compute)


_MAKERS: dict[str, Callable[[Any], Product | None]] = {
    "MmBackward0": _mm,
    "AddmmBackward0": _addmm,
    "ConvolutionBackward0": _convolution,
}
