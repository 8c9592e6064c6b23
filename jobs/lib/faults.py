"""Faults of nine kinds, caused in a run that trains, and their consequences.

    sigkill   a stage's process is killed
    sigstop   a stage's process is stopped for good
    again     a stage is killed; while the run recovers, another stage or the driver is killed
    pair      a stage and the holder of its copy are killed at once: the run rolls back to its checkpoint
    driver    the driver's process is killed; Ray starts it again, and stages continue without a rollback
    raylet    a raylet is killed, so that its node is lost with all its processes; another node replaces it
    drain     Ray drains a node that has a stage; when the stage has moved, the node is removed and replaced
    link      a wire between two nodes with stages is cut for seconds; connections survive that, or are reset
    replica   a replica's process is killed while its stage has all replicas; the fault ends when a new one has joined

The kinds raylet, drain and link need hosts (jobs/lib/hosts.py); replica needs a run with replicas.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

import raypipe
from jobs.lib.hosts import Hosts
from raypipe.errors import StageError
from raypipe.planner.copy_interval import holders
from raypipe.runtime.driver.driver import driver_name
from raypipe.runtime.nodes.preemption import drain_node
from raypipe.runtime.worker.places import living
from tests.processes import alive, descendants

__all__ = ["ANYWHERE", "KINDS", "Fault", "Faults", "LimitReachedError", "driver_processes", "events"]

ANYWHERE = ("sigkill", "sigstop", "again", "pair", "driver")
KINDS = (*ANYWHERE, "raylet", "drain", "link", "replica")
WAIT_S = 300.0
ON_STEPS = 3
"""Steps after a fault after which the run counts as training again."""
DRIVER = rb"ray::.*DriverActor"
DRAIN_S = 30.0
MOST_CUT_S = 6.0


class LimitReachedError(Exception):
    """The deadline passed before the run trained again."""


@dataclass
class Fault:
    """One fault.

    Attributes:
        step: number of steps done when the fault was caused.
        seconds: seconds from the fault until the run trained again.
        pause_s: after the loss of a replica, seconds until the other replicas were regrouped.
        hit: processes that were killed or stopped, directly or with their node.
        kept, lost: numbers of the other stages' processes that the run still had, or no longer had, afterwards.
    """

    kind: str
    step: int
    seconds: float = 0.0
    hit: set[int] = field(default_factory=set)
    kept: int = 0
    lost: int = 0
    pause_s: float = 0.0


class Faults:
    """Causes faults in one run.

    Args:
        folder: folder of the run.
        lab: hosts of the run; None if the run is on this machine's Ray alone.
        dice: source of the random choices.
        deadline_s: time on the monotonic clock after which LimitReachedError is raised.
        replicas: number of workers of each stage; () without replicas.
    """

    def __init__(
        self,
        handle: raypipe.RunHandle,
        folder: Path,
        lab: Hosts | None,
        dice: random.Random,
        deadline_s: float,
        replicas: Sequence[int] = (),
    ) -> None:
        self._homes = [stage for stage, count in enumerate(replicas) for _ in range(count)]
        self._handle, self._folder, self._lab, self._dice = handle, folder, lab, dice
        self._deadline_s, self._begin_s = deadline_s, time.monotonic()
        self.done: list[Fault] = []

    def strike(self, kind: str) -> None:
        """Cause one fault at a random moment; return when the run trains again."""
        time.sleep(self._dice.uniform(0.2, 1.0))
        before = self._actors()
        fault = Fault(kind, self._handle.status().step)
        self.done.append(fault)
        begin_s = time.monotonic()
        with getattr(self, f"_{kind}")(fault):
            self._trains_again(fault)
            fault.seconds = time.monotonic() - begin_s
        after = self._actors()
        others = {process: actor for process, actor in before.items() if process not in fault.hit}
        fault.kept = sum(after.get(process) == actor for process, actor in others.items())
        fault.lost = len(others) - fault.kept

    # Each kind is a context: entering it causes the fault, the run recovers inside, leaving it repairs the rest.

    @contextlib.contextmanager
    def _sigkill(self, fault: Fault) -> Iterator[None]:
        with self._one_more("recovery"):
            self._signal(fault, signal.SIGKILL, self._a_stage()["process"])
        yield

    @contextlib.contextmanager
    def _sigstop(self, fault: Fault) -> Iterator[None]:
        with self._one_more("recovery"):
            self._signal(fault, signal.SIGSTOP, self._a_stage()["process"])
        yield

    @contextlib.contextmanager
    def _again(self, fault: Fault) -> Iterator[None]:
        with self._one_more("failure"):
            victim = self._a_stage()["process"]
            others = [stage["process"] for stage in self._stages() if stage["process"] != victim]
            self._signal(fault, signal.SIGKILL, victim)
        time.sleep(self._dice.uniform(0.0, 2.0))
        with self._one_more("recovery", "start"):
            if self._dice.random() < 0.25:
                self._kill_driver(fault)
            else:
                self._signal(fault, signal.SIGKILL, self._dice.choice(others))
        yield

    @contextlib.contextmanager
    def _pair(self, fault: Fault) -> Iterator[None]:
        with self._one_more("recovery"):
            stages = self._stages()
            holder_of = holders([stage["node"] for stage in stages])
            victim = self._dice.randrange(len(stages))
            both = [stages[worker]["process"] for worker in (victim, holder_of[victim]) if worker is not None]
            for process in both:
                self._signal(fault, signal.SIGKILL, process)
        yield

    @contextlib.contextmanager
    def _driver(self, fault: Fault) -> Iterator[None]:
        with self._one_more("start"):
            self._kill_driver(fault)
        yield

    @contextlib.contextmanager
    def _raylet(self, fault: Fault) -> Iterator[None]:
        lab = self._lab_here()
        with self._one_more("recovery", "start"):
            host = self._host(self._a_stage())
            fault.hit |= {stage["process"] for stage in self._stages() if self._host(stage) == host}
            with_it = " with the driver" if lab.processes(host, DRIVER) else ""
            self._say(fault, f"the raylet of host {host} is killed, {len(fault.hit)} stages are there{with_it}")
            lab.kill_raylet(host)
        yield
        lab.clear(host)
        lab.start(host)

    @contextlib.contextmanager
    def _drain(self, fault: Fault) -> Iterator[None]:
        lab = self._lab_here()
        with self._one_more("move", "recovery", "start"):
            stage = self._a_stage()
            host = self._host(stage)
            fault.hit |= {one["process"] for one in self._stages() if self._host(one) == host}
            self._say(fault, f"host {host} is drained, {len(fault.hit)} stages are there")
            refused = drain_node(stage["node"], "chaos", time.time() + DRAIN_S)
            if refused:
                raise RuntimeError(f"Ray refuses to drain: {refused}")
        yield
        lab.clear(host)
        lab.start(host)

    @contextlib.contextmanager
    def _link(self, fault: Fault) -> Iterator[None]:
        lab = self._lab_here()
        found = sorted({self._host(stage) for stage in self._stages()})
        a, b = self._dice.sample(found if len(found) > 1 else [0, *found], 2)
        seconds, reset = self._dice.uniform(0.2, MOST_CUT_S), self._dice.random() < 0.5
        self._say(
            fault, f"hosts {a} and {b} are cut off for {seconds:.1f} s, connections {'reset' if reset else 'kept'}"
        )
        lab.cut(a, b)
        try:
            time.sleep(seconds)
        finally:
            lab.heal(a, b, reset=reset)
        yield

    @contextlib.contextmanager
    def _replica(self, fault: Fault) -> Iterator[None]:
        stages, homes = self._stages(), self._homes
        victim = self._dice.choice([at for at, stage in enumerate(homes) if homes.count(stage) > 1])
        struck_s = time.time()
        with self._one_more("regroup", "recovery"):
            self._signal(fault, signal.SIGKILL, stages[victim]["process"])
        fault.pause_s = events(self._folder, "regroup", "recovery")[-1]["time"] - struck_s
        yield
        self._until(lambda: len(self._stages()) == len(homes), "another replica has joined")

    # Helpers of the faults.

    def _signal(self, fault: Fault, number: signal.Signals, process: int) -> None:
        fault.hit.add(process)
        self._say(fault, f"{number.name} to the stage in process {process}")
        os.kill(process, number)

    def _kill_driver(self, fault: Fault) -> None:
        for process in driver_processes():
            self._say(fault, f"SIGKILL to the driver in process {process}")
            os.kill(process, signal.SIGKILL)

    def _say(self, fault: Fault, what: str) -> None:
        seconds = time.monotonic() - self._begin_s
        print(f"{seconds:7.2f} s, fault {len(self.done)} {fault.kind}, step {fault.step}: {what}", flush=True)

    def _lab_here(self) -> Hosts:
        if self._lab is None:
            raise RuntimeError("This kind of fault needs hosts of its own.")
        return self._lab

    def _stages(self) -> tuple[dict[str, Any], ...]:
        """Return the status of the stages, by worker."""
        return self._handle.status().stages

    def _a_stage(self) -> dict[str, Any]:
        # The status of a stage that has just moved may still have its old process.
        self._until(lambda: all(alive(stage["process"]) for stage in self._stages()), "all stages have processes")
        return self._dice.choice(self._stages())

    def _host(self, stage: dict[str, Any]) -> int:
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        return self._lab_here().host_at(addresses[stage["node"]])

    def _actors(self) -> dict[int, str]:
        """Return the ids of the actors of the stages in use, by process."""
        actors = [actor for actor, _ in living(driver_name(self._handle.name)).values()]
        said = {actor: actor.facts.remote() for actor in actors}
        ray.wait(list(said.values()), num_returns=len(said), timeout=10.0)
        found = {}
        for actor, ref in said.items():
            with contextlib.suppress(RayError):
                if (facts := ray.get(ref, timeout=0)) is not None:
                    found[facts["process"]] = actor._actor_id.hex()
        used = {stage["process"] for stage in self._stages()}
        return {process: actor for process, actor in found.items() if process in used}

    @contextlib.contextmanager
    def _one_more(self, *decisions: str) -> Iterator[None]:
        """Wait, after the block has run, for one of these events."""
        before = self._count(*decisions)
        yield
        self._until(lambda: self._count(*decisions) > before, f"an event {' or '.join(decisions)}")

    def _trains_again(self, fault: Fault) -> None:
        # A driver that takes over begins at step 0, and goes to the run's step before it has recovered the stages.
        step = max(fault.step, self._handle.status().step)
        self._until(lambda: self._handle.status().step >= step + ON_STEPS, "the run trained again")

    def _count(self, *decisions: str) -> int:
        return sum(event["decision"] in decisions for event in events(self._folder))

    def _until(self, done: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not done():
            status = self._handle.status()
            if status.state not in ("running", "starting"):
                raise StageError(f"The run is {status.state} before {what}: {status.message}")
            if time.monotonic() > min(deadline_s, self._deadline_s):
                raise LimitReachedError(f"no time is left before {what}: {status}")
            time.sleep(0.05)


def driver_processes() -> list[int]:
    """List the driver processes among the descendants of this process; drivers of other programs are not included."""
    return [pid for pid, command in descendants(os.getpid()).items() if re.search(DRIVER, command.encode())]


def events(folder: Path, *decisions: str) -> list[dict[str, Any]]:
    """Read the events of a run from events.jsonl: those with one of these decisions, or all if none is given."""
    file = folder / "events.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
    return [event for event in found if not decisions or event["decision"] in decisions]
