"""jobs/train_lm.py as people submit it: a head with token auth, ``ray job submit``, and what is left afterwards."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest

from tests import processes

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).with_name("ray"))
SMALL = ["--stages", "2", "--minibatch-size", "8", "--microbatches", "4", "--context", "32", "--width", "32"]

LEFT = """
import json, time, ray
ray.init(log_to_driver=False, logging_level="ERROR")
deadline_s = time.monotonic() + 30
while True:
    actors = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True)]
    groups = [g["state"] for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
    free, total = ray.available_resources(), ray.cluster_resources()
    left = {"actors": [a for a in actors if a.startswith("raypipe/")], "groups": groups,
            "busy_cpus": total["CPU"] - free.get("CPU", 0),
            "store_bytes": total["object_store_memory"] - free.get("object_store_memory", 0)}
    if not any(left.values()) or time.monotonic() > deadline_s:
        break
    time.sleep(0.1)
print(json.dumps(left))
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Head(NamedTuple):
    """A cluster of one node, and what its clients need to know."""

    environment: dict[str, str]
    process: subprocess.Popen[str]

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
        found: dict[str, object] = json.loads(self.run(sys.executable, "-c", LEFT).stdout.splitlines()[-1])
        return found


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    known = set(processes.descendants(os.getpid()))
    folder = tmp_path_factory.mktemp("head")
    port, dashboard, client = free_port(), free_port(), free_port()
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ADDRESS": f"127.0.0.1:{port}",
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "PYTHONPATH": str(ROOT),
    }
    command = [
        RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=2",
        "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}",
        f"--dashboard-agent-listen-port={free_port()}", f"--metrics-export-port={free_port()}",
        f"--temp-dir=/tmp/rp{port}", "--disable-usage-stats",
    ]  # fmt: skip
    log = (folder / "head.log").open("w")
    starting = {name: value for name, value in environment.items() if name != "RAY_ADDRESS"}
    process = subprocess.Popen(command, env=starting, stdout=log, stderr=subprocess.STDOUT, text=True)
    made = Head(environment, process)
    try:
        deadline_s = time.monotonic() + 240
        # The dashboard answers before the agent that runs jobs does.
        while made.run(RAY, "job", "submit", "--", "true").returncode != 0:
            assert process.poll() is None, (folder / "head.log").read_text()
            assert time.monotonic() < deadline_s, (folder / "head.log").read_text()
        yield made
    finally:
        process.send_signal(signal.SIGTERM)
        processes.end(processes.survivors(os.getpid(), known, 5.0))
        process.wait(30)
        log.close()
        assert processes.survivors(os.getpid(), known, 20.0) == {}
        subprocess.run(["rm", "-rf", f"/tmp/rp{port}"], check=True)


NOTHING = {"actors": [], "groups": [], "busy_cpus": 0, "store_bytes": 0}


def train(folder: Path, steps: int) -> list[str]:
    where = ["--data", str(folder / "data"), "--corpus-bytes", "200000", "--storage", str(folder), "--name", "lm"]
    return ["jobs/train_lm.py", *SMALL, *where, "--steps", str(steps)]


def test_a_job_whose_stage_raises_fails(head: Head, tmp_path: Path) -> None:
    done = head.submit("bad", "tests/runtime/failing_job.py", str(tmp_path))
    assert done.returncode == 1
    assert "the user's own mistake" in done.stdout + done.stderr
    assert head.job("bad")["status"] == "FAILED"
    assert head.left() == NOTHING


def test_a_job_is_stopped_goes_on_when_it_is_submitted_again_and_succeeds(head: Head, tmp_path: Path) -> None:
    steps = 4000
    assert head.submit("first", *train(tmp_path, steps), wait=False).returncode == 0
    deadline_s = time.monotonic() + 120
    while "grad norm" not in head.job("first/logs")["logs"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    assert head.run(RAY, "job", "stop", "first").returncode == 0
    assert head.job("first")["status"] == "STOPPED"
    assert head.left() == NOTHING
    said = head.job("first/logs")["logs"]
    assert "SIGTERM: stopping after the step that is running" in said, said
    (saved,) = (tmp_path / "lm/checkpoints").glob("step_*/manifest.json")
    done = json.loads(saved.read_text())["step"]
    assert 0 < done < steps
    again = head.submit("second", *train(tmp_path, done + 10))
    assert again.returncode == 0, again.stdout + again.stderr
    assert head.job("second")["status"] == "SUCCEEDED"
    assert "held-out loss of this model" in again.stdout
    assert f"lm goes on after step {done}" in again.stdout + again.stderr
    rows = pq.read_table(tmp_path / "lm/metrics.parquet").to_pylist()
    assert [row["step"] for row in rows] == list(range(done + 10))
    assert head.left() == NOTHING
