"""Gradient norm of the whole model, from the norms of its parameters: bitwise equal for every partition.

torch takes the norm of the stacked norms in the order of the user's ``named_parameters()``. Synchronous stages exchange
their norms before the optimizer's step (``reduction``); asynchronous ones send them with their reports, from which the
driver computes the total.

With several lanes (partial sums of gradients), the norm of a parameter is the norm of the norms of its blocks of 1024
elements, in the order of memory. So it does not depend on the replicas that hold the blocks (``slices``). If a
parameter has one block only, as most biases do, its norm is bitwise equal to that of torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raypipe.ir.report import Norms

BLOCK = 1024
"""Elements per block, a multiple of the elements in a vector register. If slices begin at a block, an optimizer's steps
of slices and of the whole parameter are bitwise equal, even if scalar code computes a tensor's last elements."""


def block_norms(elements: torch.Tensor) -> torch.Tensor:
    """Compute the norm of every block of a parameter's elements, in the order of memory, shape (blocks,)."""
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
    """Compute one scalar norm per gradient in few kernels, bitwise equal to ``torch.nn.utils.clip_grad_norm_``."""
    return torch._foreach_norm(list(gradients)) if gradients else ()


def norm_of_blocks(norms: torch.Tensor) -> torch.Tensor:
    """Compute the scalar norm of a parameter from the norms of its blocks in their order."""
    return norms[0] if norms.numel() == 1 else torch.linalg.vector_norm(norms)


def total_norm(positions: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """Compute the norm of the parameters' norms, shape (n,), in the order of ``positions`` in named_parameters()."""
    return torch.linalg.vector_norm(norms[torch.argsort(positions)])


def to_report_norms(positions: torch.Tensor, norms: torch.Tensor) -> Norms:
    """Convert positions and norms of parameters to the form in reports, from which ``norm_of`` computes the total."""
    return Norms(tuple(positions.tolist()), tuple(norms.tolist()), str(norms.dtype).removeprefix("torch."))


def norm_of(parts: Sequence[Norms]) -> float:
    """Compute the gradient norm of the whole model from the parameters' norms in the reports of its stages."""
    positions = torch.tensor([position for part in parts for position in part.places], dtype=torch.int64)
    norms = [torch.tensor(part.norms, dtype=getattr(torch, part.dtype)) for part in parts]
    return float(total_norm(positions, torch.cat(norms)))
