"""docs/zoo.md, from the rows, whose verdicts test_zoo.py shows; ``python -m tests.zoo.table`` writes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.zoo.row import Row

__all__ = ["DOCUMENT", "page"]

DOCUMENT = Path(__file__).parents[2] / "docs" / "zoo.md"


def page(rows: Iterable[Row]) -> str:
    """Write the whole document."""
    rows = list(rows)
    counts = Counter(row.verdict.word for row in rows)
    numbers = {"rows": len(rows), **{word: counts[word] for word in ("equal", "rounding", "refused")}}
    return _PAGE.format(**numbers, lines="\n".join(map(_line, rows)))


def _line(row: Row) -> str:
    counts = " and ".join(map(str, row.microbatches))
    counted = "" if row.microbatches == (1, 4) else f"micro-batches: {counts}"
    note = "; ".join(part for part in (row.verdict.note, row.note, counted) if part)
    parts = (row.family, row.model, row.loss, row.data, row.verdict.word, note)
    return f"| {' | '.join(part.replace('|', '/') for part in parts)} |".replace("|  |", "| |")


_PAGE = """# The zoo

{rows} models, losses and data sets: {equal} equal to plain PyTorch to the bit, {rounding} within stated rounding,
{refused} refused before the first step. `python -m tests.zoo.table` writes this page; the tests of `tests/zoo` show it.

Each row is trained with `PipelineTrainer.fit(local=True)` in 2 or 3 stages, over four steps and into a second epoch,
with mini-batches of 8, 8, 4 and 8 samples in four micro-batches, and again with mini-batches of 2 samples in one;
dropout is on where the model has it, and settings are the defaults but for `partitioner="parameters"`, which times
nothing. Beside it plain PyTorch trains the same model on the same micro-batches with the same weights
(`raypipe.testing.reference`).

- **equal**: losses, gradient norms, every gradient of every step, parameters and buffers, to the bit.
- **rounding**: the same, within the stated part of the largest entry.
- **refused**: with a message that the row asserts whole.

Of every row that trains, the first step's loss (to 3e-6), gradient norm (1e-5) and gradients (1e-4) are also those of
plain PyTorch on the *whole mini-batch* at once, unless random numbers or statistics of a batch come between, and
`eval_loss` is plain PyTorch's on all samples at once.

| family | model | loss | data | verdict | note |
|---|---|---|---|---|---|
{lines}
"""


if __name__ == "__main__":
    from tests.zoo.cases import ROWS

    DOCUMENT.write_text(page(ROWS.values()), encoding="utf-8")
