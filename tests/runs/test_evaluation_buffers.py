"""An evaluation leaves every buffer of training as it was, also those that a forward changes in evaluation mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from raypipe import load_state_dict
from tests.exactness import same_bits
from tests.runs.test_evaluation import EX, EY, fit

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]


class Follows(nn.Module):
    """Keeps an average of what it sees, in training and in evaluation alike, and computes with it."""

    average: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return x - self.average


class Traced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 16), Follows(16), nn.BatchNorm1d(16), nn.ReLU(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(16, 8)), Follows(8), nn.BatchNorm1d(8), nn.Linear(8, 3),
    )  # fmt: skip


@pytest.mark.parametrize("make", [_layers, Traced])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"recompute": "always"},
        {"schedule": "pipedream", "checkpoint_interval_steps": 2},
        {"schedule": "2bw", "checkpoint_interval_steps": 2},
    ],
)
def test_buffers_are_those_of_a_run_without_evaluations(make: Any, config: dict[str, Any], tmp_path: Path) -> None:
    """An asynchronous run empties its pipeline for an evaluation: the other one does so for a checkpoint."""
    plain = fit(tmp_path, 8, "plain", config, model=make())
    found = fit(
        tmp_path, 8, "evaluated", config | {"eval_interval_steps": 2}, model=make(), eval_data=TensorDataset(EX, EY)
    )
    assert [(r.loss, r.grad_norm) for r in found.records] == [(r.loss, r.grad_norm) for r in plain.records]
    ours, theirs = load_state_dict(found.checkpoint), load_state_dict(plain.checkpoint)
    assert [name for name in theirs if not same_bits(ours[name], theirs[name])] == []
    assert [bool(r.evaluation) for r in found.records] == [False, True] * 4


@pytest.mark.parametrize("make", [_layers, Traced])
def test_an_evaluation_is_that_of_a_copy_of_the_model(make: Any, tmp_path: Path) -> None:
    """What its forwards change counts for the samples behind them, as in plain PyTorch, and then no more."""
    result = fit(tmp_path, 2, "run", {"eval_interval_steps": 1}, model=make(), eval_data=TensorDataset(EX, EY))
    copy = make().eval()
    copy.load_state_dict(load_state_dict(result.checkpoint))
    with torch.no_grad():
        total = sum(
            float(nn.functional.cross_entropy(copy(x), y)) * len(x)
            for x, y in zip(EX.split(2), EY.split(2), strict=True)
        )
    assert result.metrics["eval_loss"] == pytest.approx(total / len(EX), rel=1e-6)
