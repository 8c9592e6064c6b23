"""Engine tests draw the same numbers on every run and leave the second core to others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.shared_captures import shared_capture

_TRACING = {"test_capture", "test_capture_graph", "test_exactness", "test_profile_graph"}
"""They use the same captures, each of which takes a process seconds, once."""
_TRAINING = {"test_asynchronous", "test_asynchronous_life", "test_resume", "test_retuning"}
"""Their trainers get the capture of the first one whose model is equal."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which tests share a worker of pytest-xdist: those of a file, and all that use the same captures."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            group = "tracing" if item.path.stem in _TRACING else item.path.stem
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True)
def _steady_torch() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _captures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.path.stem in _TRAINING:
        monkeypatch.setattr("raypipe.prepare.inputs.capture", shared_capture)


@pytest.fixture(autouse=True)
def _home_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A run without a storage path goes to the home folder; not to the real one from here."""
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
