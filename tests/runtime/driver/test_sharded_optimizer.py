"""Replicas on Ray actors that share out the state of their optimizer: the bits of threads that hold it whole.

Also while some of them are lost, others come, and the run is given other numbers of them.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.train import FailureConfig, ScalingConfig
from ray.util.placement_group import placement_group, remove_placement_group

from raypipe import PipelineTrainer
from raypipe.api.handle import RunHandle
from raypipe.engine.io.checkpoint import checkpoint_source
from raypipe.engine.io.storage import Place
from raypipe.runtime.driver.driver import driver_name
from raypipe.runtime.worker.places import living, release
from tests.exactness import same_bits
from tests.runs.test_replicas import told, trainer
from tests.runs.test_sharded_optimizer import SHARDED, wide
from tests.runtime.fleet.test_growth import somebody_else
from tests.runtime.fleet.test_recovery import events, reached, stopped_driver
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("shared_captures")]

LANED: dict[str, Any] = {"num_lanes": 6, "num_microbatches": 6, "minibatch_size": 12, "max_grad_norm": 0.1}
MOST, WAIT_S, MORE = 1_000_000, 300.0, 15


def surviving(folder: Path, replicas: list[int], **more: Any) -> PipelineTrainer:
    """A run of two stages that survives failures, and looks at nothing but its steps."""
    config = {**LANED, "num_replicas": replicas, "eval_interval_steps": None, **SHARDED, **more}
    made = trainer(folder, "run", wide(), **config)
    made._run = SimpleNamespace(name="run", storage_path=str(folder), failure_config=FailureConfig(max_failures=-1))
    return made


def kill(handle: RunHandle, *workers: int) -> None:
    processes = [stage["process"] for stage in handle.status().stages]
    for worker in workers:
        os.kill(processes[worker], signal.SIGKILL)


def goes_on(handle: RunHandle, folder: Path, decision: str, count: int) -> dict[str, Any]:
    """What is told of the n-th such event, once the run has gone on for a while."""
    wait_until(lambda: len(events(folder, decision)) >= count, WAIT_S)
    reached(handle, MORE + handle.status().step)
    found = events(folder, decision)
    assert len(found) == count, found
    return found[-1]


def as_undisturbed(handle: RunHandle, folder: Path) -> list[str]:
    """Names of parameters, and of what optimizers keep for them, that differ from those of threads that hold it whole.

    Every step is in the records once, with the loss and the norm that it has there.
    """
    handle.stop()
    result = handle.wait(timeout_s=WAIT_S)
    steps = handle.status().step
    alone = trainer(folder, "alone", wide(), **LANED, eval_interval_steps=None).fit(steps, local=True, progress=False)
    (rows, found), (others, wanted) = told(folder / "run"), told(folder / "alone")
    assert len(rows) == steps
    assert [row[:3] for row in rows] == [row[:3] for row in others]
    differ = [name for name in wanted if not same_bits(found[name], wanted[name])]
    kept, known = kept_in(result.checkpoint), kept_in(alone.checkpoint)
    assert kept.keys() == known.keys()
    assert any(key.startswith("exp_avg of") for key in known)
    return differ + [key for key in known if not same_bits(kept[key], known[key])]


def kept_in(checkpoint: str) -> dict[str, torch.Tensor]:
    """What optimizers keep, whole, by whoever it was written."""
    with checkpoint_source(Place.of(checkpoint)) as source:
        kept = source.kept(source.names)
    return {f"{key} of {name}": torch.as_tensor(x) for name, of_one in kept.items() for key, x in of_one.items()}


def test_replicas_that_are_lost_and_numbers_that_change(local_ray: None, tmp_path: Path) -> None:
    """Either replica, whose fellow goes on alone until another one joins; the other stage; both replicas at once.

    Then it is resized, also to a single stage.
    """
    handle, folder = surviving(tmp_path, [2, 1]).start(MOST), tmp_path / "run"
    reached(handle, 20)
    for count, replica in enumerate((1, 0), 1):
        kill(handle, replica)
        found = goes_on(handle, folder, "recovery", count)
        assert (found["kind"], found["reason"]) == ("roll back", "from copies in memory"), found
        assert (found["lost"], found["replaced"]) == ([f"Replica {replica} of stage 0"], [])
        assert goes_on(handle, folder, "join", count)["replicas"] == [2, 1]
    for count, lost in enumerate(((2,), (0, 1)), 3):
        with stopped_driver(folder):
            kill(handle, *lost)
        found = goes_on(handle, folder, "recovery", count)
        assert (found["kind"], found["reason"]) == ("roll back", "from copies in memory"), found
        assert len(found["replaced"]) == len(lost)
    for count, replicas in enumerate(([1, 1], [2, 2], [1, 3], [3, 1]), 1):
        handle.resize(2, num_replicas=replicas)
        found = goes_on(handle, folder, "resize", count)
        assert found.get("replicas", [1, 1]) == replicas
        assert len(handle.status().stages) == sum(replicas)
    handle.resize(1, num_replicas=2)
    goes_on(handle, folder, "resize", 5)
    kill(handle, 1)
    assert goes_on(handle, folder, "recovery", 5)["reason"] == "from copies in memory"
    goes_on(handle, folder, "join", 3)
    assert as_undisturbed(handle, tmp_path) == []
    assert events(folder, "resize refused") == []


@contextmanager
def place_taken(handle: RunHandle, folder: Path) -> Iterator[None]:
    """Worker 1 is lost, and somebody else, who waits for a CPU, gets its place first."""
    other = placement_group([{"CPU": 1}])
    try:
        with stopped_driver(folder):
            process = handle.status().stages[1]["process"]  # worker 1 need not be actor 1 in a run that has grown
            actors, places = zip(*living(driver_name("run")).values(), strict=True)
            facts = ray.get([actor.facts.remote() for actor in actors], timeout=WAIT_S)
            (place,) = [at for at, found in zip(places, facts, strict=True) if found["process"] == process]
            kill(handle, 1)
            release([place])
            assert other.wait(WAIT_S)
        yield
    finally:
        remove_placement_group(other)


def test_a_run_that_grows_and_shrinks_with_the_cluster(local_ray: None, tmp_path: Path) -> None:
    """It begins with one worker for each stage, has three replicas when more come, and two when one is gone."""
    made, folder = surviving(tmp_path, [3, 1]), tmp_path / "run"
    made._scaling = ScalingConfig(num_workers=(2, 4), elastic_resize_monitor_interval_s=0.0)
    with somebody_else(2) as other:
        handle = made.start(MOST)
        reached(handle, MORE)
        assert len(handle.status().stages) == 2
        remove_placement_group(other)
        wait_until(lambda: len(handle.status().stages) == 4, WAIT_S)
    reached(handle, MORE + handle.status().step)
    with place_taken(handle, folder):
        found = goes_on(handle, folder, "recovery", 1)
        reached(handle, MORE + handle.status().step)
    assert (found["replicas"], found["reason"]) == ([2, 1], "from copies in memory")
    assert as_undisturbed(handle, tmp_path) == []


def test_a_driver_that_is_lost_with_a_replica(local_ray: None, tmp_path: Path) -> None:
    """Ray starts it again: first the stages go on where they stand, then without a replica's newest slices."""
    handle, folder = surviving(tmp_path, [2, 1], checkpoint_interval_steps=10).start(MOST), tmp_path / "run"
    reached(handle, 20)
    for count, lost in enumerate(((), (1,)), 1):
        kill(handle, *lost)
        os.kill(json.loads((folder / "lease.json").read_text())["holder"]["pid"], signal.SIGKILL)
        goes_on(handle, folder, "take over", 2 * count)  # one for the lease, one for the stages
    # The newest step of which everything is left: in memory, or in the checkpoint of every tenth step.
    assert events(folder, "recovery")[-1]["reason"].startswith(("from copies in memory", "from checkpoints/step_"))
    assert as_undisturbed(handle, tmp_path) == []
