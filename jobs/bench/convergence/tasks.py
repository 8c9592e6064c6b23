"""The two tasks of ``bench/convergence``: models cut into four, data, and what counts as having arrived."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from jobs.train.corpus import bigram_entropy_nats, build_corpus
from jobs.train.lm import VOCABULARY, Block, loss_fn

__all__ = ["TASKS", "Task"]

CONTEXT, WIDTH, CORPUS_BYTES = 32, 48, 400_000
HELD_OUT_ROWS = 512
EPOCH_MULTIPLE = 128
"""Samples of the largest mini-batch of any policy."""


@dataclass(frozen=True)
class Task:
    """A model to train, and how to judge it.

    Attributes:
        cuts: children that begin stages 1, 2, 3.
        learning_rates: by optimizer, what exact training is tried with.
        chance: (loss, accuracy) of knowing nothing, for a run that did not end.
        measure, enough: what exact training must reach, see ``arrived``.
        arrived: (held-out loss, accuracy) -> the value of ``measure``.
    """

    build: Callable[[], nn.Sequential]
    cuts: tuple[str, ...]
    train: Callable[[], TensorDataset]
    heldout: Callable[[], TensorDataset]
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    learning_rates: dict[str, tuple[float, ...]]
    num_updates: int
    chance: tuple[float, float]
    measure: str
    enough: float
    arrived: Callable[[float, float], float]

    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Held-out loss (nats) and accuracy."""
        inputs, targets = self.heldout().tensors
        with torch.no_grad():
            logits = model.eval()(inputs)
        accuracy = (logits.argmax(-1) == targets.long()).float().mean()
        return float(self.loss_fn(logits, targets)), float(accuracy)


class Embedding(nn.Module):
    """Bytes (b, context) to (b, context, width), positions added."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.byte(tokens.long()) + self.position


def _digits_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)
    )


def _text_net() -> nn.Sequential:
    blocks = [Block(WIDTH, heads=4) for _ in range(3)]
    return nn.Sequential(Embedding(CONTEXT, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))


@cache
def _digits() -> tuple[TensorDataset, TensorDataset]:
    """1797 images of 8 x 8; every third is held out."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels, dtype=torch.int64)
    held = torch.arange(len(inputs)) % 3 == 0
    return _whole(inputs[~held], targets[~held]), TensorDataset(inputs[held], targets[held])


def _whole(inputs: torch.Tensor, targets: torch.Tensor) -> TensorDataset:
    """Without a remainder for any policy, so that an epoch has the same updates for all."""
    count = len(inputs) - len(inputs) % EPOCH_MULTIPLE
    return TensorDataset(inputs[:count], targets[:count])


@cache
def _text() -> tuple[TensorDataset, TensorDataset, float]:
    """Rows of bytes and next bytes to train on and held out, and the bigram entropy of the latter."""
    with tempfile.TemporaryDirectory(prefix="bench-convergence-") as folder:
        corpus = build_corpus(folder, context=CONTEXT, max_bytes=CORPUS_BYTES)
    found = []
    for text in (corpus.train_text, corpus.heldout_text):
        codes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = (len(codes) - 1) // CONTEXT
        tokens, targets = (codes[first : first + rows * CONTEXT].view(rows, CONTEXT) for first in (0, 1))
        found.append((tokens.clone(), targets.clone()))
    held = TensorDataset(*(t[:HELD_OUT_ROWS] for t in found[1]))
    return _whole(*found[0]), held, bigram_entropy_nats(corpus.heldout_text)


def _excess_lost(loss: float, accuracy: float) -> float:
    """Share of the way from knowing nothing (ln 256) down to the bigram entropy of the held-out text."""
    floor = _text()[2]
    return (math.log(VOCABULARY) - loss) / (math.log(VOCABULARY) - floor)


TASKS = {
    "digits": Task(
        build=_digits_net,
        cuts=("2", "4", "6"),
        train=lambda: _digits()[0],
        heldout=lambda: _digits()[1],
        loss_fn=functional.cross_entropy,
        learning_rates={"sgd": (0.0125, 0.025, 0.05, 0.1, 0.2), "adamw": (1e-3, 3e-3, 1e-2, 3e-2)},
        num_updates=864,
        chance=(math.log(10), 0.1),
        measure="accuracy",
        enough=0.95,
        arrived=lambda loss, accuracy: accuracy,
    ),
    "text": Task(
        build=_text_net,
        cuts=("1", "2", "3"),
        train=lambda: _text()[0],
        heldout=lambda: _text()[1],
        loss_fn=loss_fn,
        learning_rates={"sgd": (0.025, 0.05, 0.1, 0.2, 0.4), "adamw": (1e-3, 3e-3, 1e-2, 3e-2)},
        num_updates=240,
        chance=(math.log(VOCABULARY), 1 / VOCABULARY),
        measure="share of excess loss lost",
        enough=0.6,
        arrived=_excess_lost,
    ),
}
