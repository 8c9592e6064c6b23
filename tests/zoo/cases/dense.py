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


row = partial(Row, "perceptrons")
ROWS = (
    row("MLP, nn.Sequential", perceptron, vectors, functional.cross_entropy, "cross_entropy", "vectors", stages=3),
    row("MLP with every dropout", nets.dropout_sequential, thirds(vectors), functional.cross_entropy,
        "cross_entropy", "vectors", stages=3),
    row("custom autograd function", nets.custom_function, thirds(vectors), functional.cross_entropy,
        "cross_entropy", "vectors"),
    row("variational autoencoder", Variational, themselves, evidence, "mse + KL", "vectors, target = input"),
    row("EmbeddingBag, wide and deep", Bag, bags, functional.cross_entropy, "cross_entropy", "tokens"),
)  # fmt: skip
"""Matrices."""
