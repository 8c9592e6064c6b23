"""The first mini-batch of a run in words, for people who want to see what their model will be given.

train_data: 1,024 samples, of which the first 8 of epoch 0
  input_ids  (8, 128) int64    0 to 511     17 4 99 3 ...
  labels     (8, 128) int64    -100 to 511  17 4 99 3 ...  -100 in 31 %
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from raypipe.engine.data.source import open_data
from raypipe.engine.data.stream_source import ENDLESS
from raypipe.engine.microbatch import IGNORED_TARGET

if TYPE_CHECKING:
    from raypipe.api.trainer import PipelineTrainer

__all__ = ["first_batches"]

SAMPLES = 8
"""Where the size of a mini-batch follows from a profile that nobody has measured here."""
SHOWN = 6


def first_batches(trainer: PipelineTrainer) -> Iterator[str]:
    """The text of train_data, and that of eval_data where there is any.

    Raises:
        DataError: as a run would.
    """
    given, pipeline = trainer._arguments, trainer._pipeline
    size = SAMPLES if pipeline.minibatch_size == "auto" else pipeline.minibatch_size
    for name, data, shuffle in (("train_data", given.train_data, True), ("eval_data", given.eval_data, False)):
        if data is None:
            continue
        source = open_data(data, seed=pipeline.seed, shuffle=shuffle, collate=given.collate_fn)
        count = min(size, source.num_samples)
        read = source.read(0, 0, count, source.columns)
        columns = read if isinstance(read, Mapping) else dict(zip(source.columns, read, strict=True))
        of_epoch = " of epoch 0" if shuffle else ""
        whole = "a stream" if source.num_samples == ENDLESS else f"{source.num_samples:,} samples"
        lines = [f"{name}: {whole}, of which the first {count}{of_epoch}"]
        yield "\n".join(lines + _table([_row(column, value) for column, value in columns.items()]))


def _row(column: Any, value: torch.Tensor) -> list[str]:
    flat = value.reshape(-1)
    exact = not value.is_floating_point()
    shown = [f"{number}" if exact else f"{number:.4g}" for number in flat[:SHOWN].tolist()]
    extent = "" if not len(flat) else f"{_number(flat.min())} to {_number(flat.max())}"
    ignored = float((flat == IGNORED_TARGET).double().mean()) if exact and len(flat) else 0.0
    more = f"  {IGNORED_TARGET} in {ignored:.0%}" if ignored else ""
    kind = str(value.dtype).removeprefix("torch.")
    first = " ".join(shown) + (" ..." if len(flat) > SHOWN else "") + more
    return [str(column), str(tuple(value.shape)), kind, extent, first]


def _number(value: torch.Tensor) -> str:
    return f"{value.item():.4g}" if value.is_floating_point() else str(value.item())


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))] if rows else []
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
