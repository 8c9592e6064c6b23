"""What a worker says of itself, and the lease that ends it where nobody asks."""

from __future__ import annotations

import math
import os
import threading

import pytest

from raypipe.ir.schedule import Action, Op
from raypipe.runtime.worker.heartbeat import ActionClock, LeaseClock, heartbeat_of
from tests.waiting import wait_until

WAIT_S = 60.0


def test_an_action_is_timed_by_looking_twice() -> None:
    clock = ActionClock()
    forward, receive = Action(1, Op.F, 0), Action(1, Op.RECV_F, 1)
    assert clock.look(None, 10.0, computes=False) == 0.0
    assert clock.look(forward, 11.0, computes=True) == 0.0
    assert clock.look(forward, 13.5, computes=True) == 2.5
    assert clock.longest_s == 0.0
    assert clock.look(receive, 14.0, computes=False) == 0.0
    assert clock.longest_s == 3.0
    assert clock.look(None, 99.0, computes=False) == 0.0
    assert clock.longest_s == 3.0  # a wait for another stage says nothing of this one


def test_the_same_instruction_begun_again_is_another_action() -> None:
    clock = ActionClock()
    clock.look(Action(0, Op.F, 3), 0.0, computes=True)
    assert clock.look(Action(0, Op.F, 3), 5.0, computes=True) == 0.0


@pytest.mark.parametrize(
    ("op", "waits", "computes"),
    [(Op.F, False, True), (Op.STEP, False, True), (Op.F, True, False), (Op.RECV_B, False, False)],
)
def test_a_pulse(op: Op, waits: bool, computes: bool) -> None:
    found = heartbeat_of(ActionClock(), Action(2, op, 7), 5, waits=waits)
    assert (found.process, found.action, found.computes) == (os.getpid(), f"2{op}7", computes)
    assert (found.action_s, found.longest_s, found.segments) == (0.0, 0.0, 5)
    assert found.cpu_s > 0
    assert found.resident_bytes > 1 << 20
    assert heartbeat_of(ActionClock(), None, 0, waits=False).action == ""


def test_it_is_told_how_much_of_a_lease_has_passed() -> None:
    told: list[float] = []
    begun, over, renewed = threading.Event(), threading.Event(), threading.Event()

    def passed(share: float) -> None:
        assert begun.wait(WAIT_S)
        told.append(share)
        if share > 0.5 and not renewed.is_set():
            renewed.set()
            clock.renew(0.2)

    clock = LeaseClock(0.1, over.set, passed, tick_s=0.01)
    begun.set()
    assert over.wait(WAIT_S)
    first = told[: next(at for at, share in enumerate(told) if share > 0.5) + 1]
    assert first == pytest.approx([0.1 * (tick + 1) for tick in range(len(first))])
    rest = told[len(first) :]
    assert rest == pytest.approx([0.05 * (tick + 1) for tick in range(len(rest))])
    assert len(rest) in (19, 20), "to the tick, as sums of hundredths are"
    endless = LeaseClock(math.inf, over.set, told.append, tick_s=0.01)
    told.clear()
    wait_until(lambda: len(told) >= 3)
    endless.close()
    assert set(told) == {0.0}


def test_a_lease_that_is_closed_does_not_end() -> None:
    """It is closed in its own thread, for a busy machine might let it run out before another one does that."""
    begun, closed, over = threading.Event(), threading.Event(), threading.Event()

    def passed(share: float) -> None:
        assert begun.wait(WAIT_S)
        if share > 0.5:
            clock.close()
            closed.set()

    clock = LeaseClock(0.1, over.set, passed, tick_s=0.01)
    begun.set()
    assert closed.wait(WAIT_S)
    assert not over.wait(0.3)
