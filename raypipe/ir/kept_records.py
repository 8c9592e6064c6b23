"""KeptRecords: the records of many steps in little memory, which a run of any length keeps the last of.

as objects    StepRecord(step=7, loss=0.31, ...)     450 bytes each, most of them for the numbers in it
in columns    step   5    6    7                     120 bytes
              loss   0.4  0.3  0.31
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, overload

from raypipe.ir.report import StepRecord

__all__ = ["KeptRecords"]

_CODES = {"int": "q", "float": "d", "bool": "b"}
_FIELDS = {field.name: str(field.type) for field in fields(StepRecord)}
_SPARE = 8
"""Records are dropped an eighth at a time: each time all that are kept move up."""


class KeptRecords(Sequence[StepRecord]):
    """The end of a list of records. Its items are made when they are asked for, and slices are such lists.

    Args:
        records: to begin with.
        most: that are kept for sure; up to an eighth more may be. None keeps all.

    Attributes:
        first: place of the oldest one in the whole list.
    """

    def __init__(self, records: Iterable[StepRecord] = (), most: int | None = None) -> None:
        self._columns: dict[str, Any] = {
            name: array(_CODES[kind]) if kind in _CODES else [] for name, kind in _FIELDS.items()
        }
        self._most = most
        self.first = 0
        self.extend(records)

    @property
    def end(self) -> int:
        """Place behind the newest one in the whole list."""
        return self.first + len(self)

    def append(self, record: StepRecord) -> None:
        for name, column in self._columns.items():
            value = getattr(record, name)
            # Records that came from another process bring a text each, of the few that there are.
            column.append(sys.intern(value) if _FIELDS[name] == "str" else value)
        if self._most is not None and len(self) > self._most + self._most // _SPARE:
            self.forget(len(self) - self._most)

    def extend(self, records: Iterable[StepRecord]) -> None:
        for record in records:
            self.append(record)

    def pop(self) -> StepRecord:
        """The newest one, which is then none of the list."""
        record = self[-1]
        for column in self._columns.values():
            column.pop()
        return record

    def forget(self, count: int) -> None:
        """Keep the oldest ones no more."""
        self.first += min(count, len(self))
        for column in self._columns.values():
            del column[:count]

    def clear(self) -> None:
        """Keep none of them."""
        self.forget(len(self))

    def since(self, place: int) -> list[StepRecord]:
        """Those from ``place`` in the whole list on that are still kept."""
        return list(self[max(0, place - self.first) :])

    def column(self, name: str) -> Sequence[Any]:
        """A field of all of them: an array of 8 bytes a number, or of 1 a bool, else a list. It is not a copy."""
        return self._columns[name]  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self._columns["step"])

    @overload
    def __getitem__(self, place: int) -> StepRecord: ...

    @overload
    def __getitem__(self, place: slice) -> KeptRecords: ...

    def __getitem__(self, place: int | slice) -> StepRecord | KeptRecords:
        found = {name: column[place] for name, column in self._columns.items()}
        if isinstance(place, slice):
            made = KeptRecords()
            made._columns = found
            return made
        found = {name: bool(value) if _FIELDS[name] == "bool" else value for name, value in found.items()}
        return StepRecord(**found)

    def __repr__(self) -> str:
        return f"<{len(self)} records>"
