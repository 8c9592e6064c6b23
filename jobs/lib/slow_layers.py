"""Layers that compute a little and sleep for the time of an accelerator; processes can be slowed down while they run.

folder/1234    file with the factor by which process 1234 sleeps longer; without the file it is 1
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import raypipe

__all__ = ["SlowLayer", "slow_down", "trainer_of_layers"]

WIDTH = 8
FORWARD_SHARE = 1 / 3


def slow_down(folder: Path, process: int, factor: float) -> None:
    """Make layers in a process take ``factor`` times as long from now on; 1 is as before."""
    new = folder / f".{process}"
    new.write_text(str(factor))
    new.replace(folder / str(process))


def _factor(folder: str) -> float:
    with contextlib.suppress(OSError):
        return float((Path(folder) / str(os.getpid())).read_text())
    return 1.0


class _Sleep(torch.autograd.Function):
    """Operation that sleeps in forward and backward, and returns its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float, folder: str) -> torch.Tensor:
        ctx.seconds, ctx.folder = seconds, folder
        time.sleep(FORWARD_SHARE * seconds * _factor(folder))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep((1 - FORWARD_SHARE) * ctx.seconds * _factor(ctx.folder))
        return gradient, None, None


class SlowLayer(nn.Module):
    """Linear layer that sleeps ``seconds`` for a micro-batch, forward and backward together.

    Args:
        folder: folder of ``slow_down``.
    """

    def __init__(self, seconds: float, folder: Path) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds, self.folder = seconds, str(folder)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(torch.tanh(self.linear(x)), self.seconds, self.folder)


def _adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(named, lr=1e-3)


def trainer_of_layers(
    layers: int,
    seconds: float,
    slow: Path,
    runs: Path,
    name: str,
    failures: Any,
    cpus: float = 0.1,
    scaling: Any = None,
    **pipeline: Any,
) -> raypipe.PipelineTrainer:
    """Make a trainer of equal layers, on workers that share processors: sleeping takes no processor time.

    Args:
        seconds: time of one micro-batch through one layer.
        slow: folder of ``slow_down``.
        runs: parent of the run's folder, which has this name.
        failures: a ray.train.FailureConfig.
        scaling: a ray.train.ScalingConfig; None for a worker of ``cpus`` for each stage.
        pipeline: fields of PipelineConfig.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(SlowLayer(seconds, slow) for _ in range(layers)))
    samples = torch.randn(256, WIDTH)
    each = SimpleNamespace(num_workers=pipeline["num_stages"], resources_per_worker={"CPU": cpus})
    return raypipe.PipelineTrainer(
        model,
        loss_fn=nn.functional.mse_loss,
        optimizer=_adam,
        train_data=TensorDataset(samples, samples.roll(1, 0)),
        pipeline=raypipe.PipelineConfig(**pipeline),
        scaling_config=scaling or each,
        run_config=SimpleNamespace(name=name, storage_path=str(runs), failure_config=failures),
    )
