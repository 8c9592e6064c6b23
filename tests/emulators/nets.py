"""Models that are lists of layers, with data: a cut is the position of the child that begins a stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

__all__ = ["NETS", "Net", "frozen_first"]

WORDS = 13


@dataclass(frozen=True)
class Net:
    """A model, where to cut it, and what to train it on.

    Attributes:
        build: makes it; ``model`` seeds that.
        cuts: by number of stages, the children that begin stages 1, 2, ...
        data: number of samples -> dataset of (input, target).
    """

    build: Callable[[], nn.Sequential]
    cuts: dict[int, tuple[int, ...]]
    data: Callable[[int], TensorDataset]
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def model(self) -> nn.Sequential:
        """The same initial weights each time."""
        torch.manual_seed(21)
        return self.build()


class Tokens(nn.Module):
    """Word and position embeddings: (b, t) -> (b, t, width)."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.word = nn.Embedding(WORDS, width)
        self.position = nn.Parameter(torch.randn(context, width) / 10)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.word(words) + self.position


class Block(nn.Module):
    """Attention and MLP, both behind a norm and beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.between(x))))


def _mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 8), nn.GELU(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3)
    )


def _cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.GELU(),
        nn.Conv2d(4, 5, 3, padding=1, bias=False), nn.BatchNorm2d(5), nn.GELU(),
        nn.Conv2d(5, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3),
    )  # fmt: skip


def _transformer() -> nn.Sequential:
    return nn.Sequential(Tokens(5, 8), Block(8), Block(8), nn.LayerNorm(8), nn.Linear(8, WORDS))


def _vectors(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(22)
    return TensorDataset(torch.randn(count, 6, generator=drawn), torch.randint(0, 3, (count,), generator=drawn))


def _images(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(23)
    return TensorDataset(torch.randn(count, 2, 6, 6, generator=drawn), torch.randint(0, 3, (count,), generator=drawn))


def _texts(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(24)
    words = torch.randint(0, WORDS, (count, 6), generator=drawn)
    return TensorDataset(words[:, :-1].clone(), words[:, 1:].clone())


def _token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


NETS = {
    "mlp": Net(_mlp, {1: (), 2: (3,), 3: (2, 4), 4: (2, 4, 6)}, _vectors, functional.cross_entropy),
    "cnn": Net(_cnn, {1: (), 2: (4,), 3: (3, 6), 4: (3, 6, 9)}, _images, functional.cross_entropy),
    "transformer": Net(_transformer, {1: (), 2: (2,), 3: (1, 3), 4: (1, 2, 3)}, _texts, _token_loss),
}


def frozen_first(name: str, stages: int) -> Net:
    """A net of NETS of which the first of so many stages learns nothing."""
    net = NETS[name]

    def build() -> nn.Sequential:
        made = net.build()
        made[: net.cuts[stages][0]].requires_grad_(requires_grad=False)
        return made

    return replace(net, build=build)
