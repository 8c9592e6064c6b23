"""Runs of one size wait for their workers and name who holds the CPUs; what ends the wait leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray.train import ScalingConfig
from ray.util.placement_group import placement_group, remove_placement_group

from raypipe import PipelineTrainer
from raypipe.errors import PlanError
from raypipe.runtime.driver.driver import driver_name
from raypipe.runtime.fleet.missing_resources import shortage
from raypipe.runtime.worker.places import NAMESPACE, living, release
from tests.lab.network import ROOT
from tests.runtime.fleet.test_growth import places_of, somebody_else
from tests.runtime.fleet.test_recovery import (
    ENDLESS,
    WAIT_S,
    as_undisturbed,
    events,
    kill,
    reached,
    stopped,
    stopped_driver,
    surviving,
)
from tests.runtime.raylets import Home
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


class Idle:
    """An actor that does nothing."""


def fixed(folder: Path, run: str, max_failures: int = 0, **pipeline: object) -> PipelineTrainer:
    """A run of two workers of one CPU each."""
    return surviving(folder, run, "noisy", max_failures, **pipeline)


def test_a_run_waits_for_cpus_names_who_holds_them_and_trains_once_they_are_free(cluster: None, tmp_path: Path) -> None:
    other = fixed(tmp_path, "other").start(ENDLESS)
    reached(other, 1)
    wants = " for 2 workers of 1 CPU each: 1 can be had, 2 are requested, and the cluster has 0 of 4"
    held = "; held by run 'other' with 2 CPU and placement group with 1 CPU; gives up at"
    with somebody_else(1):
        handle = fixed(tmp_path, "waits").start(10)
        wait_until(lambda: all(words in handle.status().message for words in ("waiting since", wants, held)))
        assert handle.status().state == "starting"
        assert places_of("waits") == ["CREATED", "PENDING"]  # which an autoscaler would see
        stopped(other)
        handle.wait(timeout_s=WAIT_S)
    (told,) = events(tmp_path / "waits", "wait for workers")
    assert told["reason"].startswith("waiting since")


def test_a_run_that_waits_is_stopped_at_once_and_asks_for_nothing_any_more(cluster: None, tmp_path: Path) -> None:
    with somebody_else(3):
        handle = fixed(tmp_path, "stopped", resource_timeout_s=None).start(10)
        wait_until(lambda: "waiting since" in handle.status().message)
        assert "gives up" not in handle.status().message
        assert stopped(handle) == (0, "")
        wait_until(lambda: places_of("stopped") == [])


@pytest.mark.parametrize(
    ("workers", "cpus", "cure"),
    [(2, 1.0, "resource_timeout_s=None"), ((2, 3), 3.0, "so that 1 will do")],
    ids=["held", "range"],
)
def test_a_run_gives_up_when_its_patience_ends(
    cluster: None, tmp_path: Path, workers: int | tuple[int, int], cpus: float, cure: str
) -> None:
    """One fact, one reason, one fix; a range keeps to a number of seconds too."""
    with somebody_else(3):
        made = fixed(tmp_path, "hasty", resource_timeout_s=1.5)
        made._scaling = ScalingConfig(num_workers=workers, resources_per_worker={"CPU": cpus})
        with pytest.raises(PlanError) as caught:
            made.fit(10, progress=False)
        wait_until(lambda: places_of("hasty") == [])
    message = str(caught.value)
    assert message.startswith(f"The run needs 2 workers of {cpus:g} CPU each, and in 1.5 s ")
    assert f"could be had: the cluster has {0 if cpus == 1 else 1} of 4 CPU free" in message
    assert "held by placement group with 3 CPU" in message
    assert cure in message


def test_workers_without_whom_there_is_no_plan_are_waited_for_after_a_loss(cluster: None, tmp_path: Path) -> None:
    """Of a run of one size whose workers were all lost: others hold what it had, for a while."""
    made = fixed(tmp_path, "lost", -1, resource_timeout_s=20.0)
    made._scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 2})
    handle = made.start(ENDLESS)
    reached(handle, 40)
    other = placement_group([{"CPU": 4}])
    try:
        with stopped_driver(tmp_path / "lost"):
            there = living(driver_name("lost"))
            for stage in (0, 1):
                kill(handle, stage)
            release([place for _, place in there.values()])
            assert other.wait(WAIT_S)
        wait_until(lambda: "held by placement group with 4 CPU" in handle.status().message, WAIT_S)
    finally:
        remove_placement_group(other)
    reached(handle, handle.status().step + 40)
    steps, checkpoint = stopped(handle)
    assert as_undisturbed(tmp_path, checkpoint, "noisy", steps) == []
    assert events(tmp_path / "lost", "recovery")[0]["replaced"] == ["Stage 0", "Stage 1"]


def test_of_two_runs_that_each_have_a_part_of_what_both_need_one_gives_way(cluster: None, tmp_path: Path) -> None:
    """The other one is a driver that has its places, and nothing else."""
    other = ray.remote(num_cpus=0)(Idle).options(name=driver_name("first"), namespace=NAMESPACE).remote()
    with somebody_else(2):
        half = placement_group([{"CPU": 1}], name=f"{driver_name('first')}/0")
        assert half.wait(WAIT_S)
        rest = placement_group([{"CPU": 2}], name=f"{driver_name('first')}/1")
        asks = [shortage({"CPU": 1.0}, 2, driver_name(run)).yields for run in ("earlier", "first", "second")]
        try:
            handle = fixed(tmp_path, "second").start(10)
            wait_until(lambda: "waiting since" in handle.status().message, WAIT_S)
            wait_until(lambda: bool(events(tmp_path / "second", "give way")), WAIT_S)
        finally:
            for group in (half, rest):
                remove_placement_group(group)
            ray.kill(other)
        handle.wait(timeout_s=WAIT_S)
    assert asks == [False, False, True]


ASKS = """
import json, sys
import ray
from raypipe.runtime.fleet.missing_resources import has_autoscaler
from raypipe.runtime.fleet.missing_resources import shortage

ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)

