"""What takes one number of samples only, or draws from a generator of its own, is refused by line or name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from raypipe.engine.capture import capture
from raypipe.errors import CaptureError

X, SEQUENCES, Y = torch.ones(2, 6), torch.ones(2, 5, 6), torch.zeros(2, dtype=torch.long)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.lstm = nn.Linear(6, 3), nn.LSTM(6, 6)
        self.own = torch.Generator().manual_seed(3)


class View(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.view(2, -1))


class Zeros(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + torch.zeros(2, 6))


class Loop(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.linear(x[row]) for row in range(len(x))])


class Time(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.lstm(x)[0][:, -1])


class State(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.lstm(x.transpose(0, 1), (torch.zeros(1, 2, 6), torch.zeros(1, 2, 6)))[0][-1])


class Generator(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + torch.randn(6, generator=self.own))


class Seeded(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x + torch.randn(6, generator=torch.Generator().manual_seed(0)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (View(), X, r'View can only take 2 samples at a time, because of .*\.py:\d+: "return .*view\(2, -1\)'),
        (Zeros(), X, r'because of .*test_fixed_sizes\.py:\d+: "return .*zeros\(2, 6\)\)"\. Micro-batches have other'),
        (Loop(), X, r'because of .*test_fixed_sizes\.py:\d+: "return .*for row in range.*loop over no samples'),
        (Time(), SEQUENCES, r"because of .*\.py:\d+: .*Without batch_first=True, nn\.LSTM, GRU and RNN take"),
        (State(), SEQUENCES, r"The initial state of nn\.LSTM, GRU and RNN has shape \(layers, samples, size\)"),
        (Generator(), X, r"draws from the torch\.Generator model\.own, whose state no stage.*without generator="),
        (Seeded(), X, r"draws from a torch\.Generator of its own.*numbers that shall not change in a buffer"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)  # fmt: skip
def test_refused_by_line_or_name(model: nn.Module, x: torch.Tensor, message: str) -> None:
    with pytest.raises(CaptureError, match=message) as error:
        capture(model, (x, Y), (0, 1), functional.cross_entropy)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


def test_a_generator_in_an_untraced_child_is_named() -> None:
    with pytest.raises(CaptureError, match=r"model\.0\.own"):
        capture(nn.Sequential(Generator(), nn.Linear(3, 3)), (X, Y), (0, 1), functional.cross_entropy)
