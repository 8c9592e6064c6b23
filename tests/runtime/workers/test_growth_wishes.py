"""What a run that may change its number of workers asks for, waits for and forgets; with places of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raypipe.config.ray import WorkerRange
from raypipe.errors import LeaseError
from raypipe.runtime.driver.succession import Charter
from raypipe.runtime.run.planned import Asked
from raypipe.runtime.run.requests import Requests
from raypipe.runtime.workers.drain_watch import DrainWatch
from raypipe.runtime.workers.granted import granted
from raypipe.runtime.workers.growth import Growth
from raypipe.runtime.workers.notices import Kind, Notice
from raypipe.runtime.workers.places import Owner
from raypipe.runtime.workers.roster import LEASE_S, Member, Roster, Terms
from tests.waiting import wait_until

pytestmark = pytest.mark.ray


def growth_on(places: Any, requests: Requests, told: list[tuple[str, str]], survives: bool = False) -> Growth:
    """Of a run of 2 to 4 workers whose plan for the most of them uses all."""
    in_use = getattr(places, "members", [])
    fleet: Any = SimpleNamespace(places=places, in_use=in_use, rehearse_spares=lambda: None)
    event = lambda decision, reason, **numbers: told.append((decision, reason))  # noqa: E731
    return Growth(fleet, WorkerRange(2, 4, 0.0), 4, requests, lambda line: None, event, survives=survives)


def test_a_size_that_somebody_asked_for_outlives_the_driver() -> None:
    growth = growth_on(SimpleNamespace(), Requests(), [])
    assert (growth.asked, growth.count) == (None, 4)
    growth.wants(Asked(num_stages=2, workers=2))
    assert growth.count == 2
    first: Any = Charter(*[None] * 4, planned=None, resources={})  # type: ignore[arg-type]
    later = ray.cloudpickle.loads(first.packed("a plan", growth.asked, 3))
    assert (later.planned, later.asked, later.failures) == ("a plan", Asked(2, 2), 3)


class Places(Roster):
    """All places come at once, and processes start when ``go`` is set; ``asked`` are the numbers of all places."""

    def __init__(self, count: int) -> None:
        self.go, self.begun, self.asked = threading.Event(), threading.Event(), list[int]()
        self.go.set()
        super().__init__(count, Terms({"CPU": 1}, "tcp", None, Owner(), LEASE_S, granted))
        self.go.clear()
        self.begun.clear()

    def _ask(self, count: int) -> dict[int, Any]:
        numbers = range(self._started, self._started + max(0, count))
        self._started += len(numbers)
        self.asked += numbers
        return dict.fromkeys(numbers)

    def _start(self, places: Mapping[int, Any]) -> list[Member]:
        self.begun.set()
        assert self.go.wait(60)
        return [Member(number=number, facts={"node": f"node {number}"}) for number in places]


@pytest.fixture
def all_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place that is asked for is there."""
    monkeypatch.setattr("raypipe.runtime.workers.roster.granted", dict)
    monkeypatch.setattr("raypipe.runtime.workers.growth.granted", dict)
    monkeypatch.setattr("raypipe.runtime.workers.roster.wait_for", lambda places, needs, patience_s: None)
    monkeypatch.setattr("raypipe.runtime.workers.roster.release", lambda places: None)


def test_workers_that_are_starting_are_not_asked_for_again(all_come: None) -> None:
    places = Places(1)
    places.ask_for(2)
    starting = threading.Thread(target=places.start_granted)
    starting.start()
    assert places.begun.wait(60)
    places.ask_for(2)
    assert (places.starting, places.living, places.waiting) == (1, 1, {})
    growing = threading.Thread(target=places.grow, args=(2,))
    growing.start()
    places.go.set()
    starting.join(60)
    growing.join(60)
    assert (places.starting, places.living, places.asked) == (0, 2, [0, 1])


