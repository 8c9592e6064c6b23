"""The spans of a simulated run as arrays, for the same reason as the rows of ``raypipe.ir.packed``."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from typing import overload

from raypipe.ir.packed import PackedRow
from raypipe.ir.timeline import Span

__all__ = ["PackedSpans"]

# What _make does, without a Python frame for each of a million tuples.
_SPAN = partial(tuple.__new__, Span)


class PackedSpans(Sequence[Span]):
    """Spans of a simulated run; equal to the tuple of them. Not to be changed.

    Args:
        worker: by span, an array of type "i".
        actions: by span.
        start_s, end_s: by span, arrays of type "d".
    """

    __slots__ = ("actions", "end_s", "start_s", "worker")

    def __init__(self, worker: array[int], actions: PackedRow, start_s: array[float], end_s: array[float]) -> None:
        self.worker = worker
        self.actions = actions
        self.start_s = start_s
        self.end_s = end_s

    def __len__(self) -> int:
        return len(self.worker)

    def __iter__(self) -> Iterator[Span]:
        return map(_SPAN, zip(self.worker, self.actions, self.start_s, self.end_s, strict=True))

    @overload
    def __getitem__(self, index: int) -> Span: ...

    @overload
    def __getitem__(self, index: slice) -> PackedSpans: ...

    def __getitem__(self, index: int | slice) -> Span | PackedSpans:
        if isinstance(index, slice):
            return PackedSpans(self.worker[index], self.actions[index], self.start_s[index], self.end_s[index])
        return Span(self.worker[index], self.actions[index], self.start_s[index], self.end_s[index])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedSpans | tuple):
            return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"<{len(self)} spans>"
