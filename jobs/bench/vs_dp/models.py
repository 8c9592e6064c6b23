"""What bench/vs_dp trains: digits, by layers that compute for real and then sleep as an accelerator would work.

    parameters     six slow layers of 4,160 parameters, then wide ones of 1.6 million that take next to no time
    activations    eight equal layers of 4,160 parameters that hand on 64 KiB for every sample

A layer sleeps so long for each sample, forward and backward, so that any number of stages shares a few processors and a
micro-batch of half the samples takes half as long. What the layers really compute is small beside it.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from jobs.bench.convergence.tasks import TASKS

__all__ = ["MODELS", "Model", "accuracy", "heldout", "loss_of", "samples"]

FEATURES, CLASSES = 64, 10
FORWARD_SHARE = 1 / 3


class _Sleep(torch.autograd.Function):
    """Hands on what it gets, after so many seconds for each sample, and its gradient after twice as many."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sample_s: float) -> torch.Tensor:
        ctx.sample_s = sample_s
        time.sleep(FORWARD_SHARE * sample_s * len(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep((1 - FORWARD_SHARE) * ctx.sample_s * len(gradient))
        return gradient, None


class Layer(nn.Module):
    """A linear layer with a residual where sizes allow it, (n, wide) to (n, wide); it reads the first features only.

    Args:
        features, made: that the linear layer reads and makes.
        wide: numbers that are handed on for each sample: copies of what was made.
        sample_s: forward and backward, for each sample.
    """

    def __init__(self, features: int, made: int, wide: int, sample_s: float) -> None:
        super().__init__()
        self.features, self.copies, self.sample_s = features, wide // made, sample_s
        self.linear = nn.Linear(features, made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = x[:, : self.features]
        made = functional.relu(self.linear(read))
        if made.shape == read.shape:
            made = made + read
        handed_on = made.repeat(1, self.copies)
        if not self.training:  # evaluations are no part of what is timed
            return handed_on
        found: torch.Tensor = _Sleep.apply(handed_on, self.sample_s)
        return found


class Model(NamedTuple):
    """One of the two.

    Attributes:
        slow: layers that take their time.
        sample_s: of each of them.
        hidden: sizes of the wide layers behind them; empty for none.
        wide: numbers that a slow layer hands on for each sample.
    """

    slow: int
    sample_s: float
    hidden: tuple[int, ...]
    wide: int

    def build(self, seed: int = 0) -> nn.Sequential:
        """With the same weights for everybody."""
        torch.manual_seed(seed)
        layers: list[nn.Module] = [
            Layer(FEATURES, FEATURES, FEATURES if at == self.slow - 1 and self.hidden else self.wide, self.sample_s)
            for at in range(self.slow)
        ]
        before = FEATURES
        for size in self.hidden:
            layers.append(Layer(before, size, size, self.sample_s / 50))
            before = size
        return nn.Sequential(*layers, Head(before))


class Head(nn.Module):
    """Classes from the first features."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features
        self.linear = nn.Linear(features, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.linear(x[:, : self.features])
        return scores


MODELS = {
    "parameters": Model(slow=6, sample_s=0.0004, hidden=(1024, 1536), wide=FEATURES),
    "activations": Model(slow=8, sample_s=0.0004, hidden=(), wide=16 * 1024),
}


def samples() -> TensorDataset:
    """To train on."""
    return TASKS["digits"].train()


def heldout() -> TensorDataset:
    """To judge by."""
    return TASKS["digits"].heldout()


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of logits (n, classes) and classes (n,): the mean."""
    return functional.cross_entropy(output, target)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The share that is right."""
    return (output.argmax(-1) == target).double().mean()