@pytest.mark.usefixtures("all_come", "often")
@pytest.mark.parametrize(("seconds_left", "leaves"), [(60.0, {"node 1"}), (None, {"node 1"}), (-1.0, set())])
def test_others_are_asked_for_in_place_of_those_that_are_about_to_go(
    seconds_left: float | None, leaves: set[str]
) -> None:
    """And once they are there the node is left again, for a move may have been refused for want of them."""
    places, requests = Places(4), Requests()
    places.go.set()
    growth = growth_on(places, requests, [])
    starting: Any = SimpleNamespace(state="starting")
    going = {"node 1": None if seconds_left is None else time.time() + seconds_left, "node 7": None}
    growth.serve(SimpleNamespace(), lambda: starting, lambda: going)  # type: ignore[arg-type]
    wait_until(lambda: places.living == 5, 60.0)
    if leaves:
        wait_until(lambda: requests.wants_change, 60.0)
    growth.close()
    assert requests.take_leaving() == leaves
    assert places.asked == [0, 1, 2, 3, 4]


class Fails:
    """Raises these errors, one a call, and then an answer is given for ever."""

    def __init__(self, errors: list[Exception], answer: Any) -> None:
        self._errors, self._answer, self.went_on = errors, answer, threading.Event()

    def __call__(self, *given: Any) -> Any:
        if self._errors:
            raise self._errors.pop(0)
        self.went_on.set()
        return self._answer


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads look many times a second."""
    for name in ("growth.EVERY_S", "growth.AGAIN_S", "growth.POLL_S", "growth.SETTLE_S", "drain_watch.EVERY_S"):
        monkeypatch.setattr(f"raypipe.runtime.workers.{name}", 0.01)


@pytest.mark.usefixtures("often")
def test_growth_goes_on_after_an_error_that_nobody_expects() -> None:
    told: list[tuple[str, str]] = []
    asks = Fails([KeyError("state"), KeyError("state"), ConnectionError("away")], None)
    growth = growth_on(SimpleNamespace(ask_for=asks, staying=dict.fromkeys, start_granted=lambda: 0), Requests(), told)
    starting: Any = SimpleNamespace(state="starting")
    growth.serve(SimpleNamespace(), lambda: starting, dict)  # type: ignore[arg-type]
    try:
        assert asks.went_on.wait(60)
    finally:
        growth.close()
    assert [reason for _, reason in told] == ["The run could not grow: 'state'", "The run could not grow: away"]


@pytest.mark.usefixtures("often", "all_come")
def test_a_wait_for_workers_outlasts_the_head_of_ray() -> None:
    asks = Fails([ConnectionError("away"), RuntimeError("away")], None)
    places = SimpleNamespace(ask_for=asks, living=4, starting=0, waiting={}, start_granted=lambda: 0)
    assert growth_on(places, Requests(), []).wait() == 4


@pytest.mark.usefixtures("often")
def test_nodes_are_watched_after_an_error_that_nobody_expects() -> None:
    told, notice = [], Notice(Kind.PAUSES, None, "somebody: soon")
    announced = Fails([KeyError("node"), KeyError("node")], {"node": [notice]})
    watch = DrainWatch(lambda: {"node"}, announced, lambda nodes: None, lambda *of, **numbers: told.append(of))
    try:
        wait_until(lambda: ("notice", "somebody: soon: the machine pauses") in told, 60.0)
    finally:
        watch.close()
    assert [decision for decision, reason in told if "KeyError" in reason] == ["warning"]


@pytest.mark.usefixtures("often", "all_come")
def test_who_lost_the_run_does_not_wait_for_workers_any_more() -> None:
    places = SimpleNamespace(ask_for=lambda count, going: None, living=0, starting=0, waiting={}, needs={})
    growth = growth_on(places, Requests(), [])
    growth.check = Fails([LeaseError("taken over")], None)
    with pytest.raises(LeaseError):
        growth.wait()
