"""A node that Ray drains: its stages move to another node before it goes, and no bit changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.raylets import TOKEN, private_cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(420)]

SCRIPT = """
import json, sys, time
from pathlib import Path
import ray
from raypipe.runtime.workers.drains import drain_node
from tests.runtime.workers.test_recovery import STEPS, as_undisturbed, events, reached, surviving

folder = Path(sys.argv[1])
ray.init(address="auto", namespace="raypipe", log_to_driver=False, logging_level="ERROR")
handle = surviving(folder, "drained", "noisy", max_failures=0).start(6 * STEPS)
reached(handle, 5)
here = ray.get_runtime_context().get_node_id()
before = handle.status().stages
leaving = {stage["node"] for stage in before} - {here}
assert len(leaving) == 1, before
refused = drain_node(leaving.pop(), "a test", time.time() + 60)
assert refused == "", refused
deadline_s = time.monotonic() + 120
while not events(folder / "drained", "move"):
    assert time.monotonic() < deadline_s, handle.status()
    time.sleep(0.05)
after = handle.status().stages
result = handle.wait(timeout_s=240)
print(json.dumps({
    "differ": as_undisturbed(folder, result.checkpoint, "noisy", 6 * STEPS),
    "nodes": len({stage["node"] for stage in after} & {stage["node"] for stage in before}),
    "kept": len({stage["process"] for stage in after} & {stage["process"] for stage in before}),
    "drained": len(events(folder / "drained", "drain")),
}))
"""


def test_stages_leave_a_node_that_ray_drains(tmp_path: Path) -> None:
    with private_cluster() as home:
        home.start(cpus=1, **TOKEN)
        home.start(cpus=1, **TOKEN)
        home.start(cpus=1, **TOKEN)
        environment = {**os.environ, **TOKEN, "RAY_ADDRESS": home.address}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path)],
            env=environment, capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"differ": [], "nodes": 1, "kept": 1, "drained": 1}
