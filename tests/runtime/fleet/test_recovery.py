"""A run whose stages are killed while it trains: it goes on, and ends with the bits of one that was left alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.train import FailureConfig, ScalingConfig
from ray.util.placement_group import placement_group, remove_placement_group
from torch.utils.data import DataLoader

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.api.handle import RunHandle
from raypipe.errors import PlanError, StageError
from raypipe.runtime.driver.driver import driver_name
from raypipe.runtime.worker.places import living, release
from tests.exactness import same_bits
from tests.run.plans.test_planning import trainer
from tests.runs.test_changing_sizes import language_model, padded, sentences
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("shared_captures")]

ENDLESS = 10**6
"""Steps of a run that is stopped once what is looked for has happened."""
WAIT_S = 120.0
SAMPLE_S = 0.002
"""Without it a quick machine ends the run before a test has done its harm."""


def surviving(
    folder: Path, run: str, name: str, max_failures: int = -1, *, sample_s: float = SAMPLE_S, **pipeline: Any
) -> PipelineTrainer:
    made = trainer(folder, run, name, sample_s, **pipeline)
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


def stopped(handle: RunHandle) -> tuple[int, str]:
    """Steps that the run has done, and its last checkpoint."""
    handle.stop()
    result = handle.wait(timeout_s=WAIT_S)
    return handle.status().step, result.checkpoint


def events(folder: Path, decision: str) -> list[dict[str, Any]]:
    """Events of this kind so far; a line that is being written does not count yet."""
    file = folder / "events.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [line for line in map(json.loads, lines) if line["decision"] == decision]


def as_undisturbed(folder: Path, checkpoint: str, name: str, steps: int, **pipeline: Any) -> list[str]:
    """Names of tensors in which a checkpoint differs from that of a run in threads."""
    alone = trainer(folder, "alone", name, **pipeline).fit(steps, local=True, progress=False)
    found, wanted = load_state_dict(checkpoint), load_state_dict(alone.checkpoint)
    return [key for key in wanted if not same_bits(found[key], wanted[key])]


@contextlib.contextmanager
def stopped_driver(folder: Path) -> Iterator[None]:
    """The driver of the run of this folder learns of what happens meanwhile when it is over."""
    process = json.loads((folder / "lease.json").read_text())["holder"]["pid"]
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def kill(handle: RunHandle, stage: int) -> None:
    os.kill(handle.status().stages[stage]["process"], signal.SIGKILL)


def test_killed_stages_are_replaced(local_ray: None, tmp_path: Path) -> None:
    """By spares, the first stage and then the last one; clipped, so that the controller has no steps overlap."""
    made = surviving(tmp_path, "killed", "unet", max_grad_norm=1.0)
    made._scaling = ScalingConfig(num_workers=3)
    handle = made.start(ENDLESS)
    for stage, step in enumerate((40, 200)):
        reached(handle, step)
        kill(handle, stage)
        reached(handle, step + 40)
    steps, checkpoint = stopped(handle)
    assert as_undisturbed(tmp_path, checkpoint, "unet", steps, max_grad_norm=1.0) == []
    recoveries = events(tmp_path / "killed", "recovery")
    assert [recovery["replaced"] for recovery in recoveries] == [["Stage 0"], ["Stage 1"]]
    # the other worker held a copy of the lost stage
    told = {(recovery["kind"], recovery["reason"]) for recovery in recoveries}
    assert told == {("roll back", "from copies in memory")}
    assert len(events(tmp_path / "killed", "failure")) == 2
    assert events(tmp_path / "killed", "warning") == []


SIZES = ((5, 3), (25, 1), (45, 4), (65, 2))
"""Steps and numbers of stages from there on."""


def resized(handle: RunHandle) -> None:
    processes = []
    for step, stages in SIZES:
        reached(handle, step)
        handle.resize(stages)
        wait_until(lambda: len(handle.status().stages) == stages)  # noqa: B023
        processes.append([one["process"] for one in handle.status().stages])
    assert set(processes[1]) <= set(processes[0])  # a worker that both plans use goes on


def test_a_run_is_resized_while_it_trains(local_ray: None, tmp_path: Path) -> None:
    """It refuses what cannot be, and survives no failure where nobody asked for that."""
    handle = surviving(tmp_path, "resized", "unet", max_failures=0).start(ENDLESS)
    resized(handle)
    with pytest.raises(PlanError, match="stages"):
        handle.resize(1000)
    saved = handle.checkpoint(timeout_s=WAIT_S)
    kill(handle, 1)
    with pytest.raises(StageError, match="Stage 1 died"):
        handle.wait(timeout_s=WAIT_S)
    step = json.loads((Path(saved) / "manifest.json").read_text())["step"]
    assert step > SIZES[-1][0]
    assert as_undisturbed(tmp_path, saved, "unet", step) == []
    assert [line["num_stages"] for line in events(tmp_path / "resized", "resize")] == [stages for _, stages in SIZES]


def test_mini_batches_of_changing_lengths_survive_a_kill_and_a_resize(local_ray: None, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    rows = sentences(240, labels="class")
    made = PipelineTrainer(
        language_model("bert")(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        train_data=DataLoader(rows, batch_size=8, shuffle=True, collate_fn=padded),  # type: ignore[arg-type]
        pipeline=PipelineConfig(num_stages=2, num_microbatches=4, partitioner="parameters", seed=3),
        run_config=SimpleNamespace(
            name="lengths", storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=1)
        ),
    )
    handle = made.start(ENDLESS)
    reached(handle, 10)
    kill(handle, 1)
    reached(handle, 30)
    handle.resize(3)
    reached(handle, 50)
    steps, checkpoint = stopped(handle)
    made._run = SimpleNamespace(name="alone", storage_path=str(tmp_path))
    alone = load_state_dict(made.fit(steps, local=True, progress=False).checkpoint)
    found = load_state_dict(checkpoint)
    assert [key for key in alone if not same_bits(found[key], alone[key])] == []
    assert [line["num_stages"] for line in events(tmp_path / "lengths", "resize")] == [3]
    assert len(events(tmp_path / "lengths", "failure")) == 1


def test_without_a_place_for_another_worker_the_run_goes_on_with_fewer_stages(local_ray: None, tmp_path: Path) -> None:
    made = surviving(tmp_path, "fewer", "noisy", resource_timeout_s=10.0)  # that a place is waited for, instead of 30 s
    made._scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 2})
    handle = made.start(ENDLESS)
    reached(handle, 40)
    other = placement_group([{"CPU": 2}])  # somebody else waits for a place
    try:
        with stopped_driver(tmp_path / "fewer"):  # and gets it first: Ray promises no order
            _, place = living(driver_name("fewer"))[1]
            kill(handle, 1)
            release([place])
            assert other.wait(WAIT_S)
        reached(handle, handle.status().step + 40)
        steps, checkpoint = stopped(handle)
    finally:
        remove_placement_group(other)
    assert as_undisturbed(tmp_path, checkpoint, "noisy", steps) == []
    (recovery,) = events(tmp_path / "fewer", "recovery")
    assert recovery["num_stages"] == 1
    assert "memory" in recovery["reason"]
