"""Copies of other workers' stage states, received as backups. An older copy is kept until a newer one is complete.

begin(owner, header)    place(owner, step, offset, bytes) ...    the last byte completes it
held    [step 10 whole] [step 20: 37 of 96 MB]  -->  [step 10] [step 20 whole]  -->  begin(step 30) drops step 10
"""

from __future__ import annotations

import torch

from raypipe.engine.copy.copy_header import TENSORS, CopyHeader, CopyPiece, views_of
from raypipe.engine.messages.record import raw_bytes
from raypipe.errors import CheckpointError


class HeldCopy:
    """Copy of another worker's stage, or one piece of it, whose bytes are received in order.

    Args:
        block: memory to reuse if it has the right size; None allocates new memory.

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
        """Store received bytes that begin at ``offset``. They must leave no gap after the bytes received before.

        Bytes that were received before are not written again if ``data`` ends within them.

        Raises:
            CheckpointError: ``data`` leaves a gap, or is outside the copy.
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
        """Return header and tensors for ``copy_source``.

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
    """Received copies of one stage of another worker, or of one piece of the stage's state.

    The newest complete copy is kept, and the copy that is being received.
    """

    def __init__(self) -> None:
        self._copies: list[HeldCopy] = []

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps after which the complete copies were taken, in increasing order."""
        return tuple(sorted(copy.header.step for copy in self._copies if copy.whole))

    @property
    def pieces(self) -> int:
        """Number of pieces of the newest copy besides the common piece (``CopyHeader.pieces``); 0 without a copy."""
        return self._copies[-1].header.pieces if self._copies else 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of parameters and buffers in the newest copy, complete or not."""
        names = self._copies[-1].header.table if self._copies else ()
        return tuple(name.removeprefix(TENSORS) for name in names if name.startswith(TENSORS))

    def begin(self, header: CopyHeader) -> HeldCopy:
        """Begin to receive a copy, and return it. The memory of a dropped copy is reused.

        The newest complete copy of an earlier step is kept. Incomplete copies are dropped, and so are those of later
        steps, from which the run has rolled back. If a complete copy of the same step is held, it is returned instead.
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
        """Drop copies of steps after ``step``, to which the run has rolled back."""
        self._copies = [copy for copy in self._copies if copy.header.step <= step]

    def copy(self, step: int) -> HeldCopy:
        """Return the copy taken after ``step`` steps, complete or not.

        Raises:
            CheckpointError: there is no such copy.
        """
        for copy in self._copies:
            if copy.header.step == step:
                return copy
        raise CheckpointError(f"There is no copy of step {step} here, only of {list(self.steps) or 'none'}.")
