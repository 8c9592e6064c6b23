"""What a run that may change its number of workers asks for, waits for and forgets; with places of this process."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raypipe.config.ray import WorkerRange
from raypipe.runtime.driver.succession import Charter
from raypipe.runtime.run.planned import Asked
from raypipe.runtime.run.requests import Requests
from raypipe.runtime.workers.growth import Growth
from raypipe.runtime.workers.places import Owner
from raypipe.runtime.workers.roster import Member, Roster

pytestmark = pytest.mark.ray


def growth_on(places: Any, requests: Requests, told: list[tuple[str, str]], survives: bool = False) -> Growth:
    """Of a run of 2 to 4 workers whose plan for the most of them uses all."""
    fleet: Any = SimpleNamespace(places=places, in_use=[], rehearse_spares=lambda: None)
    event = lambda decision, reason, **numbers: told.append((decision, reason))  # noqa: E731
    return Growth(fleet, WorkerRange(2, 4, 0.0), 4, requests, lambda line: None, event, survives=survives)


def test_a_size_that_somebody_asked_for_outlives_the_driver() -> None:
    growth = growth_on(SimpleNamespace(), Requests(), [])
    assert (growth.asked, growth.count) == (None, 4)
    growth.wants(Asked(num_stages=2, workers=2))
    assert growth.count == 2
    first: Any = Charter(*[None] * 4, planned=None, resources={})  # type: ignore[arg-type]
    later = ray.cloudpickle.loads(first.packed("a plan", growth.asked))
    assert (later.planned, later.asked) == ("a plan", Asked(2, 2))


class Places(Roster):
    """All places come at once, and processes start when ``go`` is set; ``asked`` are the numbers of all places."""

    def __init__(self, count: int) -> None:
        self.go, self.begun, self.asked = threading.Event(), threading.Event(), list[int]()
        self.go.set()
        super().__init__(count, {"CPU": 1}, "tcp", None, Owner())
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
