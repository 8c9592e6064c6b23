"""Orders of a run that failed: whoever waits for another one is let go."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from raypipe.ir.segment import Segment
from raypipe.ir.work_order import Order
from raypipe.runtime.workers.order_gate import OrderGate

pytestmark = pytest.mark.core

ORDER = Order(Segment(0, 0, 0, 0, (1,)))
WAIT_S = 30.0


def test_who_waits_for_an_order_that_never_comes_is_let_go() -> None:
    gate = OrderGate()
    gate.put(3, ORDER)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(gate.next, 3).result(WAIT_S) is ORDER
        waiting = pool.submit(gate.next, 3)
        gate.abort(3)
        assert waiting.result(WAIT_S) is None


def test_nothing_more_begins_after_a_failure_though_it_was_ordered_and_halted() -> None:
    gate = OrderGate()
    gate.put(3, ORDER)
    assert gate.halt(3) == 0
    gate.abort(3)
    assert gate.next(3) is None
    gate.put(4, ORDER)
    assert gate.next(4) is ORDER, "of the next run"
