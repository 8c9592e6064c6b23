"""What people ask of a run that is being changed is neither lost nor waited for without an end."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from raypipe.errors import PlanError
from raypipe.planner.repartition import Offer
from raypipe.run.requests import Requests
from tests.waiting import wait_until


class Halts:
    def __init__(self) -> None:
        self.count = 0

    def halt(self) -> None:
        self.count += 1


def test_nodes_that_go_are_told_once_and_halt_the_stages() -> None:
    requests, fleet = Requests(), Halts()
    requests.leave({"a"})  # before the run begins
    requests.serve(fleet)
    requests.leave({"b"})
    assert fleet.count == 2
    assert requests.wants_change
    assert requests.take_leaving() == {"a", "b"}
    assert not requests.wants_change


def test_another_cut_waits_until_what_is_ordered_is_done() -> None:
    requests, fleet, offer = Requests(), Halts(), Offer(*[None] * 4)  # type: ignore[arg-type]
    requests.serve(fleet)
    requests.offer(offer)
    assert fleet.count == 0
    assert requests.has_offer
    assert requests.wants_change
    assert requests.take_offer() is offer
    assert not requests.has_offer
    assert not requests.wants_change
    assert requests.take_offer() is None


def test_stages_that_pause_anyway_are_halted_only_where_that_takes_too_long() -> None:
    requests, halted = Requests(), threading.Event()
    fleet = SimpleNamespace(halt=halted.set)
    requests.serve(fleet, patience_s=0.5)
    requests.leave({"a"})
    assert requests.take_leaving() == {"a"}
    assert not halted.wait(0.7), "the run has come to such a step"
    requests.leave({"b"})
    assert halted.wait(30)


def test_one_resize_at_a_time_is_answered() -> None:
    requests = Requests()
    with pytest.raises(PlanError, match="has not begun"):
        requests.resize(3, 1.0)
    requests.serve(Halts())
    found: list[PlanError | None] = []

    def ask() -> None:
        try:
            requests.resize(3, 30.0)
            found.append(None)
        except PlanError as error:
            found.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: requests.wants_change)
    with pytest.raises(PlanError, match="being resized"):
        requests.resize(4, 1.0)
    asked = requests.take_resize()
    assert asked is not None
    assert asked.num_stages == 3
    asked.answer()
    asking.join(30)
    assert found == [None]
    requests.stop("enough")
    with pytest.raises(PlanError, match="enough"):
        requests.resize(2, 1.0)
