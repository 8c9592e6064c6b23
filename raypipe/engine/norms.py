"""The gradient norm of the whole model, from those of its parameters: the same bits however it is cut.

torch takes the norm of the stacked norms in the order of the user's ``named_parameters()``. Stages that wait for each
other exchange theirs before the optimizer's step (``reduction``); those that do not tell them with their reports, and
whoever has all of them makes the total.

With lanes, whose sums have an order of their own anyway, the norm of a parameter is that of the norms of its blocks of
1024 elements, in the order of memory. So it does not depend on who has which blocks (``slices``). One block, as of most
biases, has the bits of torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raypipe.ir.report import Norms

__all__ = ["BLOCK", "block_norms", "each_norm", "norm_of", "norm_of_blocks", "norms_told", "total_norm"]

BLOCK = 1024
"""Elements. A multiple of what a vector register holds: a step of slices that begin with a block treats every element
as a step of the whole parameter does, even where the last elements of a tensor are computed otherwise than the rest."""


def block_norms(elements: torch.Tensor) -> torch.Tensor:
    """Of every block, shape (blocks,).

    Args:
        elements: of a parameter in the order of memory, from the beginning of a block on.
    """
    whole = elements.numel() // BLOCK * BLOCK
    parts = []
    if whole:
        parts.append(torch.linalg.vector_norm(elements[:whole].view(-1, BLOCK), dim=1))
    if whole < elements.numel():
        parts.append(torch.linalg.vector_norm(elements[whole:]).view(1))
    if not parts:  # a parameter without elements
        return elements.new_zeros(1)
    return torch.cat(parts) if len(parts) != 1 else parts[0]


def each_norm(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Scalars, one for each: by what ``torch.nn.utils.clip_grad_norm_`` takes them by, which on a GPU adds up otherwise
    than ``vector_norm`` does, and in a few kernels for all."""
    return torch._foreach_norm(list(gradients)) if gradients else ()


def norm_of_blocks(norms: torch.Tensor) -> torch.Tensor:
    """Scalar: of a parameter, from those of its blocks in their order."""
    return norms[0] if norms.numel() == 1 else torch.linalg.vector_norm(norms)


def total_norm(places: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """Scalar, of norms at these places among all parameters."""
    return torch.linalg.vector_norm(norms[torch.argsort(places)])


def norms_told(places: torch.Tensor, norms: torch.Tensor) -> Norms:
    """For a report; ``norm_of`` has the same bits."""
    return Norms(tuple(places.tolist()), tuple(norms.tolist()), str(norms.dtype).removeprefix("torch."))


def norm_of(parts: Sequence[Norms]) -> float:
    """Of the whole model, from what its stages told."""
    places = torch.tensor([place for part in parts for place in part.places], dtype=torch.int64)
    norms = [torch.tensor(part.norms, dtype=getattr(torch, part.dtype)) for part in parts]
    return float(total_norm(places, torch.cat(norms)))
