"""A run with replicas whose workers are killed while it trains: it ends with the bits of one that was left alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train import FailureConfig

from raypipe import PipelineTrainer, load_state_dict
from raypipe.api.handle import RunHandle
from tests.exactness import same_bits
from tests.runs.test_replicas import trainer
from tests.runtime.workers.test_recovery import events, reached

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.usefixtures("shared_captures")]

STEPS = 400
WAIT_S = 240.0


def surviving(folder: Path, name: str, **pipeline: Any) -> PipelineTrainer:
    made = trainer(folder, name, **pipeline)
    made._run = SimpleNamespace(name=name, storage_path=str(folder), failure_config=FailureConfig(max_failures=-1))
    return made


def processes(handle: RunHandle) -> list[int]:
    return [stage["process"] for stage in handle.status().stages]


def as_undisturbed(folder: Path, checkpoint: str, steps: int, **pipeline: Any) -> list[str]:
    """Names of tensors in which a checkpoint differs from that of a run in threads without replicas."""
    alone = trainer(folder, "alone", **pipeline).fit(steps, local=True, progress=False)
    found, wanted = load_state_dict(checkpoint), load_state_dict(alone.checkpoint)
    return [key for key in wanted if not same_bits(found[key], wanted[key])]


def test_a_killed_replica_and_a_stage_without_another_are_replaced(local_ray: None, tmp_path: Path) -> None:
    """2-1: a replica of stage 0, then the only worker of stage 1, whose copy another one holds."""
    handle = surviving(tmp_path, "killed", num_replicas=[2, 1], eval_interval_steps=50).start(STEPS)
    for worker in (1, 2):
        reached(handle, 20 + 60 * worker)
        os.kill(processes(handle)[worker], signal.SIGKILL)
        reached(handle, 50 + 60 * worker)
    result = handle.wait(timeout_s=WAIT_S)
    assert as_undisturbed(tmp_path, result.checkpoint, STEPS, num_lanes=2) == []
    assert len(events(tmp_path / "killed", "failure")) == 2
    last = events(tmp_path / "killed", "recovery")[-1]
    assert (last["replaced"], last["reason"]) == (["Stage 1"], "from copies in memory")
