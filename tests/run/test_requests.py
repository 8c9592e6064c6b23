"""What people ask of a run that is being changed is neither lost nor waited for without an end."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raypipe.errors import PlanError, RaypipeError, StageError
from raypipe.planner.repartition import Offer
from raypipe.run.requests import Requests, Resize
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
    requests, fleet, offer = Requests(), Halts(), Offer(*[None] * 5)  # type: ignore[arg-type]
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


def test_a_run_that_is_over_is_not_resized() -> None:
    requests = Requests()
    requests.serve(Halts())
    requests.end()
    with pytest.raises(PlanError, match="is over"):
        requests.resize(3, 600.0)


class SlowToHalt:
    """A fleet that is being halted until ``go`` is set."""

    def __init__(self, did: list[str]) -> None:
        self.begun, self.go, self._did = threading.Event(), threading.Event(), did

    def halt(self) -> None:
        self.begun.set()
        assert self.go.wait(30)
        self._did.append("halted")


@pytest.mark.parametrize("kind", ["resize", "leave"])
def test_a_request_is_taken_only_once_its_halt_is_over(kind: str) -> None:
    """Nothing lets a fleet go on that is halted after the change that it was halted for."""
    did = list[str]()
    requests, fleet = Requests(), SlowToHalt(did)
    requests.serve(fleet)

    def ask() -> None:
        if kind == "leave":
            requests.leave({"a"})
        else:
            requests.resize(3, 30.0)

    def take() -> None:
        taken = requests.take_resize() if kind == "resize" else None
        did.append("taken" if taken is not None or requests.take_leaving() else "nothing")
        if taken is not None:
            taken.answer()

    asking, taking = threading.Thread(target=ask), threading.Thread(target=take)
    asking.start()
    assert fleet.begun.wait(30)
    taking.start()
    taking.join(0.2)
    fleet.go.set()
    asking.join(30)
    taking.join(30)
    assert did == ["halted", "taken"]
    assert not requests.wants_change


def test_a_resize_that_has_not_begun_in_time_is_withdrawn_and_makes_way_for_another_one() -> None:
    requests, fleet = Requests(), Halts()
    requests.serve(fleet)
    with pytest.raises(PlanError, match=r"within 0.01 s; the request was withdrawn.*longer timeout_s"):
        requests.resize(3, 0.01)
    with pytest.raises(PlanError, match="withdrawn"):
        requests.resize(4, 0.01)
    assert requests.wants_change, "the fleet that was halted for it goes on once the loop has seen it"
    taken = requests.take_resize()
    assert taken is not None
    assert (taken.num_stages, fleet.count) == (4, 2)
    assert "withdrawn" in taken.withdrawn
    assert requests.take_resize() is None


def test_a_resize_that_has_begun_is_not_withdrawn() -> None:
    requests, taken = Requests(), list[Resize]()

    class Takes(Halts):
        def halt(self) -> None:
            loop.start()

    def take() -> None:
        while (resize := requests.take_resize()) is None:
            pass
        taken.append(resize)

    loop = threading.Thread(target=take)
    requests.serve(Takes())
    with pytest.raises(PlanError, match="the change has begun, and takes longer"):
        requests.resize(3, 1.0)
    loop.join(30)
    assert taken[0].withdrawn == ""


GENERATION: Any = SimpleNamespace()


def test_every_generation_is_answered_once_in_order() -> None:
    requests, found = Requests(), dict[int, Any]()

    def ask(number: int) -> None:
        try:
            found[number] = requests.generate(GENERATION, 30.0)
        except RaypipeError as error:
            found[number] = str(error)

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for number, thread in enumerate(asking):
        thread.start()
        wait_until(lambda number=number: len(requests._texts) == number + 1)  # type: ignore[misc]
    assert requests.wants_text
    assert requests.wants_drain
    requests.hand_over(lambda: None)
    assert requests.take_hand_over() is None, "the requests would be lost"
    for number in range(2):
        request = requests.take_text()
        assert request is not None
        if number:
            request.answer(error=StageError("no"))
        else:
            request.answer(torch.tensor([[7]]))
    assert requests.wants_text
    requests.end()
    for thread in asking:
        thread.join(30)
    assert torch.equal(found[0], torch.tensor([[7]]))
    assert found[1] == "no"
    assert "The run is over" in found[2]
    assert not requests.wants_text
    with pytest.raises(StageError, match="The run is over"):
        requests.generate(GENERATION, 30.0)


def test_a_generation_that_has_not_begun_in_time_is_withdrawn() -> None:
    requests = Requests()
    with pytest.raises(StageError, match=r"within 0.01 s.*longer timeout_s"):
        requests.generate(GENERATION, 0.01)
    assert requests.take_text() is None


def test_a_generation_that_has_begun_is_not_withdrawn() -> None:
    requests, found = Requests(), list[str]()

    def ask() -> None:
        try:
            requests.generate(GENERATION, 1.0)
        except StageError as error:
            found.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: requests.take_text() is not None)
    asking.join(30)
    assert "the generation has begun, and takes longer" in found[0]
