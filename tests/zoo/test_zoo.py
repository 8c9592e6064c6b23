"""Every row trains as plain PyTorch does, or is refused before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.zoo.cases import ROWS
from tests.zoo.row import Refused
from tests.zoo.table import DOCUMENT, page
from tests.zoo.training import differences_of, refusal_of


@pytest.mark.slow
@pytest.mark.usefixtures("captures_of_a_test")
@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_its_verdict(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    if row.needs:
        pytest.importorskip(row.needs)
    for count, verdict in row.runs:
        if isinstance(verdict, Refused):
            message = refusal_of(row, count, tmp_path)
            assert verdict.fits(message), message
        else:
            assert differences_of(row, count, tmp_path) == [], f"in {count} micro-batches"


RUN_AGAIN = (
    "MLP with every dropout | cross_entropy | vectors",
    "BatchNorm in nn.Sequential | cross_entropy | images",
    "spectral_norm | cross_entropy | vectors",
    "frozen in the middle | cross_entropy | vectors",
    "torch.cond | cross_entropy | vectors",
    "custom autograd functions, traced | cross_entropy | vectors",
    "rows picked by a mask | cross_entropy | vectors",
    "LSTM, 2 layers, dropout | cross_entropy | sequences",
    "BatchNorm, momentum=None, traced | cross_entropy | images",
    "checkpoint(use_reentrant=True), dropout | cross_entropy | vectors",
)
"""Draws, statistics, buffers that a forward reads and changes, stages that train nothing, branches and sizes by value,
and what the model computes again by itself."""


@pytest.mark.slow
@pytest.mark.usefixtures("captures_of_a_test")
@pytest.mark.parametrize("name", RUN_AGAIN)
def test_forwards_that_run_again_change_no_bit(name: str, tmp_path: Path) -> None:
    """Nor do backwards that are split."""
    row = ROWS[name]
    assert differences_of(row, max(row.microbatches), tmp_path, recompute="always", schedule="zb-h1") == []


def test_the_document_is_what_the_rows_say() -> None:
    """Their verdicts are what the tests above show; write it anew with ``python -m tests.zoo.table``."""
    assert len(ROWS) >= 60
    assert DOCUMENT.read_text(encoding="utf-8") == page(ROWS.values())
