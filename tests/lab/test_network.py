"""The network test bed: rates are what they say, links stall and heal, and nothing is left behind."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests import processes
from tests.lab.flow import Flow, flow
from tests.lab.network import Network, network
from tests.waiting import wait_until

pytestmark = [pytest.mark.net, pytest.mark.slow, pytest.mark.timeout(300)]

FRAME_SHARE = 1448 / 1514
"""Of a full Ethernet frame, what TCP carries."""


def settled(found: Flow, least: float, most: float) -> float:
    """Mbit/s within these bounds: a machine that is busy gets more tries, a wrong rate does not pass any."""
    for _ in range(12):
        got = found.mbit_per_s(1.0)
        print(f"{got:.1f} Mbit/s, expected {least:.1f} to {most:.1f}")
        if least <= got <= most:
            break
    assert least <= got <= most
    return got


def test_a_flow_gets_the_rate_of_its_wire_and_every_change_of_it() -> None:
    with network(rate_mbit=50) as lab, flow(lab, 0, 1) as found:
        for mbit in (50, 200, 50):
            lab.rate(0, 1, mbit)
            settled(found, 0.88 * mbit * FRAME_SHARE, 1.05 * mbit * FRAME_SHARE)
        lab.rate(0, 1, None)
        settled(found, 400, 1e6)
        lab.rate(0, 1, 100)
        settled(found, 88 * FRAME_SHARE, 105 * FRAME_SHARE)


def stands_still(found: Flow) -> bool:
    before = found.last
    time.sleep(0.7)
    return found.last == before


def test_a_cut_wire_stalls_and_heals_with_its_rate() -> None:
    with network(hosts=3, rate_mbit=50) as lab, flow(lab, 0, 1) as found, flow(lab, 0, 2) as other:
        found.after(time.monotonic())
        lab.cut(0, 1)
        wait_until(lambda: stands_still(found))  # once what was under way has come
        cut_s, cut_bytes = found.last
        other.after(time.monotonic())  # the other wire does not mind
        lab.heal(0, 1)
        assert found.after(cut_s)[1] > cut_bytes
        settled(found, 0.88 * 50 * FRAME_SHARE, 1.05 * 50 * FRAME_SHARE)


ORPHAN = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(600)
    os._exit(0)
os.wait()
"""


def names() -> set[str]:
    shown = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=60).stdout
    return {line.split()[0] for line in shown.splitlines() if line}


def test_everything_ends_with_the_network_also_when_a_test_fails() -> None:
    pids: list[int] = []
    mine = subprocess.Popen(["sleep", "600"])  # outside of any namespace
    try:
        before = names()

        def fail() -> Network:
            with network(hosts=3, rate_mbit=10) as lab:
                assert set(lab.names) <= names()
                pids.append(lab.start(0, "sleep", "600").pid)
                with lab.piped(1, ORPHAN) as process:
                    assert process.stdout is not None
                    pids.append(int(process.stdout.readline()))
                raise RuntimeError("as a test does")

        with pytest.raises(RuntimeError, match="as a test does"):
            fail()
        assert names() == before
        wait_until(lambda: not any(processes.alive(pid) for pid in pids))
        assert processes.alive(mine.pid)
        assert Path("/proc/self/ns/net").readlink() == Path(f"/proc/{mine.pid}/ns/net").readlink()
    finally:
        mine.kill()
        mine.wait()
