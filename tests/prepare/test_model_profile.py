"""What a plan says of workers that share this machine's processors."""

from __future__ import annotations

import os

import pytest

from raypipe.prepare.model_profile import shared_processors
from raypipe.run.plans.planning import crowded_notes

pytestmark = pytest.mark.engine


def test_more_workers_than_processors_are_told_that_they_wait() -> None:
    assert crowded_notes(2, 2) == []
    assert "3 workers share this machine's 2 processors" in crowded_notes(3, 2)[0]
    assert crowded_notes(10_000, 2) == [], "which must be meant for elsewhere"
    assert crowded_notes(3, None) == []


def test_processors_are_shared_where_all_workers_will_be_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert shared_processors() == len(os.sched_getaffinity(0))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert shared_processors() is None
