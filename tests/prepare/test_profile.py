"""What a plan says of workers that share this machine's processors."""

from __future__ import annotations

import os

import pytest

from raypipe.prepare.profile import crowded_notes

pytestmark = pytest.mark.engine


def test_more_workers_than_processors_are_told_that_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    here = len(os.sched_getaffinity(0))
    assert crowded_notes(here) == []
    assert f"{here + 1} workers share this machine's {here} processors" in crowded_notes(here + 1)[0]
    assert crowded_notes(10_000) == [], "which must be meant for elsewhere"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert crowded_notes(here + 1) == []
