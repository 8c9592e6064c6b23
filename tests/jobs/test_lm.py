"""jobs/train/lm.py as people submit it: a head with token auth, ``ray job submit``, and what is left afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest
import ray

from tests import processes
from tests.runtime.raylets import RAY, Home

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SMALL = [
    "--stages", "2", "--minibatch-size", "8", "--microbatches", "4", "--context", "32", "--width", "32", "--depth", "2",
]  # fmt: skip

ACTORS = ("ray::_DriverActor", "ray::_StageActor")


def held() -> dict[str, object]:
    """What runs hold of the cluster to which this process is connected."""
    actors = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    free, total = ray.available_resources(), ray.cluster_resources()
    return {
        "actors": [name for name in actors if name.startswith("raypipe/")],
        "groups": [g["state"] for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"],
        "busy_cpus": total["CPU"] - free.get("CPU", 0),
        "store_bytes": total["object_store_memory"] - free.get("object_store_memory", 0),
    }


def actors() -> list[str]:
    """Processes of runs, which hold their ports: Ray names each after the actor that it is."""
    return [command for command in processes.descendants(os.getpid()).values() if command.startswith(ACTORS)]


class Jobs(NamedTuple):
    """A client of a head, by the environment that its commands need."""

    environment: dict[str, str]

    def run(self, *command: str, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def submit(self, name: str, *entrypoint: str, wait: bool = True) -> subprocess.CompletedProcess[str]:
        waiting = [] if wait else ["--no-wait"]
        command = [RAY, "job", "submit", *waiting, "--submission-id", name, "--working-dir", ".", "--"]
        return self.run(*command, sys.executable, *entrypoint)

    def job(self, path: str) -> dict[str, str]:
        """What the head answers about a job: ``NAME``, or ``NAME/logs``."""
        request = urllib.request.Request(
            f"{self.environment['RAY_API_SERVER_ADDRESS']}/api/jobs/{path}",
            headers={"Authorization": f"Bearer {self.environment['RAY_AUTH_TOKEN']}"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            found: dict[str, str] = json.load(answer)
        return found

    def left(self) -> dict[str, object]:
        """What is left of jobs, after the while that it may take them to go."""
        ray.init(self.environment["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
        try:
            deadline_s = time.monotonic() + 60
            while any((found := held()).values()) and time.monotonic() < deadline_s:
                time.sleep(0.1)
        finally:
            ray.shutdown()
        deadline_s = time.monotonic() + 60
        while (running := actors()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        return found | {"processes": running}


@pytest.fixture(scope="module")
def jobs(head: Home) -> Jobs:
    made = Jobs(
        {
            **os.environ,
            "RAY_ADDRESS": head.address,
            "RAY_API_SERVER_ADDRESS": f"http://{head.head}:{head.dashboard_port}",
            "PYTHONPATH": str(ROOT),
        }
    )
    deadline_s = time.monotonic() + 240
    # The dashboard answers before the agent that runs jobs does.
    while (done := made.run(RAY, "job", "submit", "--", "true")).returncode != 0:
        assert time.monotonic() < deadline_s, done.stderr
    # The driver of another test's detached run answers for a minute after its end.
    while (left := made.left()) != NOTHING:
        assert time.monotonic() < deadline_s, left
    return made


NOTHING = {"actors": [], "groups": [], "busy_cpus": 0, "store_bytes": 0, "processes": []}


def train(folder: Path, steps: int) -> list[str]:
    where = ["--data", str(folder / "data"), "--corpus-bytes", "200000", "--storage", str(folder), "--name", "lm"]
    return ["jobs/train/lm.py", *SMALL, *where, "--steps", str(steps), "--decay-steps", "4000"]


def test_a_job_whose_stage_raises_fails(jobs: Jobs, tmp_path: Path) -> None:
    done = jobs.submit("bad", "tests/jobs/failing_job.py", str(tmp_path))
    assert done.returncode == 1
    assert "the user's own mistake" in done.stdout + done.stderr
    assert jobs.job("bad")["status"] == "FAILED"
    assert jobs.left() == NOTHING


def test_a_job_is_stopped_goes_on_when_it_is_submitted_again_and_succeeds(jobs: Jobs, tmp_path: Path) -> None:
    steps = 4000
    assert jobs.submit("first", *train(tmp_path, steps), wait=False).returncode == 0
    deadline_s = time.monotonic() + 240
    while "grad norm" not in jobs.job("first/logs")["logs"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    assert len(actors()) == 3
    # As the head's pod does it before it stops: what `ray job stop` asks for, of every job that runs.
    leave = [
        sys.executable,
        "jobs/clusters/leave.py",
        "head",
        "--dashboard",
        jobs.environment["RAY_API_SERVER_ADDRESS"],
    ]
    stopped = jobs.run(*leave)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert jobs.job("first")["status"] == "STOPPED"
    assert jobs.left() == NOTHING
    said = jobs.job("first/logs")["logs"]
    assert "SIGTERM: stopping after the step that is running" in said, said
    (saved,) = (tmp_path / "lm/checkpoints").glob("step_*/manifest.json")
    done = json.loads(saved.read_text())["step"]
    assert 0 < done < steps
    again = jobs.submit("second", *train(tmp_path, done + 10))
    assert again.returncode == 0, again.stdout + again.stderr
    assert jobs.job("second")["status"] == "SUCCEEDED"
    assert "held-out loss of this model" in again.stdout
    assert f"lm goes on after step {done}" in again.stdout + again.stderr
    rows = pq.read_table(tmp_path / "lm/metrics.parquet").to_pylist()
    assert [row["step"] for row in rows] == list(range(done + 10))
    assert jobs.left() == NOTHING
