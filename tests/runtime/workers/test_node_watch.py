"""Both watchers of a node, the driver itself and an actor there, tell the same of the processes of a node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import ray

from raypipe.runtime.workers.node_watch import Here, There, watcher_of
from raypipe.runtime.workers.processes import AWAKE_S
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

IDLE = "import time; time.sleep(600)"


@pytest.fixture(params=[Here, There])
def watcher(request: pytest.FixtureRequest, local_ray: None) -> Iterator[Here | There]:
    made = Here() if request.param is Here else There(ray.get_runtime_context().get_node_id())
    yield made
    made.close()


def test_a_process_that_is_stopped_and_ended(watcher: Here | There) -> None:
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


def test_nobody_knows_of_a_process_that_was_never_there(watcher: Here | There) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(60)
    watcher.ask([gone.pid, os.getpid()], time.monotonic(), 0.0)
    assert watcher.ended(gone.pid) is None


def test_an_actor_that_is_silent_or_gone_says_nothing(local_ray: None) -> None:
    watcher = There(ray.get_runtime_context().get_node_id())

    def seen(awake_s: float) -> bool:
        watcher.ask([os.getpid()], time.monotonic(), awake_s)
        time.sleep(0.05)
        return os.getpid() in watcher.looks

    wait_until(lambda: seen(0.0))
    watcher.close()
    wait_until(lambda: not seen(1.0))
    assert watcher.ended(os.getpid()) is None


def test_the_own_node_needs_no_actor(local_ray: None) -> None:
    here = watcher_of(ray.get_runtime_context().get_node_id())
    assert isinstance(here, Here)
    here.close()
