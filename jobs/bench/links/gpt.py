"""What bench/links trains: a GPT of eight blocks whose boundary is 256 KiB per micro-batch of two samples.

In its place there may be blocks that sleep where an accelerator would compute, with messages of the same size.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.utils.data import TensorDataset

from jobs.lib.later import Later
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


class SleepingBlock(nn.Module):
    """Half of its backward is for the input and half for its parameter, a product of one by one, so that schedules may
    part them.

    Args:
        forward_s, backward_s: slept for one micro-batch.
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
    """What half of the blocks sleep forward and backward so that they take ``half_s``.

    It is less by what a lone block was seen to take besides its sleeps, which no accelerator takes. Ask once for all
    candidates, on an idle machine.

    Raises:
        ValueError: a block takes longer than that by itself.
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
    """The same in every process: children "0" (embedding), "1" to "8" (blocks), "9" (head).

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
    """The chain in ``count`` parts of equally many blocks."""
    whole, blocks = list(chain(half_s)), DEPTH // count
    cuts = [0, *(1 + blocks * i for i in range(1, count)), len(whole)]
    return [nn.Sequential(*whole[a:b]) for a, b in itertools.pairwise(cuts)]


def samples(steps: int) -> TensorDataset:
    """Drawn bytes: how fast they are learnt is of no interest here."""
    drawn = torch.Generator().manual_seed(6)
    shape = (steps * MICROBATCHES * MICROBATCH_SIZE, CONTEXT)
    return TensorDataset(*(torch.randint(VOCABULARY, shape, generator=drawn) for _ in range(2)))


def optimizer_of(named: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-4)  # type: ignore[arg-type]


def peak_bytes(process: int | str) -> int:
    """The most resident memory that a process of this machine has held."""
    text = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(text.partition("VmHWM:")[2].split()[0])
