"""docs/zoo.md, from the results that the zoo's tests left in pytest's cache.

python -m pytest tests/zoo         runs the rows
python -m tests.zoo.table          writes the document; fails where a row has no result
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.zoo.row import Row

__all__ = ["DOCUMENT", "HEAD", "Result", "page", "results_folder"]

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "zoo.md"
HEAD = "| family | model | loss | data | verdict | note |"


@dataclasses.dataclass(frozen=True)
class Result:
    """What a row's test has shown, in the words of the table."""

    family: str
    model: str
    loss: str
    data: str
    verdict: str
    note: str

    @classmethod
    def of(cls, row: Row) -> Result:
        """What a row says of itself."""
        counts = " and ".join(map(str, row.microbatches))
        counted = "" if row.microbatches == (1, 4) else f"micro-batches: {counts}"
        note = "; ".join(part for part in (row.verdict.note, row.note, counted) if part)
        return cls(row.family, row.model, row.loss, row.data, row.verdict.word, note)

    @property
    def line(self) -> str:
        return f"| {' | '.join(part.replace('|', '/') for part in dataclasses.astuple(self))} |".replace("|  |", "| |")

    def write(self, folder: Path) -> None:
        """One file for each row, because rows are tested by several processes."""
        (folder / _file_of(self.model, self.loss, self.data)).write_text(json.dumps(dataclasses.asdict(self)))


def results_folder(config: Any) -> Path:
    """Of a pytest session."""
    return Path(config.cache.mkdir("zoo"))


def page(results: Iterable[Result]) -> str:
    """The whole document."""
    results = list(results)
    counts = Counter(result.verdict for result in results)
    numbers = {
        "rows": len(results),
        **{word: counts[word] for word in ("equal", "rounding", "refused")},
    }
    return _PAGE.format(**numbers, head=HEAD, lines="\n".join(result.line for result in results))


_PAGE = """# The zoo

{rows} models, losses and data sets: {equal} equal to plain PyTorch to the bit, {rounding} within stated rounding,
{refused} refused before the first step. Written by `python -m tests.zoo.table` from the results of `tests/zoo`.

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

{head}
|---|---|---|---|---|---|
{lines}
"""


def _file_of(*words: str) -> str:
    return hashlib.sha256(" | ".join(words).encode()).hexdigest()[:16] + ".json"


def main() -> int:
    """Write the document from the newest results, in the order of the rows; 1 where one is missing."""
    from tests.zoo.cases import ROWS

    folder = ROOT / ".pytest_cache" / "d" / "zoo"
    found, missing = [], []
    for name, row in ROWS.items():
        file = folder / _file_of(row.model, row.loss, row.data)
        if file.exists():
            found.append(Result(**json.loads(file.read_text())))
        elif not row.pending:
            missing.append(name)
    if missing:
        print(f"No result of {len(missing)} rows; run python -m pytest tests/zoo first: {missing}", file=sys.stderr)
        return 1
    DOCUMENT.write_text(page(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
