"""The net and the runs of this benchmark: square matrices, as large as the state asks for, and little to compute."""

from __future__ import annotations

import json
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
    """Of a block with so many megabytes of state."""
    return round((size_mb * 1e6 / BYTES_PER_PARAMETER) ** 0.5)


def trainer(
    folder: Path,
    name: str,
    size_mb: float,
    workers: int,
    *,
    blocks: int = 2,
    resources: Mapping[str, float] | None = None,
    replay: str = "auto",
    rows: int = BATCH,
    gate: Path | None = None,
    steps: int = 0,
    checkpoint_interval_steps: int = 100_000,
    driver_grace_s: float = 60.0,
) -> raypipe.PipelineTrainer:
    """Two stages that survive failures.

    Args:
        size_mb: state of each of the blocks, in megabytes.
        workers: those that two stages do not use are spares.
        resources: of each worker.
        replay: "auto" or "off", with which all stages go back when one is lost.
        rows: of a mini-batch.
        gate: that says how many of its ``steps`` the run may do; see jobs/lib/turns.py.
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
            schedule="1f1b", checkpoint_interval_steps=checkpoint_interval_steps, replay=replay,
            driver_grace_s=driver_grace_s,
        ),
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker=dict(resources or {"CPU": 1})),
        run_config=RunConfig(name=name, storage_path=str(folder), failure_config=FailureConfig(max_failures=-1)),
    )  # fmt: skip


def events(folder: Path, decision: str) -> list[dict[str, Any]]:
    """Lines of a run's events.jsonl that tell of such a decision."""
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["decision"] == decision]


def until(done: Callable[[], bool], what: str, limit_s: float = WAIT_S) -> None:
    """Wait for it.

    Raises:
        TimeoutError: it did not come.
    """
    deadline_s = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{limit_s:g} s passed before {what}")
        time.sleep(0.01)


def bits_equal(one: str, other: str) -> bool:
    """Whether two checkpoints hold the same parameters and buffers, to the bit."""
    first, second = raypipe.load_state_dict(one), raypipe.load_state_dict(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
