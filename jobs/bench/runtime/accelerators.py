"""Stages that sleep as a process waits for its accelerator: 10 ms forward, 20 ms backward, 256 KB between them."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

__all__ = ["BACKWARD_S", "FORWARD_S", "Block", "blocks", "loss_of"]

FORWARD_S, BACKWARD_S = 0.010, 0.020
WIDTH = 65_536  # float32: 256 KB per sample, and a micro-batch is one sample


class _Accelerator(torch.autograd.Function):
    """Sleeps as an accelerator would work, and hands on tensors as if it had filled them: the host does not.

    The weight's gradient is one per micro-batch, which is how the candidates' arithmetic is compared.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, block: Block) -> torch.Tensor:
        ctx.block = block
        time.sleep(block.forward_s)
        return block.output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, None]:
        time.sleep(ctx.block.backward_s)
        return ctx.block.of_x if ctx.needs_input_grad[0] else None, ctx.block.of_weight, None


class Block(nn.Module):
    """One stage's work: features in, ``width`` of them out."""

    def __init__(self, width: int, handicap_s: float) -> None:
        super().__init__()
        self.width = width
        self.forward_s, self.backward_s = FORWARD_S + handicap_s, BACKWARD_S + handicap_s
        self.weight = nn.Parameter(torch.zeros(1))
        # As if an accelerator had filled them: the same memory every time, which nobody changes.
        self.of_weight, self.output, self.of_x = torch.ones(1), torch.zeros(1, width), torch.zeros(1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Accelerator.apply(x, self.weight, self)


def blocks(num_stages: int, handicap_s: float = 0.0) -> list[Block]:
    """One for each stage; wide between them, while data and output are a single feature."""
    return [Block(1 if stage == num_stages - 1 else WIDTH, handicap_s) for stage in range(num_stages)]


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """One operation; its value does not matter, since a block's gradient is one per micro-batch."""
    return output.sum()
