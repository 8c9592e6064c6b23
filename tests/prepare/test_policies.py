"""Workers on one machine: those that share its processors, and what threads of one process cannot do."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from raypipe.errors import ConfigError
from raypipe.prepare.model_profile import shared_processors
from raypipe.prepare.policies import refuse_in_threads
from raypipe.run.plans.planning import crowded_notes

pytestmark = pytest.mark.engine


def test_threads_do_not_grow() -> None:
    refuse_in_threads(None, detached=False)
    refuse_in_threads(SimpleNamespace(num_workers=8), detached=False)
    with pytest.raises(ConfigError, match=r"num_workers=\(2, 8\)\): the number of threads .* Give num_workers=8"):
        refuse_in_threads(SimpleNamespace(num_workers=(2, 8)), detached=False)


def test_threads_end_with_their_process() -> None:
    with pytest.raises(ConfigError, match="cannot be detached"):
        refuse_in_threads(None, detached=True)


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
