"""A run with replicas whose workers are killed while it trains: it ends with the bits of one that was left alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from ray.train import FailureConfig

from raypipe import PipelineTrainer, load_state_dict
from raypipe.api.handle import RunHandle
from raypipe.errors import PlanError
from tests.exactness import same_bits
from tests.runs.test_replicas import trainer
from tests.runtime.fleet.test_recovery import events, reached
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.usefixtures("shared_captures")]

MOST = 1_000_000
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


def test_a_run_goes_on_without_a_replica_until_another_one_joins(local_ray: None, tmp_path: Path) -> None:
    """2-1: the replica of stage 0 that leads; when another one is there, the only worker of stage 1.

    Then it is resized to 1-1 and to 1-2-1, which loses a replica again.
    """
    handle, folder = (
        surviving(tmp_path, "lost", num_replicas=[2, 1], eval_interval_steps=50).start(MOST),
        tmp_path / "lost",
    )
    reached(handle, 20)
    before = processes(handle)
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: bool(events(folder, "regroup")), WAIT_S)
    wait_until(lambda: bool(events(folder, "join")), WAIT_S)
    reached(handle, 20 + handle.status().step)
    after = processes(handle)
    assert (after[0], after[2]) == (before[1], before[2]), "who was not lost stays"
    os.kill(after[2], signal.SIGKILL)
    wait_until(lambda: bool(events(folder, "recovery")), WAIT_S)
    reached(handle, 20 + handle.status().step)
    handle.resize(2, num_replicas=1)
    reached(handle, 20 + handle.status().step)
    with pytest.raises(PlanError, match=r"num_replicas=\(1, 3\): the run sums gradients in 2 lanes, .* num_lanes=6"):
        handle.resize(2, num_replicas=[1, 3])
    handle.resize(3, num_replicas=[1, 2, 1])
    wait_until(lambda: len(processes(handle)) == 4)
    reached(handle, 20 + handle.status().step)
    os.kill(processes(handle)[1], signal.SIGKILL)
    wait_until(lambda: len(events(folder, "join")) == 2, WAIT_S)
    reached(handle, 20 + handle.status().step)
    handle.stop()
    result = handle.wait(timeout_s=WAIT_S)
    steps = handle.status().step
    assert as_undisturbed(tmp_path, result.checkpoint, steps, num_lanes=2) == []
    assert [row["step"] for row in pq.read_table(folder / "metrics.parquet").to_pylist()] == list(range(steps))
    (first, second), (recovered,) = events(folder, "regroup"), events(folder, "recovery")
    assert [lost["lost"] for lost in (first, second)] == [["Replica 0 of stage 0"], ["Replica 0 of stage 1"]]
    assert first["replaced"] == []
    resized = events(folder, "resize")
    assert [(one["num_stages"], one.get("replicas")) for one in resized] == [(2, None), (3, [1, 2, 1])]
    # nobody but its holder has the state of a stage without replicas
    assert (recovered["reason"], recovered["replaced"]) == ("from copies in memory", ["Stage 1"])
