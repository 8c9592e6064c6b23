"""A run whose stages are killed while it trains: it goes on, and ends with the bits of one that was left alone."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train import FailureConfig, ScalingConfig
from ray.util.placement_group import placement_group, remove_placement_group

from raypipe import PipelineTrainer, load_state_dict
from raypipe.api.handle import RunHandle
from raypipe.errors import PlanError, StageError
from tests.exactness import same_bits
from tests.runtime.run.test_planning import trainer

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 120
WAIT_S = 120.0


def surviving(folder: Path, run: str, name: str, max_failures: int = -1, **pipeline: Any) -> PipelineTrainer:
    made = trainer(folder, run, name, **pipeline)
    made._run = SimpleNamespace(
        name=run, storage_path=str(folder), failure_config=FailureConfig(max_failures=max_failures)
    )
    return made


def reached(handle: RunHandle, step: int) -> None:
    """Wait until the run has done so many steps."""
    deadline_s = time.monotonic() + WAIT_S
    while handle.status().step < step:
        assert time.monotonic() < deadline_s, handle.status()
        time.sleep(0.01)


def events(folder: Path, decision: str) -> list[dict[str, Any]]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["decision"] == decision]


def as_undisturbed(folder: Path, checkpoint: str, name: str, steps: int = STEPS, **pipeline: Any) -> list[str]:
    """Names of tensors in which a checkpoint differs from that of a run in threads."""
    alone = trainer(folder, "alone", name, **pipeline).fit(steps, local=True, progress=False)
    found, wanted = load_state_dict(checkpoint), load_state_dict(alone.checkpoint)
    return [key for key in wanted if not same_bits(found[key], wanted[key])]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_killed_stage_is_replaced(stage: int, local_ray: None, tmp_path: Path) -> None:
    handle = surviving(tmp_path, "killed", "noisy").start(STEPS)
    reached(handle, 10)
    processes = [one["process"] for one in handle.status().stages]
    os.kill(processes[stage], signal.SIGKILL)
    result = handle.wait(timeout_s=WAIT_S)
    assert as_undisturbed(tmp_path, result.checkpoint, "noisy") == []
    assert [line["step"] for line in events(tmp_path / "killed", "failure")]
    (recovery,) = events(tmp_path / "killed", "recovery")
    assert recovery["replaced"] == [f"Stage {stage}"]
    assert recovery["reason"] == "from copies in memory"  # the other worker held one of the lost stage


def test_a_spare_takes_the_place_of_a_lost_stage_and_another_spare_is_started(local_ray: None, tmp_path: Path) -> None:
    made = surviving(tmp_path, "spare", "unet")
    made._scaling = ScalingConfig(num_workers=3)
    handle = made.start(4 * STEPS)
    for step in (40, 200):
        reached(handle, step)
        os.kill(handle.status().stages[0]["process"], signal.SIGKILL)
        reached(handle, step + 40)
    result = handle.wait(timeout_s=WAIT_S)
    assert as_undisturbed(tmp_path, result.checkpoint, "unet", 4 * STEPS) == []
    first, second = events(tmp_path / "spare", "recovery")
    assert first["replaced"] == second["replaced"] == ["Stage 0"]
    assert events(tmp_path / "spare", "warning") == []


def test_failures_are_counted(local_ray: None, tmp_path: Path) -> None:
    handle = surviving(tmp_path, "twice", "noisy", max_failures=1).start(STEPS)
    for step in (5, 15):
        reached(handle, step)
        os.kill(handle.status().stages[1]["process"], signal.SIGKILL)
    with pytest.raises(StageError, match="failure 2 of this run"):
        handle.wait(timeout_s=WAIT_S)
    assert len(events(tmp_path / "twice", "recovery")) == 1


def test_without_a_wish_to_survive_a_failure_ends_the_run(local_ray: None, tmp_path: Path) -> None:
    handle = surviving(tmp_path, "ends", "noisy", max_failures=0).start(STEPS)
    reached(handle, 5)
    os.kill(handle.status().stages[1]["process"], signal.SIGKILL)
    with pytest.raises(StageError, match="Stage 1 died"):
        handle.wait(timeout_s=WAIT_S)


@pytest.mark.parametrize("name", ["noisy", "unet"])
def test_a_run_is_resized_while_it_trains(name: str, local_ray: None, tmp_path: Path) -> None:
    handle = surviving(tmp_path, "resized", name, max_failures=0).start(STEPS)
    processes = []
    for step, stages in ((5, 3), (25, 1), (45, 4), (65, 2)):
        reached(handle, step)
        handle.resize(stages)
        processes.append([one["process"] for one in handle.status().stages])
        assert len(processes[-1]) == stages
    result = handle.wait(timeout_s=WAIT_S)
    assert as_undisturbed(tmp_path, result.checkpoint, name) == []
    assert set(processes[1]) <= set(processes[0])  # a worker that both plans use goes on
    assert [line["num_stages"] for line in events(tmp_path / "resized", "resize")] == [3, 1, 4, 2]


def test_a_number_of_stages_that_cannot_be_is_refused(local_ray: None, tmp_path: Path) -> None:
    handle = surviving(tmp_path, "refused", "noisy", max_failures=0).start(STEPS)
    reached(handle, 5)
    with pytest.raises(PlanError, match="stages"):
        handle.resize(1000)
    result = handle.wait(timeout_s=WAIT_S)
    assert as_undisturbed(tmp_path, result.checkpoint, "noisy") == []


def test_without_a_place_for_another_worker_the_run_goes_on_with_fewer_stages(local_ray: None, tmp_path: Path) -> None:
    made = surviving(tmp_path, "fewer", "noisy")
    made._scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 2})
    handle = made.start(4 * STEPS)
    reached(handle, 40)
    other = placement_group([{"CPU": 2}])  # somebody else waits for a place
    try:
        os.kill(handle.status().stages[1]["process"], signal.SIGKILL)
        result = handle.wait(timeout_s=WAIT_S)
    finally:
        remove_placement_group(other)
    assert as_undisturbed(tmp_path, result.checkpoint, "noisy", 4 * STEPS) == []
    (recovery,) = events(tmp_path / "fewer", "recovery")
    assert recovery["num_stages"] == 1
    assert "memory" in recovery["reason"]
