"""Ray's list of nodes that are about to go, where Ray has none. What it does on a cluster: test_drain_watch.py."""

from __future__ import annotations

import pytest

from raypipe.runtime.workers import drains

pytestmark = pytest.mark.ray


def test_a_release_of_ray_without_it_is_met_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drains, "_module", lambda name: None)
    assert drains.draining_nodes() == {}
    assert "no interface for it" in drains.drain_node("ab" * 28, "", None)
