"""Copies of other workers' stages, or pieces of them, as they arrive; the older one stays until the newer one is whole.

begin(owner, header)    place(owner, step, offset, bytes) ...    the last byte makes it whole
held    [step 10 whole] [step 20: 37 of 96 MB]  -->  [step 10] [step 20 whole]  -->  begin(step 30) drops step 10
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from raypipe.engine.copy.header import TENSORS, CopyHeader
from raypipe.engine.copy.source import CopySource, views_of
from raypipe.engine.messages.layout import raw_bytes
from raypipe.errors import CheckpointError

__all__ = ["PARCEL_BYTES", "HeldCopies", "HeldCopy", "parcels_of"]

PARCEL_BYTES = 1 << 20
"""Of a block that travel at once."""


def parcels_of(block: torch.Tensor, parcel_bytes: int = PARCEL_BYTES) -> Iterator[tuple[int, memoryview]]:
    """(offset, bytes) of all of a block; the bytes are its memory."""
    data = raw_bytes(block, block.nbytes).cast("B")
    for offset in range(0, len(data), parcel_bytes):
        yield offset, data[offset : offset + parcel_bytes]


class HeldCopy:
    """One copy that arrives in order.

    Attributes:
        header: of it.
    """

    def __init__(self, header: CopyHeader, block: torch.Tensor | None = None) -> None:
        self.header = header
        fits = block is not None and block.nbytes == header.size_bytes
        self.block = block if fits and block is not None else torch.empty(header.size_bytes, dtype=torch.uint8)
        self._arrived_bytes = 0

    @property
    def whole(self) -> bool:
        return self._arrived_bytes == self.header.size_bytes

    def place(self, offset: int, data: bytes | memoryview) -> None:
        """Take the next bytes; those that came before may come again.

        Raises:
            CheckpointError: they are not the next ones.
        """
        end = offset + len(data)
        if offset > self._arrived_bytes or end > self.header.size_bytes or offset < 0:
            raise CheckpointError(
                f"Bytes {offset} to {end} of a copy of {self.header.size_bytes} bytes came when {self._arrived_bytes} "
                "were there."
            )
        if end > self._arrived_bytes:
            raw_bytes(self.block, self.block.nbytes).cast("B")[offset:end] = data
            self._arrived_bytes = end

    def source(self) -> CopySource:
        """The state that it is.

        Raises:
            CheckpointError: not all of it has come.
        """
        if not self.whole:
            raise CheckpointError(
                f"Of the copy of stage {self.header.stage} after step {self.header.step} only {self._arrived_bytes} "
                f"of {self.header.size_bytes} bytes have come."
            )
        return CopySource(self.header, views_of(self.block))


class HeldCopies:
    """Of one stage of another worker, or a piece of it: the newest whole copy, and the one that comes."""

    def __init__(self) -> None:
        self._copies: list[HeldCopy] = []

    @property
    def steps(self) -> tuple[int, ...]:
        """Of which there is a whole copy, in order."""
        return tuple(sorted(copy.header.step for copy in self._copies if copy.whole))

    @property
    def size_bytes(self) -> int:
        """Of the memory that they take."""
        return sum(copy.block.nbytes for copy in self._copies)

    @property
    def pieces(self) -> int:
        """See CopyHeader."""
        return self._copies[-1].header.pieces if self._copies else 0

    @property
    def names(self) -> tuple[str, ...]:
        """Of parameters and buffers, as in the newest."""
        names = self._copies[-1].header.table if self._copies else ()
        return tuple(name.removeprefix(TENSORS) for name in names if name.startswith(TENSORS))

    def begin(self, header: CopyHeader) -> HeldCopy:
        """Expect a copy, in the memory of the one that it takes the place of: all go but the newest whole one before.

        Copies of later steps go too, for the run has gone back. One of the same step stays if it is whole: that is
        where the run went back to.
        """
        before = [copy for copy in self._copies if copy.whole and copy.header.step <= header.step]
        kept = max(before, key=lambda copy: copy.header.step, default=None)
        if kept is not None and kept.header.step == header.step:
            self._copies = before
            return kept
        spare = next((copy.block for copy in self._copies if copy is not kept), None)
        coming = HeldCopy(header, spare)
        self._copies = [copy for copy in (kept,) if copy is not None] + [coming]
        return coming

    def forget_after(self, step: int) -> None:
        """The run has gone back to this step."""
        self._copies = [copy for copy in self._copies if copy.header.step <= step]

    def copy(self, step: int) -> HeldCopy:
        """That of this step, whole or not.

        Raises:
            CheckpointError: there is none.
        """
        for copy in self._copies:
            if copy.header.step == step:
                return copy
        raise CheckpointError(f"There is no copy of step {step} here, only of {list(self.steps) or 'none'}.")
