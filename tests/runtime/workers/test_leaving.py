"""Who is told to leave its work is not taken for stuck because its machine is busy."""

from __future__ import annotations

import time

import pytest
import ray

from raypipe.runtime.workers import leaving
from raypipe.runtime.workers.leaving import leave_work
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


def test_a_slow_answer_ends_nobody_and_none_at_all_does(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, stuck = (Member(Slow.remote(seconds)) for seconds in (GRACE_S + 0.5, 60.0))
    assert ray.get([slow.actor.lives.remote(), stuck.actor.lives.remote()], timeout=60) == [True, True]
    leave_work([slow], {}, term=1, links=1)
    assert not slow.lost
    monkeypatch.setattr(leaving, "SETTLE_S", 0.5)
    leave_work([slow, stuck], {}, term=1, links=1)
    assert stuck.lost
    for member in (slow, stuck):
        ray.kill(member.actor)
