"""Rows of the zoo trace their model once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raypipe.capture import Capture, capture


class Once:
    """As ``raypipe.capture.capture``, for one model: its runs in other micro-batches take the same graphs."""

    def __init__(self) -> None:
        self.made: Capture | None = None

    def __call__(self, model: torch.nn.Module, example: Any, columns: Any, loss_fn: Any, **how: Any) -> Capture:
        if self.made is None:
            self.made = capture(model, example, columns, loss_fn, **{**how, "evaluates": True})
        return self.made


@pytest.fixture(autouse=True)
def _one_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing is nine tenths of a row's time."""
    once = Once()
    monkeypatch.setattr("raypipe.prepare.inputs.capture", once)
    monkeypatch.setattr("raypipe.testing.capture", once)
