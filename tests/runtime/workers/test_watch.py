"""The heartbeat of real stages: who is asked lives on, who is not ends, and who hangs or dies is named at once."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import ray
import torch

from raypipe.engine.state import Settings
from raypipe.errors import StageError
from raypipe.ir.report import StepReport
from raypipe.planner import liveness
from raypipe.runtime.workers.fleet import Fleet
from raypipe.runtime.workers.watch import Notice
from tests.exactness import SHAPES
from tests.mishaps import Deadlock, Nap
from tests.models import CASES
from tests.processes import alive
from tests.runtime.left_over import ours, wait_until
from tests.runtime.workers.test_fleet import LINK_S, configure, faulty, gone_within, sgd, steps

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

NEEDS = {"CPU": 0, "spare": 1}
SOON_S = 10.0


def test_a_worker_ends_when_its_lease_does(cluster: None) -> None:
    fleet = Fleet(2, NEEDS, lease_s=5.0)
    processes = [member.facts["process"] for member in fleet.roster]
    wait_until(lambda: all(member.pulse is not None for member in fleet.roster), 30.0)
    assert [member.pulse.process for member in fleet.roster if member.pulse] == processes
    assert [member.pulse.action for member in fleet.roster if member.pulse] == ["", ""]
    kept = ours().groups
    fleet._watch.close()
    wait_until(lambda: not any(map(alive, processes)), 60.0)
    wait_until(lambda: len(kept - ours().groups) == 2, 60.0)
    fleet.stop()


def test_who_is_asked_outlives_the_lease(cluster: None) -> None:
    """Two begin together: the one that is asked is there when the lease of the other has run out."""
    asked, lonely = Fleet(1, NEEDS, lease_s=5.0), Fleet(1, NEEDS, lease_s=5.0)
    wait_until(lambda: lonely.roster[0].pulse is not None)
    lonely._watch.close()
    wait_until(lambda: not alive(lonely.roster[0].facts["process"]), 60.0)
    process = asked.roster[0].facts["process"]
    assert alive(process)
    assert ray.get(asked.roster[0].actor.pulse.remote(60.0), timeout=60).process == process
    lonely.stop()
    asked.stop()


@pytest.fixture
def noticed() -> list[Notice]:
    return []


@pytest.fixture
def training(cluster: None, noticed: list[Notice]) -> Iterator[tuple[Fleet, Iterator[list[StepReport]]]]:
    """Two stages that train without end, and what is noticed of them."""
    fleet = Fleet(2, NEEDS, tell=noticed.append)
    stages, tensors = faulty(2, 1, Nap(10**9, 0.0))
    configure(fleet, stages, tensors, sgd, CASES["mlp"].data(40), Settings(0, "mean", None, LINK_S))
    running = steps(fleet, stages, SHAPES["even"], "1f1b", count=10**6)
    next(running)
    yield fleet, running
    fleet.stop()


def end_of(running: Iterator[list[StepReport]], do: Callable[[], None]) -> tuple[str, float]:
    """How the training ends after something is done to it: the message, and the seconds that it took."""
    do()
    begin_s = time.monotonic()
    with pytest.raises(StageError) as told:
        list(itertools.takewhile(lambda _: time.monotonic() < begin_s + 120, running))
    return str(told.value), time.monotonic() - begin_s


def test_a_stop_of_a_second_is_no_alarm_and_a_longer_one_is_a_hang(
    training: tuple[Fleet, Iterator[list[StepReport]]], noticed: list[Notice]
) -> None:
    fleet, running = training
    process = fleet.in_use[1].facts["process"]
    os.kill(process, signal.SIGSTOP)
    time.sleep(1.0)
    os.kill(process, signal.SIGCONT)
    for _ in range(200):
        next(running)
    assert noticed == []
    text, took_s = end_of(running, lambda: os.kill(process, signal.SIGSTOP))
    print(f"SIGSTOP noticed after {noticed[0].after_s:.2f} s, the run ended after {took_s:.2f} s: {text}")
    assert text.startswith("Stage 1 hung after ")
    assert "has been stopped for 1." in text
    assert [(found.means, found.over, found.worker, found.process) for found in noticed] == [
        ("stopped", True, 1, process)
    ]
    assert gone_within(process, SOON_S)
    assert [member.lost for member in fleet.roster] == [False, True]
    assert alive(fleet.in_use[0].facts["process"])


def test_a_stage_that_is_killed_is_told_with_the_signal(
    training: tuple[Fleet, Iterator[list[StepReport]]], noticed: list[Notice]
) -> None:
    fleet, running = training
    member = fleet.in_use[0]
    process = member.facts["process"]
    text, took_s = end_of(running, lambda: os.kill(process, signal.SIGKILL))
    print(f"SIGKILL noticed after {noticed[0].after_s:.2f} s, the run ended after {took_s:.2f} s: {text}")
    assert text.startswith("Stage 0 died after ")
    assert "SIGKILL" in text or tuple(map(int, os.uname().release.split(".")[:2])) < (6, 15)
    assert [(found.means, found.over, found.worker, found.process) for found in noticed] == [("died", True, 0, process)]
    assert member.lost


@pytest.mark.parametrize(("block", "means"), [(Nap(9, 3600.0), "blocked"), (Deadlock(9), "deadlocked")])
def test_a_stage_whose_code_waits_for_ever_is_ended(
    block: torch.nn.Module, means: str, cluster: None, noticed: list[Notice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the limits of a minute or two cut to seconds."""
    for name, seconds in (("SLOW_S", 1.0), ("BLOCKED_S", 6.0), ("IDLE_S", 3.0), ("DEADLOCKED_S", 6.0)):
        monkeypatch.setattr(liveness, name, seconds)
    fleet = Fleet(2, NEEDS, tell=noticed.append)
    stages, tensors = faulty(2, 1, block)
    configure(fleet, stages, tensors, sgd, CASES["mlp"].data(40), Settings(0, "mean", None, LINK_S))
    text, _ = end_of(steps(fleet, stages, SHAPES["even"], "1f1b", count=10**6), lambda: None)
    fleet.stop()
    assert text.startswith("Stage 1 hung after ")
    assert [found.means for found in noticed if found.over] == [means]
