"""Net of both peers: every worker has a whole model of the given state, and gradients are averaged."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

__all__ = ["Said", "data_of", "model_of", "say_step", "steps_said"]

BATCH = 8


def model_of(size_mb: float) -> tuple[nn.Module, int]:
    """Make a square layer with ``size_mb`` megabytes of state under AdamW; return it with its width."""
    width = round((size_mb * 1e6 / 12) ** 0.5)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh()), width


def data_of(width: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, width, generator=drawn), torch.randn(BATCH, generator=drawn)


def say_step(file: Path, rank: int, step: int) -> None:
    """Append a line to a file that all workers share: time, rank, process, step."""
    with file.open("a") as lines:
        lines.write(f"{time.time()} {rank} {os.getpid()} {step}\n")


class Said(NamedTuple):
    """Line that ``say_step`` has written."""

    at_s: float
    rank: int
    process: int
    step: int


def steps_said(file: Path) -> list[Said]:
    """Read all complete lines."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    parts = [line.split() for line in lines if line.endswith("\n")]
    return [Said(float(at_s), int(rank), int(process), int(step)) for at_s, rank, process, step in parts]
