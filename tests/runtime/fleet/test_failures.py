"""Failures of workers: release of the others, descriptions of an ended process, and the root cause."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from raypipe.errors import RanOut, StageLostError
from raypipe.planner.liveness import Diagnosis
from raypipe.runtime.fleet import failures
from raypipe.runtime.fleet.failures import ending, leave_work, ran_out_bytes, root_cause
from raypipe.runtime.fleet.roster import GRACE_S, Member
from raypipe.runtime.nodes.node_watch import Ended
from raypipe.runtime.worker.heartbeat import Heartbeat

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


@ray.remote(num_cpus=0, concurrency_groups={"control": 2})
class Slow:
    """A stage actor of which only this is asked."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    @ray.method(concurrency_group="control")
    def abort(self, term: int, links: int, reason: str) -> None:
        time.sleep(self._seconds)

    def lives(self) -> bool:
        return True

    def work(self, seconds: float) -> None:
        time.sleep(seconds)


def heartbeat(longest_s: float) -> Heartbeat:
    return Heartbeat(1, "0F3", 0.0, True, longest_s, 1, 1.0, 1)


@pytest.mark.slow
def test_a_slow_answer_ends_nobody_and_none_at_all_does(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, stuck = (Member(Slow.remote(seconds)) for seconds in (GRACE_S + 0.5, 60.0))
    assert ray.get([slow.actor.lives.remote(), stuck.actor.lives.remote()], timeout=60) == [True, True]
    leave_work([slow], {}, term=1, links=1)
    assert not slow.lost
    monkeypatch.setattr(failures, "ANSWER_S", 0.5)
    leave_work([slow, stuck], {}, term=1, links=1)
    assert stuck.lost
    for member in (slow, stuck):
        ray.kill(member.actor)


@pytest.mark.slow
def test_who_computes_for_long_by_nature_is_waited_for(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as long as its longest action so far, or as the plan's: a forward cannot be broken off."""
    monkeypatch.setattr(failures, "SETTLE_S", 0.1)
    worker = Member(Slow.remote(0.0), heartbeat=heartbeat(longest_s=15.0))
    assert ray.get(worker.actor.lives.remote(), timeout=60)
    leave_work([worker], {worker.actor.work.remote(1.5): 0}, term=1, links=1)
    worker.heartbeat = heartbeat(longest_s=0.0)
    leave_work([worker], {worker.actor.work.remote(1.5): 0}, term=1, links=1, planned_s=15.0)
    assert not worker.lost
    leave_work([worker], {worker.actor.work.remote(30.0): 0}, term=1, links=1)
    assert worker.lost
    ray.kill(worker.actor)


RAY = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: _StageActor\n\tactor_id: 0123\n"
    "\tpid: 4711\n\tnamespace: raypipe\n\tip: 10.0.0.2\n"
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was "
    "killed by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed "
    "unexpectedly due to SIGSEGV or another unexpected error."
)
PRESSURE = RAY.partition("The actor is")[0] + (
    "Task was killed due to the node running low on memory.\nMemory on the node (IP: 10.0.0.2) was 15.2GB / 16GB"
)
NODE = RAY.partition("The actor is")[0] + "The actor died because its node has died. Node Id: 0123"


def ended(signal: str = "", status: int | None = None, *, oom: bool = False) -> Ended:
    return Ended(signal, status, oom, 3 << 30, 0.1)


@pytest.mark.parametrize(
    ("found", "said", "words"),
    [
        (ended("SIGKILL"), RAY, ["killed by SIGKILL on box", "not by the kernel's OOM killer", "Look for the sender"]),
        (ended("SIGKILL", oom=True), RAY, ["the kernel's OOM killer on box", "3.0 GiB", "memory_limit_bytes"]),
        (ended("SIGSEGV"), RAY, ["crashed with SIGSEGV", "native code", "worker-*.err"]),
        (ended("SIGTERM"), RAY, ["ended by SIGTERM on box"]),
        (ended(status=3), RAY, ["exited with status 3 on box", "The actor is dead because"]),
        (ended(), RAY, ["died on box: The actor is dead because its worker process has died"]),
        (None, RAY, ["died on box: The actor is dead because its worker process has died"]),
        (None, NODE, ["lost with its node box"]),
        (None, PRESSURE, ["Ray's memory monitor on box", "memory_limit_bytes"]),
        (ended("SIGKILL"), PRESSURE, ["Ray's memory monitor on box"]),
        (None, "", ["died on box: the reason is unknown"]),
    ],
)
def test_an_ending(found: Ended | None, said: str, words: list[str]) -> None:
    text = ending(found, said, "box")
    assert [word for word in words if word not in text] == [], text


@pytest.mark.parametrize(
    ("found", "said", "held"),
    [
        (ended("SIGKILL", oom=True), RAY, 3 << 30),
        (ended("SIGKILL"), PRESSURE, 3 << 30),
        (None, PRESSURE, 0),
        (ended("SIGKILL"), RAY, None),
        (None, NODE, None),
    ],
)
def test_whether_memory_was_why(found: Ended | None, said: str, held: int | None) -> None:
    assert ran_out_bytes(found, said) == held


class _Works:
    def work(self) -> None:
        time.sleep(600.0)


def test_whose_memory_was_not_enough_is_known_of_a_killed_process(local_ray: None) -> None:
    actor: Any = ray.remote(num_cpus=0)(_Works).remote()
    ref = actor.work.remote()
    ray.kill(actor)
    with pytest.raises(RayActorError):
        ray.get(ref, timeout=60.0)
    for diagnosis, ran_out in (
        (Diagnosis("died", True, "ended", 0.1, 5), RanOut(1, 5)),
        (Diagnosis("died", True, "ended", 0.1), None),
    ):
        error = root_cause({ref: 1}, ["Stage 0", "Stage 1"], 3, lambda worker, message, found=diagnosis: found)
        assert isinstance(error, StageLostError)
        assert error.ran_out == ran_out
