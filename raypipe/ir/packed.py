"""A row as three arrays instead of a tuple of actions: the same sequence, ten times smaller.

A schedule of 1024 stages and 4096 micro-batches has 25 million actions. As arrays they are made, lowered and
simulated without one Python object for each; an action comes into being when somebody looks at it.

    stage       2  2       2  ...
    op          F  SEND_F  F        (places in ``OPS``)
    microbatch  0  0       1
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from typing import overload

from raypipe.ir.action import Action, Op

__all__ = ["OPS", "OP_CODE", "PackedRow"]

OPS = tuple(Op)
OP_CODE = {op: code for code, op in enumerate(OPS)}

# What _make does, without a Python frame for each of a million tuples.
_ACTION = partial(tuple.__new__, Action)


class PackedRow(Sequence[Action]):
    """Actions of one worker; equal to the tuple of them. Not to be changed.

    Args:
        stage, microbatch: by action, arrays of type "i".
        op: by action, places in ``OPS``, an array of type "b".
    """

    __slots__ = ("microbatch", "op", "stage")

    def __init__(self, stage: array[int], op: array[int], microbatch: array[int]) -> None:
        self.stage = stage
        self.op = op
        self.microbatch = microbatch

    def __len__(self) -> int:
        return len(self.op)

    def __iter__(self) -> Iterator[Action]:
        return map(_ACTION, zip(self.stage, map(OPS.__getitem__, self.op), self.microbatch, strict=True))

    @overload
    def __getitem__(self, index: int) -> Action: ...

    @overload
    def __getitem__(self, index: slice) -> PackedRow: ...

    def __getitem__(self, index: int | slice) -> Action | PackedRow:
        if isinstance(index, slice):
            return PackedRow(self.stage[index], self.op[index], self.microbatch[index])
        return Action(self.stage[index], OPS[self.op[index]], self.microbatch[index])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedRow):
            return (self.op, self.stage, self.microbatch) == (other.op, other.stage, other.microbatch)
        if isinstance(other, tuple):
            return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        shown = " ".join(map(str, self[:8]))
        return f"<{len(self)} actions: {shown}{' ...' if len(self) > 8 else ''}>"
