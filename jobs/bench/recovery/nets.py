"""Net and runs of this benchmark: square matrices with a given state size, and little computation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch import nn
from torch.utils.data import TensorDataset

import raypipe
from jobs.lib.turns import gated
from raypipe.engine.io.run_files import EVENTS, read_events
from raypipe.engine.io.storage import Place

__all__ = [
    "BATCH", "BYTES_PER_PARAMETER", "MICROBATCHES", "SAMPLES", "WAIT_S", "bits_equal", "events", "trainer", "until",
    "width_of",
]  # fmt: skip

BYTES_PER_PARAMETER = 12
"""Float32, and AdamW's two moments."""
WAIT_S = 120.0
BATCH, MICROBATCHES, SAMPLES = 8, 4, 32


class Block(nn.Module):
    """One square matrix."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


def square(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x[:, 0] - y).square().mean()


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-4, fused=True)


def width_of(size_mb: float) -> int:
    """Compute the width of a block with ``size_mb`` megabytes of state."""
    return round((size_mb * 1e6 / BYTES_PER_PARAMETER) ** 0.5)


def trainer(
    folder: Path,
    name: str,
    size_mb: float,
    workers: int,
    *,
    blocks: int = 2,
    resources: Mapping[str, float] | None = None,
    rows: int = BATCH,
    gate: Path | None = None,
    steps: int = 0,
    checkpoint_interval_steps: int = 100_000,
    driver_grace_s: float = 60.0,
) -> raypipe.PipelineTrainer:
    """Make a trainer of two stages that survive failures.

    Args:
        size_mb: state of each of the blocks, in megabytes.
        workers: number of workers; those beyond two are spares.
        resources: resources of each worker.
        rows: rows of a mini-batch.
        gate: file with the number of steps that the run may do (jobs/lib/turns.py); None without a limit.
        steps: number of steps of the run, needed with a gate.
        checkpoint_interval_steps, driver_grace_s: see raypipe.PipelineConfig.
    """
    width = width_of(size_mb)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(blocks)))
    made = torch.Generator().manual_seed(1)
    samples = SAMPLES // BATCH * rows
    data: Any = TensorDataset(torch.randn(samples, width, generator=made), torch.randn(samples, generator=made))
    if gate is not None:
        data = gated(data, gate, rows, steps)
    return raypipe.PipelineTrainer(
        model,
        loss_fn=square,
        optimizer=adamw,
        train_data=data,
        pipeline=raypipe.PipelineConfig(
            num_stages=2, minibatch_size=rows, num_microbatches=MICROBATCHES, partitioner="parameters",
            schedule="1f1b", checkpoint_interval_steps=checkpoint_interval_steps,
            driver_grace_s=driver_grace_s,
        ),
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker=dict(resources or {"CPU": 1})),
        run_config=RunConfig(name=name, storage_path=str(folder), failure_config=FailureConfig(max_failures=-1)),
    )  # fmt: skip


def events(folder: Path, decision: str) -> list[dict[str, Any]]:
    """Read the events of a running run with this decision; a line that is being written is left out."""
    if not (folder / EVENTS).exists():
        return []
    return [event for event in read_events(Place.of(folder)) if event["decision"] == decision]


def until(done: Callable[[], bool], what: str, limit_s: float = WAIT_S) -> None:
    """Wait until ``done`` returns True.

    Args:
        what: condition in words, for the message.

    Raises:
        TimeoutError: ``limit_s`` seconds passed before.
    """
    deadline_s = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{limit_s:g} s passed before {what}")
        time.sleep(0.01)


def bits_equal(one: str, other: str) -> bool:
    """Return True if two checkpoints hold equal parameters and buffers, to the bit."""
    first, second = raypipe.load_state_dict(one), raypipe.load_state_dict(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
