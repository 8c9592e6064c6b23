"""What a run that may change its number of workers asks for, waits for and forgets; with places of this process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from raypipe.config.ray import WorkerRange
from raypipe.runtime.driver.succession import Charter
from raypipe.runtime.run.planned import Asked
from raypipe.runtime.run.requests import Requests
from raypipe.runtime.workers.growth import Growth

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
