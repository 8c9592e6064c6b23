"""Engine tests draw the same numbers on every run and leave the second core to others."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _steady_torch() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _home_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A run without a storage path goes to the home folder; not to the real one from here."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
