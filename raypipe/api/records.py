"""Records of all steps of a run, however many: a table in memory, whose rows become records when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import pyarrow as pa
import pyarrow.compute as pc

from raypipe.engine.metrics import records_of, table_of, table_read
from raypipe.ir.report import StepRecord

__all__ = ["Records", "table_of_all"]

ANY_STEP = 1 << 62
BLOCK = 4096
"""Rows that become records at once."""


class Records(Sequence[StepRecord]):
    """One StepRecord per step, the first step first. Slices are tuples.

    Args:
        table: as ``table_of`` makes it.
    """

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self._block = -1
        self._records: list[StepRecord] = []

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @overload
    def __getitem__(self, place: int) -> StepRecord: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[StepRecord, ...]: ...

    def __getitem__(self, place: int | slice) -> StepRecord | tuple[StepRecord, ...]:
        if isinstance(place, slice):
            return tuple(self[one] for one in range(len(self))[place])
        block, row = divmod(range(len(self))[place], BLOCK)
        if block != self._block:
            self._block, self._records = block, records_of(self.table.slice(block * BLOCK, BLOCK))
        return self._records[row]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Records | tuple) and tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return f"<records of {len(self)} steps>"


def table_of_all(last: Sequence[StepRecord], before: Callable[[int], bytes | None]) -> pa.Table:
    """One row per step of the run.

    Args:
        last: records of the newest steps.
        before: (step) -> the newest part of metrics.parquet with steps below; None where there is none.
    """
    tables = [table_of(last)]
    first = last[0].step if last else ANY_STEP
    while first > 0 and (part := before(first)) is not None:
        table = table_read(part, "A part of metrics.parquet")
        table = table.filter(pc.less(table["step"], first))
        if not table.num_rows:
            break
        tables.append(table)
        first = table["step"][0].as_py()
    return pa.concat_tables(tables[::-1], promote_options="default")
