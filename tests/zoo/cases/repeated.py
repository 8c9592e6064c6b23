"""Recurrent networks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.zoo.row import Rounding, Row
from tests.zoo.samples import WORDS, counted_pairs, sentences, signals

__all__ = ["ROWS", "STEPS", "per_token"]

STEPS = Rounding("the cell's weights are used at every step of time; each use is summed over the micro-batches first")


class Recurrent(nn.Module):
    """A recurrent layer between an embedding and a head."""

    def __init__(self, kind: Any, **more: Any) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(WORDS, 6), kind(6, 8, batch_first=True, **more)
        self.head = nn.Linear(16 if more.get("bidirectional") else 8, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(ids))[0])


class Cells(nn.Module):
    """A cell in a loop of Python."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.cell, self.norm, self.head = kind(4, 8), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: Any = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(self.norm(state[0] if isinstance(state, tuple) else state))


class Attended(nn.Module):
    """A sentence read by a GRU, from which its labels are told with attention: it makes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(WORDS, 8), nn.GRU(8, 8, batch_first=True)
        self.look, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        read = self.body(self.embed(input_ids))[0]
        told = self.look(read, read, read, need_weights=False)[0]
        return functional.cross_entropy(self.head(told).flatten(0, 1), labels.flatten())


def per_token(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


row = partial(Row, "recurrent")
_TOKENS = (counted_pairs(-100), per_token, "cross_entropy per token", "tokens, labels padded by -100")
_SIGNALS = (signals, functional.cross_entropy, "cross_entropy", "signals")
ROWS = (
    row("LSTM, 2 layers, dropout", lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.2), *_TOKENS),
    row("LSTM, both directions", lambda: Recurrent(nn.LSTM, bidirectional=True), *_TOKENS),
    row("LSTM with a projection", lambda: Projected(), *_TOKENS),
    row("GRU, 2 layers, both directions, dropout",
        lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True, dropout=0.1), *_TOKENS),
    row("RNN, relu", lambda: Recurrent(nn.RNN, nonlinearity="relu"), *_TOKENS),
    row("GRU with attention", Attended, partial(sentences, padded=True), None, "its own",
        "sentences, labels padded by -100"),
    row("LSTMCell in a loop", lambda: Cells(nn.LSTMCell), *_SIGNALS, STEPS),
    row("GRUCell in a loop", lambda: Cells(nn.GRUCell), *_SIGNALS, STEPS),
)  # fmt: skip
"""Recurrent networks."""


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(WORDS, 6), nn.LSTM(6, 8, batch_first=True, proj_size=4)
        self.head = nn.Linear(4, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(ids))[0])
