"""Loss in place of one over the whole mini-batch, for profiles: it keeps what the last stage holds of a micro-batch.

    forward    outputs until the loss, targets     copies, kept for the backward
    backward   gradients by the outputs            the same copies: as many bytes, in turn

The loss itself, which runs once per mini-batch, is no part of such a profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class HeldOutputs:
    """Function of a micro-batch's outputs and targets that returns a scalar, at the price of copying the outputs.

    Attributes:
        joined: dimension of the samples in each output tensor; None for one without samples, of which the last stage
            holds a single one for all micro-batches.
    """

    joined: tuple[int | None, ...]

    def __call__(self, outputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> torch.Tensor:
        of_samples = [x for x, dim in zip(outputs, self.joined, strict=True) if dim is not None]
        single = [x for x, dim in zip(outputs, self.joined, strict=True) if dim is None and x.requires_grad]
        copied = [x for x in of_samples if x.requires_grad]
        kept = [*(x for x in of_samples if not x.requires_grad), *targets]
        held: torch.Tensor = _Held.apply(len(copied), len(single), *copied, *single, *kept)
        return held


class _Held(torch.autograd.Function):
    """Autograd function that returns 0, and keeps tensors until its backward.

    It keeps copies of the first ``copied`` tensors, none of the next ``single`` tensors, and the others as they are.
    The backward returns the copies as gradients by their tensors, and zeros as gradients by the ``single`` tensors.
    """

    @staticmethod
    def forward(ctx: Any, copied: int, single: int, *tensors: torch.Tensor) -> torch.Tensor:
        kept = (*(x.clone() for x in tensors[:copied]), *tensors[copied + single :])
        ctx.copied, ctx.others = copied, len(kept) - copied
        ctx.single = [(x.shape, x.dtype, x.device) for x in tensors[copied : copied + single]]
        ctx.save_for_backward(*kept)
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.single]
        return None, None, *ctx.saved_tensors[: ctx.copied], *zeros, *(None for _ in range(ctx.others))
