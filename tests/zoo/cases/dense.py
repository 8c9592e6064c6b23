"""Perceptrons and what else is made of matrices."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from tests import nets
from tests.zoo.row import Row
from tests.zoo.samples import classes, numbers, thirds, vectors

__all__ = ["ROWS", "perceptron"]


def perceptron(out: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, out))


class Variational(nn.Module):
    """A VAE: draws by the reparametrisation, returns what its loss needs."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(6, 5), nn.SiLU(), nn.Linear(5, 4))
        self.decode = nn.Sequential(nn.Linear(2, 5), nn.SiLU(), nn.Linear(5, 6))

    def forward(self, x: torch.Tensor) -> Any:
        mean, log_variance = self.encode(x).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * (0.5 * log_variance).exp() if self.training else mean
        return {"x": self.decode(drawn), "mean": mean, "log_variance": log_variance}


def evidence(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    mean, log_variance = output["mean"], output["log_variance"]
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
    return functional.mse_loss(output["x"], target) + 0.1 * divergence


class Bag(nn.Module):
    """Bags of embeddings, and the wide part of wide-and-deep."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.wide = nn.EmbeddingBag(32, 6, mode="mean"), nn.EmbeddingBag(32, 5, mode="sum")
        self.deep = nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, 5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.deep(self.bag(ids)) + self.wide(ids)


def themselves(count: int) -> TensorDataset:
    inputs, _ = numbers(count).tensors
    return TensorDataset(inputs, inputs.clone())


def bags(count: int) -> TensorDataset:
    ids, targets = classes(count).tensors
    return TensorDataset(ids, targets[:, 0].clone())


class Reversed(torch.autograd.Function):
    """Identity, whose gradient is multiplied by -share, as in adversarial adaptation of domains."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, share: float) -> torch.Tensor:
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return -ctx.share * gradient, None


class Quantized(torch.autograd.Function):
    """Nearest of 9 steps of a learned size, and its number; the gradient goes straight through where no end cuts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        number = (x / size).round().clamp(-4, 4)
        ctx.save_for_backward(x, size, number)
        index = number.long()
        ctx.mark_non_differentiable(index)
        return number * size, index

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, size, number = ctx.saved_tensors
        inside = ((x / size).abs() < 4).to(x.dtype)
        return gradient * inside, (gradient * (number - inside * x / size)).sum(0)


class WithFunctions(nn.Module):
    """Calls functions with a backward of their own between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.steps = nn.Embedding(9, 8)
        self.size = nn.Parameter(torch.full((8,), 0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, index = Quantized.apply(nets.Double.apply(torch.tanh(self.first(x))), self.size)
        x = self.second(x + self.steps(index + 4).mean(1))
        return self.last(torch.tanh(x) + Reversed.apply(x, 0.5))


row = partial(Row, "perceptrons")
ROWS = (
    row("MLP, nn.Sequential", perceptron, vectors, functional.cross_entropy, "cross_entropy", "vectors", stages=3),
    row("MLP with every dropout", nets.dropout_sequential, thirds(vectors), functional.cross_entropy,
        "cross_entropy", "vectors", stages=3),
    row("custom autograd function", nets.custom_function, thirds(vectors), functional.cross_entropy,
        "cross_entropy", "vectors"),
    row("custom autograd functions, traced", WithFunctions, vectors, functional.cross_entropy, "cross_entropy",
        "vectors", stages=3),
    row("variational autoencoder", Variational, themselves, evidence, "mse + KL", "vectors, target = input"),
    row("EmbeddingBag, wide and deep", Bag, bags, functional.cross_entropy, "cross_entropy", "tokens"),
)  # fmt: skip
"""Matrices."""
