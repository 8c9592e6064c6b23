"""Copies of other workers' stages, or pieces of them, as they are received; an older one is kept until a newer one is
complete.

begin(owner, header)    place(owner, step, offset, bytes) ...    the last byte completes it
held    [step 10 whole] [step 20: 37 of 96 MB]  -->  [step 10] [step 20 whole]  -->  begin(step 30) drops step 10
"""

from __future__ import annotations

import torch

from raypipe.engine.copy.copy_header import TENSORS, CopyHeader, CopyPiece, views_of
from raypipe.engine.messages.record import raw_bytes
from raypipe.errors import CheckpointError


class HeldCopy:
    """Copy whose bytes are received in order.

    Attributes:
        header: header of the copy.
        block: memory of the copy, uint8, shape (header.size_bytes,).
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
        """Store bytes at an offset; they may overlap bytes that were stored before, but must leave no gap.

        Raises:
            CheckpointError: they leave a gap, or are outside the copy.
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

    def piece(self) -> CopyPiece:
        """Return the copied state.

        Raises:
            CheckpointError: the copy is incomplete.
        """
        if not self.whole:
            raise CheckpointError(
                f"Of the copy of stage {self.header.stage} after step {self.header.step} only {self._arrived_bytes} "
                f"of {self.header.size_bytes} bytes have come."
            )
        return CopyPiece(self.header, views_of(self.block))


class HeldCopies:
    """Received copies of one stage of another worker, or of a piece of it: the newest complete one, and an incoming
    one.
    """

    def __init__(self) -> None:
        self._copies: list[HeldCopy] = []

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps of which there is a complete copy, in order."""
        return tuple(sorted(copy.header.step for copy in self._copies if copy.whole))

    @property
    def pieces(self) -> int:
        """See CopyHeader."""
        return self._copies[-1].header.pieces if self._copies else 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of parameters and buffers in the newest copy."""
        names = self._copies[-1].header.table if self._copies else ()
        return tuple(name.removeprefix(TENSORS) for name in names if name.startswith(TENSORS))

    def begin(self, header: CopyHeader) -> HeldCopy:
        """Begin to receive a copy. All other copies are dropped, except the newest complete one of an earlier step; the
        memory of a dropped copy is reused.

        Copies of later steps are dropped because the run has rolled back. If there is a complete copy of the same step,
        it is kept and returned instead: the run has rolled back to this step.
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
        """Drop copies of later steps, after a rollback to this one."""
        self._copies = [copy for copy in self._copies if copy.header.step <= step]

    def copy(self, step: int) -> HeldCopy:
        """Return the copy of this step, complete or not.

        Raises:
            CheckpointError: there is no such copy.
        """
        for copy in self._copies:
            if copy.header.step == step:
                return copy
        raise CheckpointError(f"There is no copy of step {step} here, only of {list(self.steps) or 'none'}.")
