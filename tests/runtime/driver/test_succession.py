"""A driver that is killed while its stages train: the next one adopts them, or they end themselves."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raypipe.api.handle import RunHandle
from raypipe.engine.io.checkpoint import checkpoint_name
from raypipe.errors import ConfigError, StageError
from raypipe.run.lease import LOCK
from raypipe.runtime.worker.places import NAMESPACE, actor_name, first_unused, is_driver, request_places
from raypipe.runtime.worker.worker import StageActor
from tests import processes
from tests.run.plans.test_planning import trainer
from tests.runtime.fleet.test_recovery import ENDLESS, SAMPLE_S, as_undisturbed, events, reached, surviving
from tests.runtime.left_over import NOTHING, Held, ours
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.usefixtures("shared_captures")]

WAIT_S = 120.0


@pytest.fixture
def before(cluster: None) -> Iterator[Held]:
    """What is there before a run; a driver that has ended its run answers for a minute more, and is not waited for."""
    found = ours()
    yield found
    for name in filter(is_driver, ours().drivers - found.drivers):
        ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)


def kill_driver(folder: Path) -> None:
    os.kill(json.loads((folder / "lease.json").read_text())["holder"]["pid"], signal.SIGKILL)


def stages_of(handle: RunHandle) -> list[int]:
    return [one["process"] for one in handle.status().stages]


def whole(folder: Path, run: str, handle: RunHandle, **pipeline: Any) -> None:
    """Stop a run: every step is once in the handle and in the folder, with the bits of an undisturbed run."""
    handle.stop()
    result = handle.wait(timeout_s=WAIT_S)
    steps = len(result.records)
    assert as_undisturbed(folder, result.checkpoint, "noisy", steps, **pipeline) == []
    wanted = pq.read_table(folder / "alone" / "metrics.parquet").to_pylist()
    found = pq.read_table(folder / run / "metrics.parquet").to_pylist()
    assert [(row["step"], row["loss"]) for row in found] == [(row["step"], row["loss"]) for row in wanted]
    assert [record.step for record in result.records] == list(range(steps))


def goes_on_with_them(handle: RunHandle, folder: Path, *, locked_out: bool = False) -> None:
    """Kill the driver; the next one adopts the same processes, once it may write into the run's folder."""
    stages, step = stages_of(handle), handle.status().step
    kill_driver(folder)
    if locked_out:
        (folder / LOCK).unlink()
        (folder / LOCK).mkdir()
        wait_until(lambda: handle.status().message.startswith("waiting for the run's folder: "), WAIT_S)
        (folder / LOCK).rmdir()
    reached(handle, step + 20)
    assert stages_of(handle) == stages
    assert [line["reason"] for line in events(folder, "take over")][1:] == ["the driver of this run was lost"]


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_driver_that_ray_starts_again_goes_on_also_where_a_stage_died_with_it(
    before: Held, schedule: str, tmp_path: Path
) -> None:
    """The state that it adopts is saved before the next step, for what the run began with is gone with its driver."""
    handle = surviving(tmp_path, "both", "noisy", schedule=schedule).start(ENDLESS, detached=True)
    reached(handle, 25)  # an asynchronous run has copies of step 20
    goes_on_with_them(handle, tmp_path / "both")
    wait_until(lambda: handle.status().checkpoint != "")
    (adopted,) = {event["step"] for event in events(tmp_path / "both", "recovery")}
    assert handle.status().checkpoint.endswith(checkpoint_name(adopted))
    stages = stages_of(handle)
    os.kill(stages[0], signal.SIGKILL)
    kill_driver(tmp_path / "both")
    wait_until(
        lambda: [one != old for one, old in zip(stages_of(handle), stages, strict=False)] == [True, False], WAIT_S
    )
    whole(tmp_path, "both", handle, schedule=schedule)
    assert {found["reason"].partition(":")[0] for found in events(tmp_path / "both", "recovery")} != set()
    assert events(tmp_path / "both", "resume") == []


