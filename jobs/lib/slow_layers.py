"""Layers that compute a little and sleep as long as an accelerator would work, longer in processes that were made slow.

folder/1234    there: process 1234 takes so many times as long, as the file says
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
    """From now on layers in this process take so many times as long; 1 is as before."""
    new = folder / f".{process}"
    new.write_text(str(factor))
    new.replace(folder / str(process))


def _factor(folder: str) -> float:
    with contextlib.suppress(OSError):
        return float((Path(folder) / str(os.getpid())).read_text())
    return 1.0


class _Sleep(torch.autograd.Function):
    """Passes its input on."""

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
    """A linear layer that takes so long for a micro-batch, forward and backward together."""

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
    """A trainer of so many equal layers, on workers that share processors: sleeping takes none.

    Args:
        seconds: of one micro-batch through one layer.
        slow: folder of ``slow_down``.
        runs: where the run's folder, of this name, will lie.
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
