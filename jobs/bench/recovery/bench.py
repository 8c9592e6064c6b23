"""What the loss of a stage costs: from the fault to the end of the first new step, less one undisturbed step.

    warm    a spare worker waits, with torch and the optimizer imported
    cold    no spare: a new process is started

Two stages on this machine, AdamW, a state (parameters and moments) of the given size on each. Stages are killed in the
middle of a run, the first and the second in turns; each trial waits until the spare is back.

    sigkill_seconds_warm, _cold     median over trials, by size of the state; _max is the largest
    redone_steps                    steps that were done again, the mean over all trials
    equal                           1: parameters are those of an undisturbed run, to the bit
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch import nn
from torch.utils.data import TensorDataset

import raypipe
from jobs.lib import common
from jobs.lib.common import median

LAYOUT: dict[str, str] = {
    "warm, s": r"sigkill_seconds_warm_(\d+mb)",
    "largest, s": r"sigkill_seconds_warm_max_(\d+mb)",
    "cold, s": r"sigkill_seconds_cold_(\d+mb)",
    "undisturbed step, s": r"step_seconds_(\d+mb)",
}
TARGETS: dict[str, str] = {
    r"equal": ">= 1",
    r"sigkill_seconds_warm_10mb": "<= 1.0",
    r"sigkill_seconds_warm_96mb": "<= 1.5",
}
BYTES_PER_PARAMETER = 12  # float32, and AdamW's two moments
WAIT_S = 120.0
BATCH = 8


class Settings(NamedTuple):
    """How much is measured; sizes are megabytes of state per stage."""

    sizes_mb: tuple[int, ...] = (10, 96, 500)
    trials: int = 10


QUICK = Settings((10,), 2)


class Block(nn.Module):
    """One square matrix: as many parameters as the state asks for, and little to compute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


def square(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x[:, 0] - y).square().mean()


def adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-4, fused=True)


def trainer(folder: Path, name: str, size_mb: int, workers: int) -> raypipe.PipelineTrainer:
    """Two stages of one block each."""
    width = round((size_mb * 1e6 / BYTES_PER_PARAMETER) ** 0.5)
    torch.manual_seed(0)
    model = nn.Sequential(Block(width), Block(width))
    made = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(4 * BATCH, width, generator=made), torch.randn(4 * BATCH, generator=made))
    return raypipe.PipelineTrainer(
        model,
        loss_fn=square,
        optimizer=adamw,
        train_data=data,
        pipeline=raypipe.PipelineConfig(
            num_stages=2, minibatch_size=BATCH, num_microbatches=4, partitioner="parameters", schedule="1f1b",
            checkpoint_interval_steps=100_000,
        ),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name=name, storage_path=str(folder), failure_config=FailureConfig(max_failures=-1)),
    )  # fmt: skip


class Trial(NamedTuple):
    """One fault."""

    seconds: float
    step_s: float
    redone: int
    event: dict[str, Any]


def events(folder: Path, decision: str) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["decision"] == decision]


def until(done: Any, what: str) -> None:
    """Wait for it.

    Raises:
        TimeoutError: it did not come.
    """
    deadline_s = time.monotonic() + WAIT_S
    while not done():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{WAIT_S:g} s passed before {what}")
        time.sleep(0.005)


def trials(handle: raypipe.RunHandle, folder: Path, count: int, *, warm: bool) -> Iterator[Trial]:
    """Kill a stage, wait for the first new step, again and again."""
    for number in range(count):
        started = handle.status().step
        until(lambda: handle.status().step >= started + 8, "eight steps were done")  # noqa: B023
        if warm:
            until(lambda: ready(folder) > number, "the spare was ready")  # noqa: B023
        step_s = handle.status().step_s
        victim = handle.status().stages[number % 2]["process"]
        begin_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(events(folder, "recovery")) > number, "the run had recovered")  # noqa: B023
        event = events(folder, "recovery")[-1]
        until(lambda: handle.status().step > event["step"], "the first new step was done")  # noqa: B023
        yield Trial(time.monotonic() - begin_s - step_s, step_s, event["redone_steps"], event)


def ready(folder: Path) -> int:
    """Spares that were ready so far."""
    return len(events(folder, "spare"))


def measured(size_mb: int, count: int, *, warm: bool) -> tuple[list[Trial], bool]:
    """Trials of one run, and whether its parameters are those of an undisturbed one."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        folder = Path(name)
        handle = trainer(folder, "disturbed", size_mb, 3 if warm else 2).start(1_000_000)
        try:
            found = list(trials(handle, folder / "disturbed", count, warm=warm))
            handle.stop()
            result = handle.wait(timeout_s=WAIT_S)
            steps = handle.status().step
        finally:
            handle.close()
        twin = trainer(folder, "undisturbed", size_mb, 2).fit(steps, local=True, progress=False)
        first, second = raypipe.load_state_dict(result.checkpoint), raypipe.load_state_dict(twin.checkpoint)
        return found, all(torch.equal(first[key], second[key]) for key in second)


def main() -> None:
    """Sizes one after the other, warm and cold in turns."""
    asked = common.arguments(__doc__)
    settings = QUICK if asked.quick else Settings()
    figures: dict[str, float] = {}
    raw: dict[str, Any] = {}
    same, redone = True, []
    for size_mb in settings.sizes_mb:
        for way in ("warm", "cold"):
            found, equal = measured(size_mb, settings.trials, warm=way == "warm")
            same = same and equal
            redone += [trial.redone for trial in found]
            seconds = [trial.seconds for trial in found]
            figures[f"sigkill_seconds_{way}_{size_mb}mb"] = median(seconds)
            figures[f"sigkill_seconds_{way}_max_{size_mb}mb"] = max(seconds)
            figures[f"step_seconds_{size_mb}mb"] = median(trial.step_s for trial in found)
            raw[f"{way}_{size_mb}mb"] = [trial._asdict() for trial in found]
            parts = ", ".join(f"{k} {v:.2f}" for k, v in found[-1].event.items() if k.endswith("_s"))
            print(f"{size_mb} MB, {way}: {' '.join(f'{s:.2f}' for s in seconds)} s; the last one: {parts}", flush=True)
    figures["redone_steps"] = sum(redone) / len(redone)
    figures["equal"] = float(same)
    common.finish("recovery", figures, raw, asked)
