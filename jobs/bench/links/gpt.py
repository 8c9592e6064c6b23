"""GPT of bench/links: eight blocks whose boundary is 256 KiB per micro-batch of two samples.

Blocks that sleep while an accelerator would compute, with messages of the same size, can replace it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from jobs.train.lm import VOCABULARY, Block, loss_fn

__all__ = [
    "CONTEXT",
    "MICROBATCHES",
    "MICROBATCH_SIZE",
    "WIDTH",
    "chain",
    "loss_fn",
    "optimizer_of",
    "peak_bytes",
    "samples",
    "slept",
]

CONTEXT, WIDTH, DEPTH, HEADS = 128, 256, 8, 4
MICROBATCHES, MICROBATCH_SIZE = 8, 2
CALIBRATIONS = 25


class Embed(nn.Module):
    """Bytes and their places -> (batch, context, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.word(tokens) + self.place(torch.arange(CONTEXT))


class Head(nn.Module):
    """(batch, context, width) -> logits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x))


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


class SleepingBlock(nn.Module):
    """Block that sleeps in its forward and backward.

    Half of the backward is for the input and half for the 1 x 1 parameter, so that schedules can split it.

    Args:
        forward_s, backward_s: seconds to sleep for one micro-batch.
    """

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s, self.half_s = forward_s, backward_s / 2
        self.scale = nn.Parameter(torch.ones(1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        passed: torch.Tensor = Later.apply(x, self.forward_s, self.half_s)
        scale: torch.Tensor = Later.apply(self.scale, 0.0, self.half_s)
        # No view: torch's own runtime detaches what a stage gives in place.
        return (passed.reshape(-1, 1) @ scale).view_as(x).clone()


def slept(half_s: Sequence[float]) -> tuple[float, ...]:
    """Choose sleeps, forward and backward, with which half of the blocks take ``half_s``.

    The measured overhead of a lone block, which an accelerator would not have, is subtracted. Call once for all
    candidates, on an idle machine.

    Raises:
        ValueError: the overhead of a block is longer than that.
    """
    asked_s = 0.005
    block, x = SleepingBlock(asked_s, 2 * asked_s), torch.ones(MICROBATCH_SIZE, CONTEXT, WIDTH, requires_grad=True)
    gradient = torch.ones_like(x)
    forward_s, backward_s = [], []
    for _ in range(CALIBRATIONS):
        begin_s = time.perf_counter()
        y = block(x)
        between_s = time.perf_counter()
        torch.autograd.grad(y, (x, block.scale), gradient)
        forward_s.append(between_s - begin_s - asked_s)
        backward_s.append(time.perf_counter() - between_s - 2 * asked_s)
    own_s = median(forward_s), median(backward_s)
    found = tuple(whole - DEPTH // 2 * own for whole, own in zip(half_s, own_s, strict=True))
    if min(found) <= 0:
        raise ValueError(f"a lone block takes {own_s} s besides its sleeps: {half_s} s of {DEPTH // 2} are too few")
    return found


def chain(half_s: Sequence[float] = ()) -> nn.Sequential:
    """Make the model, equal in every process: children "0" (embedding), "1" to "8" (blocks), "9" (head).

    Args:
        half_s: (forward, backward) seconds that half of the blocks sleep; () to compute.
    """
    torch.manual_seed(5)
    blocks: list[nn.Module]
    if half_s:
        blocks = [SleepingBlock(*(seconds / (DEPTH // 2) for seconds in half_s)) for _ in range(DEPTH)]
    else:
        blocks = [Block(WIDTH, HEADS) for _ in range(DEPTH)]
    return nn.Sequential(Embed(), *blocks, Head())


def pieces(count: int, half_s: Sequence[float] = ()) -> list[nn.Sequential]:
    """Split the chain into ``count`` parts of equally many blocks."""
    whole, blocks = list(chain(half_s)), DEPTH // count
    cuts = [0, *(1 + blocks * i for i in range(1, count)), len(whole)]
    return [nn.Sequential(*whole[a:b]) for a, b in itertools.pairwise(cuts)]


def samples(steps: int) -> TensorDataset:
    """Draw random bytes; convergence is not measured here."""
    drawn = torch.Generator().manual_seed(6)
    shape = (steps * MICROBATCHES * MICROBATCH_SIZE, CONTEXT)
    return TensorDataset(*(torch.randint(VOCABULARY, shape, generator=drawn) for _ in range(2)))


def optimizer_of(named: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-4)  # type: ignore[arg-type]


def peak_bytes(process: int | str) -> int:
    """Read the peak resident bytes of a process of this machine."""
    text = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(text.partition("VmHWM:")[2].split()[0])
