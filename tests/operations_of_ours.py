"""A module as users have one: an operation that it registers with torch, and a structure that a model returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Returned", "Squaring", "square"]


@torch.library.custom_op("raypipe_tests::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


@square.register_fake
def _shape(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    return 2 * ctx.saved_tensors[0] * gradient


square.register_autograd(_backward, setup_context=_keep)


@dataclass
class Returned:
    logits: torch.Tensor
    hidden: torch.Tensor


torch.export.register_dataclass(Returned)


class Squaring(nn.Module):
    """Calls the operation in its first half, and returns the structure."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Returned:
        hidden = torch.tanh(self.second(square(self.first(x))))
        return Returned(self.last(hidden), hidden)
