"""The network test bed: rates are what they say, links stall and heal, and nothing is left behind."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests import processes
from tests.lab.flow import Flow, flow
from tests.lab.network import Network, network

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


def test_each_direction_and_each_pair_has_its_own_rate() -> None:
    with network(hosts=3) as lab:
        lab.rate(0, 1, 20, back=False)
        lab.rate(1, 2, 80)
        with flow(lab, 0, 1) as slow, flow(lab, 1, 2) as middling:
            settled(slow, 0.88 * 20 * FRAME_SHARE, 1.05 * 20 * FRAME_SHARE)
            settled(middling, 0.88 * 80 * FRAME_SHARE, 1.05 * 80 * FRAME_SHARE)
        with flow(lab, 1, 0) as back, flow(lab, 2, 0) as free:
            settled(back, 200, 1e6)
            settled(free, 200, 1e6)


def test_a_competing_flow_takes_its_share() -> None:
    with network(rate_mbit=50) as lab, flow(lab, 0, 1) as found:
        alone = settled(found, 0.88 * 50 * FRAME_SHARE, 1.05 * 50 * FRAME_SHARE)
        with lab.competing(0, 1):
            settled(found, 0.05 * alone, 0.93 * alone)
        settled(found, 0.88 * 50 * FRAME_SHARE, 1.05 * 50 * FRAME_SHARE)


def test_a_cut_wire_stalls_and_heals_with_its_rate() -> None:
    with network(hosts=3, rate_mbit=50) as lab, flow(lab, 0, 1) as found, flow(lab, 0, 2) as other:
        found.after(time.monotonic())
        lab.cut(0, 1)
        time.sleep(0.3)  # what was under way
        cut_s, cut_bytes = found.last
        time.sleep(0.7)
        assert found.last == (cut_s, cut_bytes)
        other.after(time.monotonic())  # the other wire does not mind
        lab.heal(0, 1)
        assert found.after(cut_s)[1] > cut_bytes
        settled(found, 0.88 * 50 * FRAME_SHARE, 1.05 * 50 * FRAME_SHARE)


def test_what_went_through_is_counted() -> None:
    with network() as lab:
        before = lab.carried_bytes(0, 1)
        with flow(lab, 0, 1) as found:
            received = found.after(time.monotonic())[1]
        assert lab.carried_bytes(0, 1) - before > received


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
        deadline_s = time.monotonic() + 60
        while any(processes.alive(pid) for pid in pids):
            assert time.monotonic() < deadline_s, pids
            time.sleep(0.01)
        assert processes.alive(mine.pid)
        assert Path("/proc/self/ns/net").readlink() == Path(f"/proc/{mine.pid}/ns/net").readlink()
    finally:
        mine.kill()
        mine.wait()