@ray.remote(num_cpus=1)
class Model:
    def there(self): return True

@ray.remote(num_cpus=0.5)
def work(seconds):
    import time
    time.sleep(seconds)

@ray.remote  # takes a CPU while it starts, and none afterwards
class Free:
    def there(self): return True


models = [Model.remote(), Model.remote(), Model.options(name="served").remote(), Free.remote()]
ray.get([model.there.remote() for model in models])
task = work.remote(600)
found = {}
import time
for _ in range(300):  # Ray tells of a task after a while
    found = shortage({"CPU": 1.0}, 5, "raypipe/waits")
    if "task work" in found.reason:
        break
    time.sleep(0.2)
print(json.dumps([found.reason, found.fits, found.scaled]))
"""


def test_actors_and_tasks_are_named_with_their_jobs_but_not_their_arguments(head: Home, tmp_path: Path) -> None:
    script = tmp_path / "serve.py"
    script.write_text(ASKS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": head.address}
    command = [sys.executable, str(script), head.address, "--password=secret"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    reason, fits, scaled = json.loads(done.stdout.splitlines()[-1])
    assert (fits, scaled) == (4, False)
    assert "the cluster has 0.5 of 4 CPU free and room for 4 such workers if it is empty" in reason
    job = f"({sys.executable} {script})"
    held = [f"2 actors Model of job {{}} {job} with 2 CPU", f"actor Model 'served' of job {{}} {job} with 1 CPU"]
    number = reason.split(" of job ")[1].split()[0]
    assert "; held by " + ", ".join(held).format(number, number) in reason
    assert reason.endswith(f"and task work of job {number} {job} with 0.5 CPU")
    assert "secret" not in reason
    assert "Free" not in reason


def test_less_is_said_without_a_dashboard(cluster: None) -> None:
    """The shared node has none: groups are known all the same."""
    with somebody_else(2):
        found = shortage({"CPU": 3.0}, 1, driver_name("waits"))
    assert found[:3] == ("the cluster has 2 of 4 CPU free; held by placement group with 2 CPU", 1, False)
