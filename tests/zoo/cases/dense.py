"""Perceptrons and what else is made of matrices."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests import nets
from tests.zoo.row import Row
from tests.zoo.samples import classes, numbers, pairs_of, vectors

__all__ = ["ROWS", "perceptron"]


def perceptron(out: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, out))


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(6, 5), nn.SiLU(), nn.Linear(5, 2))
        self.decode = nn.Sequential(nn.Linear(2, 5), nn.SiLU(), nn.Linear(5, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


class Variational(Autoencoder):
    """A VAE: draws by the reparametrisation, returns what its loss needs."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(6, 5), nn.SiLU(), nn.Linear(5, 4))

    def forward(self, x: torch.Tensor) -> Any:
        mean, log_variance = self.encode(x).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * (0.5 * log_variance).exp() if self.training else mean
        return {"x": self.decode(drawn), "mean": mean, "log_variance": log_variance}


def evidence(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    mean, log_variance = output["mean"], output["log_variance"]
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
    return functional.mse_loss(output["x"], target) + 0.1 * divergence


class Mixer(nn.Module):
    """MLP-Mixer: over tokens, then over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 6)
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(4))
        self.tokens = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.channels = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(6, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for i in range(2):
            x = x + self.tokens[i](self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + self.drop(functional.gelu(self.channels[i](self.norms[2 * i + 1](x))))
        return self.head(x)


class Experts(nn.Module):
    """Four experts, of which every sample takes its best two: top-k and gather, no loop over experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.into, self.out = nn.Parameter(torch.randn(4, 6, 8) / 3), nn.Parameter(torch.randn(4, 8, 6) / 3)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        each = torch.einsum("bi,eio->beo", x, self.into).relu()
        each = torch.einsum("beo,eoi->bei", each, self.out)
        picked = each.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 6))
        return self.head(x + (picked * weights.unsqueeze(-1)).sum(1))


class Bag(nn.Module):
    """Bags of embeddings, and the wide part of wide-and-deep."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.wide = nn.EmbeddingBag(32, 6, mode="mean"), nn.EmbeddingBag(32, 5, mode="sum")
        self.deep = nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, 5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.deep(self.bag(ids)) + self.wide(ids)


class Fourier(nn.Module):
    """Sines of fixed random directions, and a complex product: a small NeRF."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("directions", torch.randn(6, 8))
        self.first, self.second = nn.Linear(16, 8), nn.Linear(8 + 16, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = x @ self.directions
        features = torch.cat([angles.sin(), angles.cos()], -1)
        hidden = functional.softplus(self.first(features))
        return self.head(functional.silu(self.second(torch.cat([hidden, features], -1))))


def first_token(count: int) -> Any:
    ids, targets = classes(count).tensors
    return torch.utils.data.TensorDataset(ids, targets[:, 0].clone())


_itself = partial(torch.clone)
row = partial(Row, "perceptrons")
ROWS = (
    row("MLP, nn.Sequential", perceptron, vectors, functional.cross_entropy, "cross_entropy", "vectors", stages=3),
    row("MLP, nn.Module", lambda: nets.Mlp((6, 9, 8, 7, 5)), vectors, functional.cross_entropy, "cross_entropy",
        "vectors", stages=3),
    row("MLP with every dropout", nets.dropout_sequential, lambda n: nets_vectors(n), functional.cross_entropy,
        "cross_entropy", "vectors", stages=3),
    row("two towers with BatchNorm1d", nets.Towers, lambda n: nets_vectors(n), functional.cross_entropy,
        "cross_entropy", "vectors"),
    row("custom autograd function", nets.custom_function, lambda n: nets_vectors(n), functional.cross_entropy,
        "cross_entropy", "vectors"),
    row("MLP with a dict as output", nets.ManyOutputs, lambda n: nets_vectors(n), nets.dict_loss,
        "cross_entropy + mean of squares", "vectors"),
    row("autoencoder", Autoencoder, pairs_of(numbers, _itself), nn.MSELoss(), "MSELoss", "vectors, target = input"),
    row("variational autoencoder", Variational, pairs_of(numbers, _itself), evidence, "mse + KL",
        "vectors, target = input"),
    row("MLP-Mixer", Mixer, classes, lambda o, t: functional.cross_entropy(o.flatten(0, 1), t.flatten()),
        "cross_entropy per token", "tokens", stages=3),
    row("mixture of experts, top 2", Experts, vectors, functional.cross_entropy, "cross_entropy", "vectors"),
    row("EmbeddingBag, wide and deep", Bag, first_token, functional.cross_entropy, "cross_entropy", "tokens"),
    row("Fourier features (NeRF)", Fourier, numbers, functional.smooth_l1_loss, "smooth_l1_loss", "vectors"),
)  # fmt: skip
"""Matrices."""


def nets_vectors(count: int) -> Any:
    """For the nets of tests/nets.py, which know three classes."""
    inputs, targets = vectors(count).tensors
    return torch.utils.data.TensorDataset(inputs, targets % 3)
