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

from raypipe.engine.optim.state import Settings
from raypipe.errors import StageError
from raypipe.ir.report import StepReport
from raypipe.planner import liveness
from raypipe.runtime.fleet.fleet import Fleet
from raypipe.runtime.fleet.roster import Terms
from raypipe.runtime.fleet.watch import MemberEvent
from tests.exactness import SHAPES
from tests.mishaps import Deadlock, Nap
from tests.models import CASES
from tests.processes import alive
from tests.runtime.fleet.test_fleet import LINK_S, SOON_S, configure, faulty, gone_within, sgd, steps
from tests.runtime.left_over import NOTHING, ours
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

NEEDS = {"CPU": 0, "spare": 1}


def test_who_is_asked_outlives_the_lease_and_who_is_not_ends(cluster: None) -> None:
    """All begin together: the one that is asked is there when the lease of the others has run out."""
    asked, lonely = Fleet(1, Terms(NEEDS, lease_s=5.0)), Fleet(2, Terms(NEEDS, lease_s=5.0))
    processes = [member.facts["process"] for member in lonely.roster]
    wait_until(lambda: all(member.heartbeat is not None for member in lonely.roster))
    assert [member.heartbeat.process for member in lonely.roster if member.heartbeat] == processes
    assert [member.heartbeat.action for member in lonely.roster if member.heartbeat] == ["", ""]
    kept = ours().groups
    lonely.watch.close()
    wait_until(lambda: not any(map(alive, processes)), 60.0)
    wait_until(lambda: len(kept - ours().groups) == 2, 60.0)
    process = asked.roster[0].facts["process"]
    assert alive(process)
    assert ray.get(asked.roster[0].actor.heartbeat.remote(0, 60.0), timeout=60).process == process
    lonely.stop()
    asked.stop()


class Crew:
    """Workers of which two train, and what is noticed of them; every test below costs it one."""

    def __init__(self, count: int) -> None:
        self.noticed: list[MemberEvent] = []
        self.fleet = Fleet(count, Terms(NEEDS), on_event=lambda event: self.noticed.append(event))

    def train(self, block: torch.nn.Module) -> Iterator[list[StepReport]]:
        """Two of them train without end, with this layer in stage 1."""
        self.noticed = []
        stages, tensors = faulty(2, 1, block)
        configure(self.fleet, stages, tensors, sgd, CASES["mlp"].data(40), Settings(0, "mean", None, LINK_S))
        return steps(self.fleet, stages, SHAPES["even"], "1f1b", count=10**6)

    def told(self) -> list[tuple[str, bool, int | None, int]]:
        return [(found.failure, found.over, found.worker, found.process) for found in self.noticed]


@pytest.fixture(scope="module")
def crew(local_ray: None) -> Iterator[Crew]:
    before = ours()
    made = Crew(5)
    yield made
    made.fleet.stop()
    wait_until(lambda: ours().beyond(before) == NOTHING)


def end_of(running: Iterator[list[StepReport]], do: Callable[[], None]) -> tuple[str, float]:
    """How the training ends after something is done to it: the message, and the seconds that it took."""
    do()
    begin_s = time.monotonic()
    with pytest.raises(StageError) as told:
        list(itertools.takewhile(lambda _: time.monotonic() < begin_s + 120, running))
    return str(told.value), time.monotonic() - begin_s


def test_a_short_stop_is_no_alarm_and_a_longer_one_is_a_hang(crew: Crew) -> None:
    """A stop of a second is none either (tests/planner/test_liveness.py); a busy machine prolongs what lasts half."""
    running = crew.train(Nap(10**9, 0.0))
    next(running)
    other, process = (member.facts["process"] for member in crew.fleet.in_use)
    os.kill(process, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(process, signal.SIGCONT)
    for _ in range(200):
        next(running)
    assert crew.noticed == []
    text, took_s = end_of(running, lambda: os.kill(process, signal.SIGSTOP))
    print(f"SIGSTOP noticed after {crew.noticed[0].after_s:.2f} s, the run ended after {took_s:.2f} s: {text}")
    assert text.startswith("Stage 1 hung after ")
    assert "has been stopped for " in text
    assert crew.told() == [("stopped", True, 1, process)]
    assert gone_within(process, SOON_S)
    assert [member.lost for member in crew.fleet.in_use] == [False, True]
    assert alive(other)


def test_a_stage_that_is_killed_is_told_with_the_signal(crew: Crew) -> None:
    running = crew.train(Nap(10**9, 0.0))
    next(running)
    member = crew.fleet.in_use[0]
    process = member.facts["process"]
    text, took_s = end_of(running, lambda: os.kill(process, signal.SIGKILL))
    print(f"SIGKILL noticed after {crew.noticed[0].after_s:.2f} s, the run ended after {took_s:.2f} s: {text}")
    assert text.startswith("Stage 0 died after ")
    assert "SIGKILL" in text or tuple(map(int, os.uname().release.split(".")[:2])) < (6, 15)
    assert crew.told() == [("died", True, 0, process)]
    assert member.lost


@pytest.mark.parametrize(("block", "means"), [(Nap(9, 3600.0), "blocked"), (Deadlock(9), "deadlocked")])
def test_a_stage_whose_code_waits_for_ever_is_ended(
    block: torch.nn.Module, means: str, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the limits of a minute or two cut to seconds."""
    for name, seconds in (("SLOW_S", 1.0), ("BLOCKED_S", 6.0), ("IDLE_S", 3.0), ("DEADLOCKED_S", 6.0)):
        monkeypatch.setattr(liveness, name, seconds)
    text, _ = end_of(crew.train(block), lambda: None)
    assert text.startswith("Stage 1 hung after ")
    assert [found.failure for found in crew.noticed if found.over] == [means]