def test_a_worker_that_the_driver_was_starting_is_ended_and_not_used(before: Held, tmp_path: Path) -> None:
    """Nobody had told it how its links travel; the next driver, which has lost a stage, starts another one."""
    made = surviving(tmp_path, "starting", "noisy", transport="collective", checkpoint_interval_steps=5)
    handle = made.start(ENDLESS)
    reached(handle, 10)
    wait_until(lambda: handle.status().checkpoint != "")
    (owner,) = filter(is_driver, ours().drivers - before.drivers)
    number, stages = first_unused(owner), stages_of(handle)
    (place,) = request_places(owner, [number], {"CPU": 0.01}).values()
    assert place.wait(WAIT_S)
    there = PlacementGroupSchedulingStrategy(placement_group=place)
    named = {"name": actor_name(owner, number), "namespace": NAMESPACE, "lifetime": "detached"}
    starting = StageActor.options(num_cpus=0.01, scheduling_strategy=there, **named).remote(WAIT_S)
    assert ray.get(starting.facts.remote(), timeout=WAIT_S) is None
    os.kill(stages[1], signal.SIGKILL)
    kill_driver(tmp_path / "starting")
    wait_until(lambda: events(tmp_path / "starting", "recovery") != [], WAIT_S)
    with pytest.raises(RayActorError):
        ray.get(starting.facts.remote(), timeout=WAIT_S)
    whole(tmp_path, "starting", handle)


def test_failures_are_counted_on_by_a_driver_that_ray_starts_again(before: Held, tmp_path: Path) -> None:
    handle = surviving(tmp_path, "counted", "noisy", max_failures=1, checkpoint_interval_steps=5).start(ENDLESS)
    reached(handle, 10)
    os.kill(stages_of(handle)[1], signal.SIGKILL)
    wait_until(lambda: events(tmp_path / "counted", "recovery") != [], WAIT_S)
    reached(handle, handle.status().step + 5)
    goes_on_with_them(handle, tmp_path / "counted", locked_out=True)
    os.kill(stages_of(handle)[0], signal.SIGKILL)
    with pytest.raises(StageError, match="it is failure 2 of this run"):
        handle.wait(timeout_s=WAIT_S)


def killed(folder: Path, run: str, **pipeline: Any) -> list[int]:
    """Stages of a detached run whose driver is killed and does not come again by itself."""
    handle = trainer(folder, run, "noisy", SAMPLE_S, **pipeline).start(ENDLESS, detached=True)
    reached(handle, 10)
    stages = stages_of(handle)
    kill_driver(folder / run)
    with pytest.raises(StageError, match="its stages wait a while for another one"):
        handle.wait(timeout_s=WAIT_S)
    return stages


def test_another_script_goes_on_from_a_checkpoint_of_these_stages(before: Held, tmp_path: Path) -> None:
    """Another seed is another run, which leaves them alone; another number of stages is the same run.

    It goes on from a checkpoint, for a run that survives no failure keeps no copies in memory.
    """
    priced = {"worker_price_per_hour": 3600.0, "checkpoint_interval_steps": 5}
    stages = killed(tmp_path, "other", **priced)
    with pytest.raises(ConfigError, match="seed"):
        trainer(tmp_path, "other", "noisy", SAMPLE_S, seed=5).start(ENDLESS).wait(timeout_s=WAIT_S)
    assert all(map(processes.alive, stages))
    handle = trainer(tmp_path, "other", "noisy", SAMPLE_S, num_stages=3, **priced).start(ENDLESS)
    reached(handle, 40)
    whole(tmp_path, "other", handle)
    assert not any(map(processes.alive, stages))
    (resumed,) = events(tmp_path / "other", "resume")
    assert resumed["step"] >= 5


def test_what_a_killed_run_left_is_removed_when_another_one_starts(before: Held, tmp_path: Path) -> None:
    """Nobody of it is left that could give its places back."""
    reached(trainer(tmp_path, "all", "noisy", SAMPLE_S).start(ENDLESS, detached=True), 1)
    for name in ours().drivers - before.drivers:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
    assert len(ours().beyond(before).groups) == 2
    trainer(tmp_path, "next", "noisy").fit(1, progress=False)
    assert ours().beyond(before).groups == frozenset()


def test_nobody_comes(before: Held, tmp_path: Path) -> None:
    stages = killed(tmp_path, "nobody", driver_grace_s=5.0)
    wait_until(lambda: not any(map(processes.alive, stages)))
    wait_until(lambda: ours().beyond(before) == NOTHING)
