"""Normalisations, weights with several uses, and weights that stay as they are."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests import nets
from tests.models import token_loss
from tests.models import tokens as next_tokens
from tests.zoo.row import Rounding, Row
from tests.zoo.samples import images, thirds, vectors

__all__ = ["ROWS"]

USES = Rounding("weights with several uses; each use is summed over the micro-batches first, then the uses")


def convolved(norm: Any) -> nn.Module:
    """Two convolutions, each with a norm of six channels behind it."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), norm(), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), norm(), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 5),
    )  # fmt: skip


class Traced(nn.Module):
    """The same as one module, which is traced."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class Spectral(nn.Module):
    """Spectral norms, whose power iterations keep buffers."""

    def __init__(self) -> None:
        super().__init__()
        norm = torch.nn.utils.parametrizations.spectral_norm
        self.one, self.two, self.head = norm(nn.Linear(6, 8)), norm(nn.Linear(8, 8)), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(functional.leaky_relu(self.two(functional.leaky_relu(self.one(x)))))


class Handmade(nn.Module):
    """A norm with running averages that forward itself writes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 5)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.seen += 1
        return self.two(functional.gelu(x - self.mean))


def still_norms() -> nn.Module:
    """A backbone that is frozen, its BatchNorm in evaluation mode for good."""

    class Still(nn.BatchNorm2d):
        def train(self, mode: bool = True) -> nn.Module:
            return super().train(False)

    model = Traced(convolved(lambda: Still(6)))
    for parameter in model.body[:5].parameters():
        parameter.requires_grad_(False)
    return model


class Recomputed(nn.Module):
    """Blocks that compute their forward again in the backward, dropout in them."""

    def __init__(self, dropout: float, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant  # None: nothing is recomputed
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Dropout(dropout), nn.Linear(12, 8)) for _ in range(3)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x) if self.reentrant is None else x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def weight_normed() -> nn.Module:
    norm = torch.nn.utils.weight_norm
    return nn.Sequential(norm(nn.Linear(6, 8)), nn.Tanh(), norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 5))


_IMAGES = (images, functional.cross_entropy, "cross_entropy", "images")
_VECTORS = (vectors, functional.cross_entropy, "cross_entropy", "vectors")
_THREE = (thirds(vectors), functional.cross_entropy, "cross_entropy", "vectors")
_WORDS = (next_tokens, token_loss, "cross_entropy per token", "tokens")
norm = partial(Row, "normalisations")
use = partial(Row, "shared and frozen")
again = partial(Row, "recomputed")
ROWS = (
    norm("InstanceNorm with running averages",
         lambda: convolved(lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True)), *_IMAGES),
    norm("BatchNorm in nn.Sequential", lambda: convolved(lambda: nn.BatchNorm2d(6)), *_IMAGES, stages=3),
    norm("BatchNorm, momentum=None", lambda: convolved(lambda: nn.BatchNorm2d(6, momentum=None)), *_IMAGES),
    norm("BatchNorm, momentum=None, traced", lambda: Traced(convolved(lambda: nn.BatchNorm2d(6, momentum=None))),
         *_IMAGES),
    norm("spectral_norm", Spectral, *_VECTORS),
    norm("weight_norm of old", weight_normed, *_VECTORS),
    norm("running average by hand", Handmade, *_VECTORS),
    use("one module three times, nn.Sequential", nets.tied_sequential, *_THREE, USES, stages=3),
    use("language model, tied", nets.TiedLanguageModel, *_WORDS, USES, stages=3),
    use("language model, a buffer for all stages", nets.untied, *_WORDS, stages=3),
    use("frozen below", lambda: nets.frozen(nets.Mlp(), "layers.0", "layers.1"), *_THREE, stages=3),
    use("frozen in the middle", lambda: nets.frozen(nets.sequential(), "2", "4"), *_THREE, stages=3),
    use("frozen on top", lambda: nets.frozen(nets.Mlp(), "layers.2", "layers.3"), *_THREE, stages=3),
    use("frozen backbone, BatchNorm in evaluation mode", still_norms, *_IMAGES),
    again("checkpoint(use_reentrant=False), dropout", lambda: Recomputed(0.2, False), *_VECTORS,
          twin=lambda: Recomputed(0.2)),
    again("checkpoint(use_reentrant=True), dropout", lambda: Recomputed(0.2, True), *_VECTORS,
          twin=lambda: Recomputed(0.2)),
)  # fmt: skip
"""Norms, ties, frozen weights, recomputation."""
