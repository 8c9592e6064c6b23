"""Profiles of tests are measured in few passes."""

from __future__ import annotations

import pytest

from raypipe.profiling import measure


@pytest.fixture(autouse=True)
def _few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "REPEATS", 2)
