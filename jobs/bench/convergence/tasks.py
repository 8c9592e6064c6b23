"""Tasks of ``bench/convergence``: models of eight parts, data, learning rates to try, and the loss to reach."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.nn import functional

from jobs.train.corpus import bigram_entropy_nats, corpus_texts
from jobs.train.lm import VOCABULARY, Block, loss_fn

__all__ = ["PARTS", "TASKS", "Batch", "Task"]

Batch = tuple[torch.Tensor, torch.Tensor]
PARTS = 8
CORPUS_BYTES = 2_000_000


@dataclass(frozen=True)
class Task:
    """Model, data and measure of a task.

    Attributes:
        build: makes the model of PARTS parts, one per stage of a pipeline of eight.
        data: training inputs and targets, then those held out.
        batch, num_updates: samples per update, and updates of a run.
        rates: learning rates to try first, by optimizer, in ascending order.
        chance: held-out loss of a uniform prediction, in nats; a diverged run counts as that.
        enough: held-out loss that exact training must reach.
    """

    build: Callable[[], nn.Sequential]
    data: Callable[[], tuple[Batch, Batch]]
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    batch: int
    num_updates: int
    rates: dict[str, tuple[float, ...]]
    chance: float
    enough: Callable[[], float]

    def batches(self, seed: int) -> Iterator[Batch]:
        """Yield the batches of a run, epochs in a new order each."""
        (inputs, targets), _ = self.data()
        drawn = torch.Generator().manual_seed(seed)
        count, left = 0, iter(())
        while count < self.num_updates:
            rows = next(left, None)
            if rows is None:
                order = torch.randperm(len(inputs), generator=drawn)
                left = iter(order[: len(order) // self.batch * self.batch].split(self.batch))
                continue
            yield inputs[rows], targets[rows]
            count += 1

    @torch.no_grad()
    def heldout_loss(self, model: nn.Module) -> float:
        """Compute the held-out loss in nats; ``chance`` if it is not finite or larger."""
        _, (inputs, targets) = self.data()
        loss = float(self.loss_fn(model(inputs), targets))
        return min(loss, self.chance) if math.isfinite(loss) else self.chance


class Residual(nn.Module):
    """Pre-norm residual layer; x is (batch, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.relu(self.linear(self.norm(x)))


class Embedding(nn.Module):
    """Bytes (batch, context) to (batch, context, width), with learned positions."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.byte(tokens) + self.position


def _digits_net() -> nn.Sequential:
    hidden = [Residual(48) for _ in range(PARTS - 2)]
    return nn.Sequential(nn.Linear(64, 48), *hidden, nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 10)))


def _byte_model(context: int, width: int) -> nn.Sequential:
    blocks = [Block(width, heads=4) for _ in range(PARTS - 2)]
    head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False))
    return nn.Sequential(Embedding(context, width), *blocks, head)


@cache
def _digits() -> tuple[Batch, Batch]:
    """Load scikit-learn's 1797 images of 8 x 8; every third is held out."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels, dtype=torch.int64)
    held = torch.arange(len(inputs)) % 3 == 0
    return (inputs[~held], targets[~held]), (inputs[held], targets[held])


@cache
def _text(context: int, heldout_rows: int) -> tuple[Batch, Batch]:
    found = []
    for text in corpus_texts(CORPUS_BYTES):
        codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        rows = (len(codes) - 1) // context
        inputs, targets = (codes[first : first + rows * context].view(rows, context) for first in (0, 1))
        found.append((inputs, targets))
    held = torch.arange(heldout_rows) * (len(found[1][0]) // heldout_rows)
    return found[0], (found[1][0][held], found[1][1][held])


def _below_bigrams(share: float) -> Callable[[], float]:
    """Return the loss after that share of the way from a uniform prediction to the bigram entropy of the text."""
    chance = math.log(VOCABULARY)
    return lambda: chance - share * (chance - bigram_entropy_nats(corpus_texts(CORPUS_BYTES)[1]))


ADAPTIVE, MUON = (0.005, 0.01), (0.01, 0.02)
TASKS = {
    "digits": Task(
        build=_digits_net,
        data=_digits,
        loss_fn=functional.cross_entropy,
        batch=32,
        num_updates=600,
        rates={"sgd": (0.05, 0.1), "adamw": ADAPTIVE, "nadam": ADAPTIVE, "muon": MUON},
        chance=math.log(10),
        enough=lambda: 0.25,
    ),
    "text": Task(
        build=lambda: _byte_model(32, 32),
        data=lambda: _text(32, 256),
        loss_fn=loss_fn,
        batch=8,
        num_updates=1000,
        rates={"sgd": (0.2, 0.5), "adamw": ADAPTIVE, "nadam": ADAPTIVE, "muon": MUON},
        chance=math.log(VOCABULARY),
        enough=_below_bigrams(0.7),
    ),
    "gpt": Task(
        build=lambda: _byte_model(64, 64),
        data=lambda: _text(64, 256),
        loss_fn=loss_fn,
        batch=4,
        num_updates=1000,
        rates={"sgd": (0.2, 0.5), "adamw": ADAPTIVE, "nadam": ADAPTIVE, "muon": MUON},
        chance=math.log(VOCABULARY),
        enough=_below_bigrams(0.8),
    ),
}
