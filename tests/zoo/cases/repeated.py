"""Recurrent networks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.operation_nets import Recurrent
from tests.operations import sequences
from tests.zoo.row import Rounding, Row
from tests.zoo.samples import signals

__all__ = ["ROWS", "STEPS"]

STEPS = Rounding("the cell's weights are used at every step of time; each use is summed over the micro-batches first")


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


row = partial(Row, "recurrent")
_SEQUENCES = (sequences, functional.cross_entropy, "cross_entropy", "sequences")
_SIGNALS = (signals, functional.cross_entropy, "cross_entropy", "signals")
ROWS = (
    row("LSTM, 2 layers, dropout", lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.2), *_SEQUENCES),
    row("LSTM, both directions", lambda: Recurrent(nn.LSTM, bidirectional=True), *_SEQUENCES),
    row("LSTM with a projection", lambda: Recurrent(nn.LSTM, proj_size=4), *_SEQUENCES),
    row("GRU, 2 layers, dropout", lambda: Recurrent(nn.GRU, num_layers=2, dropout=0.1), *_SEQUENCES),
    row("RNN, relu", lambda: Recurrent(nn.RNN, nonlinearity="relu"), *_SEQUENCES),
    row("LSTMCell in a loop", lambda: Cells(nn.LSTMCell), *_SIGNALS, STEPS),
    row("GRUCell in a loop", lambda: Cells(nn.GRUCell), *_SIGNALS, STEPS),
)  # fmt: skip
"""Recurrent networks."""
