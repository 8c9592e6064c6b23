"""Watchers of a node: what the kernel reports of real processes, under a clock that the test turns."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from raypipe.runtime.nodes.node_watch import (
    AWAKE_S,
    HELPERS_S,
    IDLE_SHARE,
    LOOK_S,
    Ended,
    LocalNodeWatch,
    Processes,
    RemoteNodeWatch,
)
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


WAIT_S = 60.0
BUSY = "while True: pass"
IDLE = "import time; time.sleep(600)"


@pytest.fixture
def looked() -> Iterator[Processes]:
    made = Processes()
    yield made
    made.close()


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", getattr(request, "param", IDLE)])
    yield process
    process.kill()
    process.wait()


def fields_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def state_of(pid: int) -> str:
    return fields_of(pid)[0]


def cpu_s(pid: int) -> float:
    return (int(fields_of(pid)[11]) + int(fields_of(pid)[12])) / os.sysconf("SC_CLK_TCK")


def helpers_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_stopped_process_counts_only_while_the_reader_is_awake(
    looked: Processes, child: subprocess.Popen[bytes]
) -> None:
    assert looked.watch(child.pid)
    looked.sample(0.0)
    assert looked.looks()[child.pid].stopped_s == 0.0
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: state_of(child.pid) == "T")
    for turn in range(1, 15):
        looked.sample(turn * LOOK_S)
    assert looked.looks()[child.pid].stopped_s == pytest.approx(1.4)
    looked.sample(1000.0)  # nobody knows what lay between
    assert looked.looks()[child.pid].stopped_s == pytest.approx(1.4 + AWAKE_S)
    child.send_signal(signal.SIGCONT)
    wait_until(lambda: state_of(child.pid) == "S")
    looked.sample(1000.1)
    assert looked.looks()[child.pid].stopped_s == 0.0


@pytest.mark.parametrize("child", [BUSY], indirect=True)
def test_a_busy_process_is_not_idle(looked: Processes, child: subprocess.Popen[bytes]) -> None:
    looked.watch(child.pid)
    begin_s = time.monotonic()
    for turn in range(20):
        looked.sample(turn * LOOK_S)
        used_s = 0.0
        while used_s < 0.05:  # a tick of the kernel's clock or more, however busy this machine is
            assert time.monotonic() - begin_s < WAIT_S
            used_s = cpu_s(child.pid) - turn * 0.05
            time.sleep(0.005)
    assert looked.looks()[child.pid].idle_s == 0.0


UNTIL_ALONE = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
WAITS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {UNTIL_ALONE!r}])"


@pytest.mark.parametrize("child", [WAITS], indirect=True)
def test_a_process_that_waits_for_a_busy_one_of_its_own_is_not_idle(
    looked: Processes, child: subprocess.Popen[bytes]
) -> None:
    """As where torch.compile runs a C++ compiler for minutes; one that does nothing either is no excuse."""
    wait_until(lambda: helpers_of(child.pid) != [])
    (helper,) = helpers_of(child.pid)
    wait_until(lambda: state_of(child.pid) == "S")
    looked.watch(child.pid)
    turns = itertools.count()

    def idle_s(seconds: float) -> float:
        for _ in range(round(seconds / LOOK_S)):
            looked.sample(next(turns) * LOOK_S)
        return looked.looks()[child.pid].idle_s

    assert HELPERS_S < idle_s(HELPERS_S + 3.0) < 2 * HELPERS_S
    used_s = cpu_s(helper)
    wait_until(lambda: cpu_s(helper) > used_s + IDLE_SHARE * HELPERS_S)
    assert idle_s(HELPERS_S) < HELPERS_S
    os.kill(helper, signal.SIGSTOP)
    try:
        assert idle_s(5 * HELPERS_S) > 3 * HELPERS_S
    finally:
        os.kill(helper, signal.SIGKILL)


def ended(looked: Processes, pid: int) -> Ended:
    found = looked.ended(pid, 7.5)
    assert found is not None
    return found


def test_how_processes_end(looked: Processes) -> None:
    """By a signal or by themselves; the kernel says which from Linux 6.15 on, once somebody has reaped them."""
    for code, sent, name, status in (
        (IDLE, signal.SIGKILL, "SIGKILL", None),
        (IDLE, signal.SIGTERM, "SIGTERM", None),
        ("import os; os.abort()", None, "SIGABRT", None),
        ("raise SystemExit(3)", None, "", 3),
    ):
        process = subprocess.Popen([sys.executable, "-c", f"input(); {code}"], stdin=subprocess.PIPE)
        assert looked.watch(process.pid)
        assert process.stdin is not None
        looked.sample(5.0)
        if sent is None:
            process.stdin.write(b"\n")
            process.stdin.flush()
        else:
            assert looked.ended(process.pid, 5.0) is None
            process.send_signal(sent)
        process.wait(WAIT_S)
        process.stdin.close()
        looked.sample(6.0)
        assert process.pid not in looked.looks()
        found = ended(looked, process.pid)
        assert found.ago_s == 1.5
        assert not found.out_of_memory
        if tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 15):
            assert (found.signal, found.status) == (name, status)
        else:
            assert (found.signal, found.status) == ("", None)


@pytest.fixture(params=[LocalNodeWatch, RemoteNodeWatch])
def watcher(request: pytest.FixtureRequest, local_ray: None) -> Iterator[LocalNodeWatch | RemoteNodeWatch]:
    made = (
        LocalNodeWatch()
        if request.param is LocalNodeWatch
        else RemoteNodeWatch(ray.get_runtime_context().get_node_id())
    )
    yield made
    made.close()


def test_a_process_that_is_stopped_and_ended(watcher: LocalNodeWatch | RemoteNodeWatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", IDLE])
    try:

        def stopped_s() -> float:
            watcher.ask([child.pid], time.monotonic(), 0.0)
            time.sleep(0.05)
            look = watcher.looks.get(child.pid)
            return -1.0 if look is None else look.stopped_s

        wait_until(lambda: stopped_s() == 0.0)
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: stopped_s() > 2 * AWAKE_S)
        watcher.end(child.pid)
        assert child.wait(60) == -signal.SIGKILL
        found = watcher.ended(child.pid)
        assert found is not None
        assert found.signal in ("SIGKILL", "")
        wait_until(lambda: stopped_s() == -1.0)
    finally:
        child.kill()
        child.wait()


def test_nobody_knows_of_a_process_that_was_never_there(watcher: LocalNodeWatch | RemoteNodeWatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(60)
    watcher.ask([gone.pid, os.getpid()], time.monotonic(), 0.0)
    assert watcher.ended(gone.pid) is None


def test_an_actor_that_is_silent_or_gone_says_nothing(local_ray: None) -> None:
    watcher = RemoteNodeWatch(ray.get_runtime_context().get_node_id())

    def seen(awake_s: float) -> bool:
        watcher.ask([os.getpid()], time.monotonic(), awake_s)
        time.sleep(0.05)
        return os.getpid() in watcher.looks

    wait_until(lambda: seen(0.0))
    watcher.close()
    wait_until(lambda: not seen(1.0))
    assert watcher.ended(os.getpid()) is None
