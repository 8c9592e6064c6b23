"""A tensor as it is, later: what stands in for computation on a device of its own. Loads torch alone."""

from __future__ import annotations

import time
from typing import Any

import torch

__all__ = ["Later"]


class Later(torch.autograd.Function):
    """Sleeps in its forward and in its backward: ``Later.apply(x, forward_s, backward_s)``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradient, None, None
