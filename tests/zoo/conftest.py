"""Rows of the zoo begin with the same numbers drawn, on one thread."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _steady_torch() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
