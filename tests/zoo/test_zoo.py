"""Every row trains as plain PyTorch does, or is refused before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zoo.cases import ROWS
from tests.zoo.row import Refused
from tests.zoo.training import differences_of


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ROWS)
def test_row(name: str, tmp_path: Path, request) -> None:
    row = ROWS[name]
    if isinstance(row.verdict, Refused):
        return
    for count in sorted(row.microbatches, reverse=True):
        assert differences_of(row, count, tmp_path) == [], f"{count} micro-batches"
