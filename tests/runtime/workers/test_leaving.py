"""Who is told to leave its work is not taken for stuck because its machine is busy."""

from __future__ import annotations

import time

import pytest
import ray

from raypipe.runtime.workers import leaving
from raypipe.runtime.workers.leaving import leave_work
from raypipe.runtime.workers.pulse import Pulse
from raypipe.runtime.workers.roster import GRACE_S, Member

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(120)]


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


def pulse(longest_s: float) -> Pulse:
    return Pulse(1, "0F3", 0.0, True, longest_s, 1, 1.0, 1)


def test_a_slow_answer_ends_nobody_and_none_at_all_does(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, stuck = (Member(Slow.remote(seconds)) for seconds in (GRACE_S + 0.5, 60.0))
    assert ray.get([slow.actor.lives.remote(), stuck.actor.lives.remote()], timeout=60) == [True, True]
    leave_work([slow], {}, term=1, links=1)
    assert not slow.lost
    monkeypatch.setattr(leaving, "ANSWER_S", 0.5)
    leave_work([slow, stuck], {}, term=1, links=1)
    assert stuck.lost
    for member in (slow, stuck):
        ray.kill(member.actor)


def test_who_computes_for_long_by_nature_is_waited_for(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as long as its longest action so far, or as the plan's: a forward cannot be broken off."""
    monkeypatch.setattr(leaving, "SETTLE_S", 0.1)
    worker = Member(Slow.remote(0.0), pulse=pulse(longest_s=15.0))
    assert ray.get(worker.actor.lives.remote(), timeout=60)
    leave_work([worker], {worker.actor.work.remote(1.5): 0}, term=1, links=1)
    worker.pulse = pulse(longest_s=0.0)
    leave_work([worker], {worker.actor.work.remote(1.5): 0}, term=1, links=1, planned_s=15.0)
    assert not worker.lost
    leave_work([worker], {worker.actor.work.remote(30.0): 0}, term=1, links=1)
    assert worker.lost
    ray.kill(worker.actor)
