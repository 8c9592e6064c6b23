"""An order to all stages: one segment, and what else is wanted of it. Orders and reports are all the driver moves."""

from __future__ import annotations

from typing import Any, NamedTuple

from raypipe.ir.segment import RowsKey, Segment

__all__ = ["Order"]


class Order(NamedTuple):
    """A segment to carry out.

    Attributes:
        training: False evaluates.
        keep_spans: note when every action began and ended.
        save_to: folder of a checkpoint, below the run's; every stage takes a snapshot after the segment and writes
            it there while training goes on. Empty for none.
        measure: report how long actions and messages took.
        codecs: of all messages from this segment on, by hop: forward, backward; empty for what was configured.
        keep_copy: every stage keeps a copy of its state after the segment in memory, to go back to.
        written: steps whose records are in the run's folder, so that stages need not remember their reports.
        memo: what a driver that takes the stages over is to know of it; stages only keep it, as bytes.
    """

    segment: Segment
    training: bool = True
    keep_spans: bool = False
    save_to: str = ""
    measure: bool = False
    codecs: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    keep_copy: bool = False
    written: int = 0
    memo: Any = None

    @property
    def rows(self) -> RowsKey:
        """The rows that carry it out."""
        return self.segment.rows(training=self.training)
