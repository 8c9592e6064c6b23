"""Orders of a stage: the fence, the gate after a failure, and the window over reports."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from raypipe.errors import LeaseError, StageError
from raypipe.ir.segment import Order, Segment
from raypipe.runtime.worker.orders import Fence, OrderGate, Window, WorkReports

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


def test_only_the_latest_term_is_obeyed() -> None:
    fence = Fence()
    fence.check(3)
    assert fence.admits(4)
    fence.check(3)  # to ask is not to take over
    fence.check(4)
    assert not fence.admits(3)
    with pytest.raises(LeaseError, match=r"obey the driver of generation 4, .* no longer that of generation 3"):
        fence.check(3)


def test_the_newest_items_stay_at_their_places() -> None:
    window = Window[str](3)
    assert (window.first, window.end, window.since(0)) == (0, 0, [])
    window.extend(list("ab"))
    for letter in "cde":
        window.append(letter)
    assert (window.first, window.end) == (2, 5)
    assert window.since(0) == list("cde")
    assert window.since(3) == list("de")
    assert window.since(5) == window.since(9) == []
    assert [window[place] for place in range(2, 5)] == list("cde")
    for place in (-1, 1, 5):
        with pytest.raises(IndexError, match="not in 2"):
            window[place]


def test_more_items_than_it_keeps_come_at_once() -> None:
    window = Window[int](3)
    window.extend(list(range(10)))
    assert (window.first, window.end, window.since(0)) == (7, 10, [7, 8, 9])


def test_without_a_bound_items_stay_until_they_are_taken() -> None:
    window = Window[int]()
    window.extend(list(range(10_000)))
    assert window.take(9_997) == 9_997
    assert (window.first, window.end, window.since(0)) == (9_998, 10_000, [9_998, 9_999])
    with pytest.raises(IndexError, match="5 is not in 9998"):
        window.take(5)
    assert [window.take(9_998), window.take(9_999)] == [9_998, 9_999]
    assert (window.first, window.end) == (10_000, 10_000)


def test_late_reports_keep_their_order_and_survive_a_failure() -> None:
    def reports(number: int) -> Any:
        return lambda: lambda: [[number]]

    def fails() -> Any:
        raise StageError("x")

    work = WorkReports()
    work.begin(0)
    work.follow(reports(1), late=True)
    assert work.since(0, 0, 0.0) == []
    work.follow(reports(2), late=True)
    assert work.since(0, 0, 0.0) == [[[1]]]
    with pytest.raises(StageError):
        work.follow(fails, late=True)
    assert work.since(0, 0, 0.0) == [[[1]], [[2]]]


def test_late_reports_are_taken_if_no_order_waits() -> None:
    gate, idle = OrderGate(), list[int]()
    gate.put(0, ORDER)
    assert gate.next(0, lambda: idle.append(0)) is ORDER
    assert idle == []

    def put() -> None:
        idle.append(1)
        gate.put(1, ORDER)

    assert gate.next(1, put) is ORDER
    assert idle == [1]
