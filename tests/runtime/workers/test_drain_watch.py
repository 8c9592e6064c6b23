"""A node that goes, as Ray or its cloud says: its stages move to another node before that, and no bit changes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from raypipe.runtime.workers.drain_watch import DrainWatch
from raypipe.runtime.workers.notices import ASKED, Kind, Notice
from tests import processes
from tests.runtime.raylets import TOKEN, private_cluster
from tests.runtime.workers.test_notices import Aws, serving
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(420)]

SCRIPT = """
import json, os, subprocess, sys, time
from pathlib import Path
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from raypipe.runtime.workers.drains import draining_nodes
from raypipe.runtime.workers.notices import ASKED
from tests.runtime.workers.test_recovery import ENDLESS, as_undisturbed, events, reached, stopped, surviving

folder, moves = Path(sys.argv[1]), []
ray.init(address="auto", namespace="raypipe", log_to_driver=False, logging_level="ERROR")
handle = surviving(folder, "drained", "noisy", max_failures=0, sample_s=0.01).start(ENDLESS)
here = ray.get_runtime_context().get_node_id()
for by in ("cloud", "ray"):
    reached(handle, handle.status().step + 5)
    before = handle.status().stages
    node = min({stage["node"] for stage in before} - {here})
    if by == "ray":  # as a pod does it before it stops
        leave = [sys.executable, "jobs/clusters/leave.py", "worker", "--seconds", "110", "--node", node]
        leaving = subprocess.Popen(leave)
    else:
        there = ray.remote(num_cpus=0)(lambda: os.environ[ASKED])
        affinity = NodeAffinitySchedulingStrategy(node, soft=False)
        print("announce at", ray.get(there.options(scheduling_strategy=affinity).remote()), flush=True)
    deadline_s = time.monotonic() + 120
    while len(events(folder / "drained", "move")) <= len(moves):
        assert time.monotonic() < deadline_s, handle.status()
        time.sleep(0.05)
    after = handle.status().stages
    # One that is drained and has nothing to do ends, while the run goes on.
    known = node in draining_nodes() or not any(one["Alive"] for one in ray.nodes() if one["NodeID"] == node)
    if by == "ray":
        assert leaving.wait(150) == 0
    drain = events(folder / "drained", "drain")[len(moves)]
    moves.append({
        "nodes": len({stage["node"] for stage in after} & {stage["node"] for stage in before}),
        "kept": len({stage["process"] for stage in after} & {stage["process"] for stage in before}),
        "left": node not in {stage["node"] for stage in after},
        "ray_knows": known,
        "reason": drain["reason"].replace(node, "it"),
        "in_time": 0 < drain["seconds_left"] < 120,
    })
reached(handle, handle.status().step + 5)
steps, checkpoint = stopped(handle)
print(json.dumps({
    "differ": as_undisturbed(folder, checkpoint, "noisy", steps),
    "drains": len(events(folder / "drained", "drain")),
    "moves": moves,
}))
"""
MOVED = {"nodes": 1, "kept": 1, "left": True, "ray_knows": True, "in_time": True}


def test_stages_leave_a_machine_that_its_cloud_takes_away_and_a_node_that_ray_drains(tmp_path: Path) -> None:
    """One after the other: of four nodes, the stages end on the two that nobody takes."""
    with contextlib.ExitStack() as clouds, private_cluster() as home:
        servers = {server.url: server for server in (clouds.enter_context(serving(Aws)) for _ in range(4))}
        for url in servers:
            home.start(cpus=1, **TOKEN, **{ASKED: url})
        with script(home.address, tmp_path) as (process, result):
            line = process.stdout.readline()
            assert line.startswith("announce at "), line
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 120))
            action = json.dumps({"action": "terminate", "time": when})
            servers[line.split()[-1]].say("spot/instance-action", action)
            moves = [{**MOVED, "reason": reason} for reason in (f"AWS: terminate at {when}", "Ray drains it")]
            assert result() == {"differ": [], "drains": 2, "moves": moves}


@contextlib.contextmanager
def script(address: str, folder: Path) -> Any:
    """The process of SCRIPT, and what waits for the line in which it tells how it went."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder)],
        env={**os.environ, **TOKEN, "RAY_ADDRESS": address}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def result() -> dict[str, Any]:
        said, complaints = process.communicate(timeout=400)
        assert process.returncode == 0, said[-2000:] + complaints[-4000:]
        found: dict[str, Any] = processes.said_last(said)
        return found

    try:
        yield process, result
    finally:
        process.kill()
        process.communicate()


def test_a_pause_is_told_and_nobody_leaves(local_ray: None) -> None:
    node, left, told = ray.get_runtime_context().get_node_id(), [], []
    pause = Notice(Kind.PAUSES, time.time() + 60.0, "GCP: MIGRATE_ON_HOST_MAINTENANCE")
    heard = threading.Event()

    def event(decision: str, reason: str, **numbers: Any) -> None:
        told.append((decision, reason, numbers["node"], 50 < numbers["seconds_left"] <= 60))
        heard.set()

    watch = DrainWatch(lambda: {node}, lambda: {node: [pause, pause]}, left.append, event)
    wait_until(heard.is_set, 60.0)
    watch.close()
    assert told == [("notice", "GCP: MIGRATE_ON_HOST_MAINTENANCE: the machine pauses", node, True)]
    assert left == []
