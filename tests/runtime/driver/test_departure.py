"""A driver whose own node goes: it moves behind a step, or stays and has checkpoints saved; nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from raypipe.run.requests import Requests
from raypipe.runtime.driver import driver_failover
from raypipe.runtime.driver.driver_failover import Departure
from raypipe.runtime.nodes import preemption
from raypipe.runtime.nodes.preemption import DrainWatch
from tests import processes
from tests.runtime.raylets import TOKEN, private_cluster
from tests.waiting import wait_until

WAIT_S = 60.0


class Told:
    """What a driver tells of its departure, and how often it is started again."""

    def __init__(self, stays: str) -> None:
        self.requests, self.alerts, self.events, self.restarts = Requests(), list[str](), list[str](), 0
        self.made = Departure(stays, self.requests, self._end, self.alerts.append, self._event)

    def _end(self) -> None:
        self.restarts += 1

    def _event(self, decision: str, reason: str) -> None:
        self.events.append(decision)


def test_it_moves_when_the_loop_is_behind_a_step() -> None:
    told = Told("")
    told.made.goes(None, "")
    assert told.restarts == 0
    told.requests.leave({"node"})  # of stages, which this driver has to move first
    assert told.requests.take_hand_over() is None
    told.requests.take_leaving()
    told.requests.checkpoint()  # that somebody waits for
    assert told.requests.take_hand_over() is None
    assert told.requests.take_checkpoint()
    go = told.requests.take_hand_over()
    assert go is not None
    go()
    assert told.requests.take_hand_over() is None
    assert (told.restarts, told.events) == (1, ["driver moves"])
    assert not told.requests.wants_drain


@pytest.mark.parametrize(
    ("of_run", "of_node"),
    [("FailureConfig(max_failures=0) has Ray start no driver again", ""), ("", "Ray has started it here already")],
)
def test_a_driver_that_stays_saves_checkpoints_now_and_before_the_node_goes(
    monkeypatch: pytest.MonkeyPatch, of_run: str, of_node: str
) -> None:
    monkeypatch.setattr(driver_failover, "BEFORE_S", 0.1)
    told = Told(of_run)
    told.made.goes(time.time() + 0.4, of_node)
    assert told.requests.take_checkpoint()
    wait_until(told.requests.take_checkpoint, WAIT_S)
    assert told.requests.take_hand_over() is None
    assert told.events == ["driver stays"]
    assert (of_run or of_node) in told.alerts[0]
    told.made.close()


def test_the_node_of_the_driver_is_watched_though_no_stage_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    draining: dict[str, float | None] = {}
    monkeypatch.setattr(preemption, "DRAINS_EVERY_S", 0.01)
    monkeypatch.setattr(preemption, "draining_nodes", lambda: dict(draining))
    left: list[Any] = []
    told, goes = list[tuple[str, str]](), list[tuple[float | None, str]]()
    watch = DrainWatch(
        lambda: {"stages"}, dict, left.append, lambda *of, **numbers: told.append(of), "driver",
        lambda deadline_s, stays: goes.append((deadline_s, stays)),
    )  # fmt: skip
    try:
        wait_until(lambda: watch._looked, WAIT_S)
        draining.update({"driver": time.time() + 99.0, "nobody's": None})
        wait_until(lambda: bool(goes), WAIT_S)
        assert goes == [(draining["driver"], "")]
        assert (left, told) == ([], [("drain", "Ray drains driver")])
        draining["stages"] = None
        wait_until(lambda: bool(left), WAIT_S)
        assert (left, len(goes)) == ([{"stages"}], 1)
    finally:
        watch.close()


SCRIPT = """
import json, sys, time
from pathlib import Path
import ray
import raypipe
from ray._private import state
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from raypipe.runtime.driver.driver import driver_name
from raypipe.runtime.nodes.preemption import drain_node
from tests.runtime.fleet.test_recovery import as_undisturbed, events, reached, surviving

folder, steps = Path(sys.argv[1]), 10**6
ray.init(address="auto", namespace="raypipe", log_to_driver=False, logging_level="ERROR")
node, = (one["NodeID"] for one in ray.nodes() if "aside" in one["Resources"])
there = NodeAffinitySchedulingStrategy(node, soft=False)

@ray.remote(num_cpus=0)
def begin():
    surviving(folder, "moved", "noisy", verify="off").start(steps, detached=True)

ray.get(begin.options(scheduling_strategy=there).remote())
handle, run = raypipe.attach("moved"), folder / "moved"
reached(handle, 100)  # and the driver has looked which nodes were to go before
holder = lambda: json.loads((run / "lease.json").read_text())["holder"]["pid"]
before, driver = handle.status().stages, holder()
(at,) = (one["Address"]["NodeID"] for one in state.actors().values() if one["Name"] == driver_name("moved"))
assert at == node, "Ray has not put the driver where the run was started"
begin_s = time.monotonic()
refused = drain_node(node, "the pod stops", time.time() + 110)
assert not refused, refused
deadline_s = begin_s + 120
taken = lambda: [one["step"] for one in events(run, "take over") if "step" in one]
while not taken() or holder() == driver:
    assert time.monotonic() < deadline_s, handle.status()
    time.sleep(0.05)
took_s = time.monotonic() - begin_s
reached(handle, taken()[-1] + 20)
after = handle.status().stages
alive = lambda: any(one["Alive"] for one in ray.nodes() if one["NodeID"] == node)
deadline_s = time.monotonic() + 60
while alive() and time.monotonic() < deadline_s:  # Ray ends a drained node that has nothing to do any more
    time.sleep(0.1)
handle.stop()
result = handle.wait(timeout_s=240)
done = handle.status().step
print(f"taken over after {took_s:.1f} s", file=sys.stderr)
print(json.dumps({
    "differ": as_undisturbed(folder, result.checkpoint, "noisy", done, verify="off"),
    "same": [one["process"] for one in after] == [one["process"] for one in before],
    "left": {one["decision"]: one["reason"] for one in events(run, "driver moves")} and not alive(),
    "failures": len(events(run, "failure")),
    "missing": sorted(set(range(done)) - set(result.metrics_dataframe["step"])),
}))
"""


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_driver_leaves_a_node_that_ray_drains(tmp_path: Path) -> None:
    """Its stages are elsewhere; they go on in the same processes under the next driver."""
    with private_cluster() as home:
        home.start(cpus=2, **TOKEN)
        home.start(cpus=0, options=["--resources", '{"aside": 1}'], **TOKEN)
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path)], env={**os.environ, **TOKEN, "RAY_ADDRESS": home.address},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            said, complaints = process.communicate(timeout=400)
        finally:
            process.kill()
        assert process.returncode == 0, said[-2000:] + complaints[-4000:]
        print(complaints)
        found: dict[str, Any] = processes.said_last(said)
    assert found == {"differ": [], "same": True, "left": True, "failures": 0, "missing": []}
