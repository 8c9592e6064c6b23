"""Tests of this folder need an NVIDIA GPU. Where torch can use none, one of them says so for all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from raypipe.engine.device.cuda_device import why_not


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    reason = why_not() if mine else ""
    if reason:
        mine[0].add_marker(pytest.mark.skip(reason=f"{len(mine)} tests that need a GPU: {reason}"))
        config.hook.pytest_deselected(items=mine[1:])
        items[:] = [item for item in items if item not in mine[1:]]


@pytest.fixture
def kernels_that_repeat_themselves(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Atomic sums differ from run to run, with or without a pipeline."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
