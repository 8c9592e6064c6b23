"""How a stage ended, in words: what happened, where, and what to do."""

from __future__ import annotations

import pytest

from raypipe.runtime.workers.endings import ending, ran_out_bytes
from raypipe.runtime.workers.processes import Ended

pytestmark = pytest.mark.ray

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
        (ended("SIGKILL"), RAY, ["killed by SIGKILL on box", "not by the kernel's OOM killer", "Look who did"]),
        (ended("SIGKILL", oom=True), RAY, ["the kernel's OOM killer on box", "3.0 GiB", "memory_limit_bytes"]),
        (ended("SIGSEGV"), RAY, ["crashed with SIGSEGV", "native code", "worker-*.err"]),
        (ended("SIGTERM"), RAY, ["ended by SIGTERM on box"]),
        (ended(status=3), RAY, ["exited with status 3 on box", "The actor is dead because"]),
        (ended(), RAY, ["died on box: The actor is dead because its worker process has died"]),
        (None, RAY, ["died on box: The actor is dead because its worker process has died"]),
        (None, NODE, ["lost with its node box"]),
        (None, PRESSURE, ["Ray's memory monitor on box", "memory_limit_bytes"]),
        (ended("SIGKILL"), PRESSURE, ["Ray's memory monitor on box"]),
        (None, "", ["died on box: nobody knows why"]),
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
