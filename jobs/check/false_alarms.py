"""Slowness without harm: no worker may be taken for lost, and no step may be done again.

    python jobs/check/false_alarms.py [--seconds 60] [--kinds slow stop link load]

    slow    a stage takes 20 times as long as before
    stop    every stage, and then the driver, gets SIGSTOP, and SIGCONT after a second, again and again
    link    the wire between the two stages' nodes has 20 Mbit/s, and another flow takes all of it, both ways
    load    four processes that compute on every processor

One run of two stages on two raylets in network namespaces gets one after the other, each for so many seconds; without
root it is on one raylet, and ``link`` is left out. An alarm is any event of the table in docs/design/0039, and any
failure, recovery or move. In the end the stages must be the processes that they were in the beginning, and parameters
those of a run in threads, to the bit. The last line is JSON. Exit status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from tests.runtime.raylets import TOKEN

os.environ |= TOKEN  # before Ray is imported, which looks once

import ray
import torch
from ray.train import FailureConfig, ScalingConfig

from jobs.lib.faults import driver_processes, events
from jobs.lib.hosts import Hosts, hosts, missing
from jobs.lib.machine import machine_line
from jobs.lib.slow_layers import slow_down, trainer_of_layers
from raypipe import PipelineTrainer, RunHandle, load_state_dict
from raypipe.planner.liveness import STOPPED_S, TABLE
from tests import processes
from tests.runtime.raylets import private_cluster

STAGES, LAYERS, LAYER_S = 2, 8, 0.001
ENDLESS, FIRST_STEPS = 1_000_000, 20
SLOWER, STOP_S, LINK_MBIT, PROCESSES_PER_CORE = 20.0, 1.0, 20.0, 4
WAIT_S = 600.0
ALARMS = {row.failure for row in TABLE} | {
    "died",
    "failure",
    "recovery",
    "move",
    "resize",
    "take over",
    "not taken over",
}
COMPUTE = "while True: sum(range(100_000))"


class Run:
    """One that is disturbed, and what has been seen of it."""

    def __init__(self, handle: RunHandle, folder: Path, slow: Path, lab: Hosts | None) -> None:
        self.handle, self.folder, self.slow, self.lab = handle, folder, slow, lab
        self.longest_stop_s = 0.0

    def stages(self) -> list[int]:
        """Return the processes of the stages."""
        return [stage["process"] for stage in self.handle.status().stages]

    def reach(self, step: int) -> None:
        """Wait for a step.

        Raises:
            TimeoutError: it was not done in time.
        """
        deadline_s = time.monotonic() + WAIT_S
        while (status := self.handle.status()).step < step:
            if time.monotonic() > deadline_s or status.state == "failed":
                raise TimeoutError(f"step {step} was not done: {status}")
            time.sleep(0.05)

    def stop_for_a_second(self, process: int) -> None:
        begin_s = time.monotonic()
        os.kill(process, signal.SIGSTOP)
        try:
            time.sleep(STOP_S)
        finally:
            os.kill(process, signal.SIGCONT)
        self.longest_stop_s = max(self.longest_stop_s, time.monotonic() - begin_s)


# Each kind is a context that disturbs the run while it lasts, or yields a function that is called repeatedly.


@contextlib.contextmanager
def slow(run: Run) -> Iterator[None]:
    process = run.stages()[1]
    slow_down(run.slow, process, SLOWER)
    yield
    slow_down(run.slow, process, 1.0)


@contextlib.contextmanager
def stop(run: Run) -> Iterator[Callable[[], None]]:
    def each_once() -> None:
        for process in [*run.stages(), *driver_processes()]:
            run.stop_for_a_second(process)
            time.sleep(STOP_S)

    yield each_once


@contextlib.contextmanager
def link(run: Run) -> Iterator[None]:
    assert run.lab is not None
    first, second = run.lab.workers
    with run.lab.saturated(first, second, LINK_MBIT):
        yield


@contextlib.contextmanager
def load(run: Run) -> Iterator[None]:
    count = PROCESSES_PER_CORE * len(os.sched_getaffinity(0))
    computing = [subprocess.Popen([sys.executable, "-c", COMPUTE]) for _ in range(count)]
    try:
        yield
    finally:
        for process in computing:
            process.kill()
            process.wait()


KINDS: dict[str, Callable[[Run], Any]] = {"slow": slow, "stop": stop, "link": link, "load": load}


def disturbed(run: Run, kind: str, seconds: float) -> list[str]:
    """Disturb the run by one kind, and return the alarms until it has trained on."""
    before, first, begin_s = len(events(run.folder)), run.handle.status().step, time.monotonic()
    with KINDS[kind](run) as again:
        while time.monotonic() < begin_s + seconds:
            (again or (lambda: time.sleep(0.1)))()
        done, took_s = run.handle.status().step - first, time.monotonic() - begin_s
    run.reach(run.handle.status().step + FIRST_STEPS)
    found = [event for event in events(run.folder)[before:] if event["decision"] in ALARMS]
    stops = f", the longest stop {run.longest_stop_s:.2f} s" if kind == "stop" else ""
    print(f"{kind}: {done} steps in {took_s:.0f} s{stops}, alarms: {found}; {machine_line()}", flush=True)
    return [f"{kind}: {event['decision']}: {event['reason']}" for event in found]


def trainer(folder: Path, slow_folder: Path, name: str, layer_s: float) -> PipelineTrainer:
    """Make a trainer of two stages, on one CPU each, without re-partitioning."""
    return trainer_of_layers(
        LAYERS, layer_s, slow_folder, folder, name, FailureConfig(max_failures=-1),
        scaling=ScalingConfig(num_workers=STAGES, resources_per_worker={"CPU": 1}),
        num_stages=STAGES, minibatch_size=16, num_microbatches=4, partitioner="parameters", retune_interval_steps=0,
    )  # fmt: skip


def check(folder: Path, lab: Hosts | None, kinds: list[str], seconds: float) -> dict[str, Any]:
    """Disturb a run by all kinds, one after the other, and return the figures."""
    slow_folder = folder / "slow"
    slow_folder.mkdir()
    handle = trainer(folder, slow_folder, "disturbed", LAYER_S).start(ENDLESS)
    run = Run(handle, folder / "disturbed", slow_folder, lab)
    alarms: list[str] = []
    try:
        run.reach(FIRST_STEPS)
        begun = run.stages()
        for kind in kinds:
            alarms += disturbed(run, kind, seconds)
        same = run.stages() == begun
        handle.stop()
        result = handle.wait(timeout_s=WAIT_S)
        steps = handle.status().step
    finally:
        handle.close()
    alone = trainer(folder, slow_folder, "alone", 0.0).fit(steps, local=True, progress=False)
    found, wanted = load_state_dict(result.checkpoint), load_state_dict(alone.checkpoint)
    differing = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    return {
        "alarms": alarms, "steps": steps, "same_processes": same, "different": differing,
        "longest_stop_s": round(run.longest_stop_s, 2),
    }  # fmt: skip


@contextlib.contextmanager
def cluster() -> Iterator[Hosts | None]:
    """Start two nodes with a wire between them, or one if namespaces are missing, and connect this process."""
    if reason := missing():
        print(f"on one raylet, without link: {reason}")
        with private_cluster() as home:
            home.start(cpus=STAGES)
            with connected(home.address):
                yield None
        return
    with hosts(STAGES) as lab, connected(lab.address):
        yield lab


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    node = address.split(":")[0]
    ray.init(
        address=address, _node_ip_address=node, namespace="raypipe", log_to_driver=False, logging_level="ERROR"
    )  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()


def main() -> int:
    """Run all kinds that this machine allows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    options = parser.parse_args()
    processes.adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="false-alarms-") as made, cluster() as lab:
        kinds = [kind for kind in options.kinds if kind != "link" or lab is not None]
        found = check(Path(made), lab, kinds, options.seconds)
    if found["longest_stop_s"] >= STOPPED_S:
        print(f"A stop took {found['longest_stop_s']} s on this busy machine, and is rightly reported as a hang.")
    print(json.dumps({"check": "false_alarms", "figures": {"kinds": kinds, **found}}))
    return 0 if not found["alarms"] and found["same_processes"] and not found["different"] else 1


if __name__ == "__main__":
    sys.exit(main())
