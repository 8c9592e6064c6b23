"""Engine tests draw the same numbers on every run and leave the second core to others."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _steady_torch() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
