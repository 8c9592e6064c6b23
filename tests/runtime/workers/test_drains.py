"""Nodes that are about to go, by Ray's own list: what is put there is read there. On a cluster of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from raypipe.runtime.workers import drains
from tests.runtime.raylets import TOKEN, private_cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

PROGRAM = """
import json, sys, time, ray
from raypipe.runtime.workers.drains import drain_node, draining_nodes
ray.init(address=sys.argv[1], log_to_driver=False)
head = ray.get_runtime_context().get_node_id()
other, = [node["NodeID"] for node in ray.nodes() if node["NodeID"] != head]

@ray.remote(num_cpus=0, resources={})
class Lives:
    def node(self):
        return ray.get_runtime_context().get_node_id()

affine = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(other, soft=False)
lives = Lives.options(scheduling_strategy=affine).remote()
assert ray.get(lives.node.remote(), timeout=60) == other
before = draining_nodes()
refusals = [drain_node(other, "the spot market", 4e9)]
found = draining_nodes()
deadline_s = time.monotonic() + 30
while not found and time.monotonic() < deadline_s:
    time.sleep(0.1)
    found = draining_nodes()
print(json.dumps({"before": before, "refusals": refusals, "found": found, "other": other,
                  "lives": ray.get(lives.node.remote(), timeout=60)}))
"""


def test_a_node_is_drained_and_what_runs_there_goes_on() -> None:
    with private_cluster() as home:
        for _ in range(2):
            home.start(environment=TOKEN)
        program = subprocess.run(
            [sys.executable, "-c", PROGRAM, home.address],
            capture_output=True, text=True, timeout=200, env={**os.environ, **TOKEN},
        )  # fmt: skip
    assert program.returncode == 0, program.stderr
    said = json.loads(program.stdout.splitlines()[-1])
    assert said["before"] == {}
    assert said["refusals"] == [""]
    assert said["found"] == {said["other"]: 4e9}
    assert said["lives"] == said["other"]


def test_a_release_of_ray_without_it_is_met_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drains, "_module", lambda name: None)
    assert drains.draining_nodes() == {}
    assert "no interface for it" in drains.drain_node("ab" * 28, "", None)
