"""Copies of one stage's whole state between two steps, in memory that is reused: its own, and received ones.

    take(20)    slot 0: step 20    slot 1: step 10      the oldest one is overwritten
    take(30)    slot 0: step 20    slot 1: step 30
    forget_after(20), take(25)     slot 0: step 20    slot 1: step 25

With two copies, all stages always have one step in common, even while only some have taken the next copy.

    stage      step 20 | begin | forwards and backwards of step 21 | STEP: waits until finish is done
    a thread           |        [finish: parameters, optimizer]

On a replica that steps slices of the stage, a copy has two pieces: the state that all replicas share, and its slices.

Another worker holds received copies as backups. An older one is kept until a newer one is complete.

begin(header)    place(offset, bytes) ...    the last byte completes it
held    [step 10 whole] [step 20: 37 of 96 MB]  -->  [step 10] [step 20 whole]  -->  begin(step 30) drops step 10
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from raypipe.data.stream import Mark
from raypipe.engine.copy.copy_header import (
    COMMON,
    OPTIMIZER,
    TENSORS,
    CopyHeader,
    CopyPiece,
    view_of,
    views_of,
)
from raypipe.engine.device.device import CPU, TransferKind
from raypipe.engine.io.checkpoint.manifest import OptionGroup
from raypipe.engine.io.checkpoint.snapshot import optimizer_parts
from raypipe.engine.io.checkpoint.tensor_file import read_table, table_of
from raypipe.engine.messages.record import raw_bytes
from raypipe.engine.messages.transfer import DeviceTransfer
from raypipe.engine.optim.state import StageState
from raypipe.engine.stage.stage import StageProgram
from raypipe.errors import CheckpointError

GENERATIONS = 2
"""Number of copies of a stage's state that are kept."""


class StageCopies:
    """Copies of one stage's state under the present plan, after up to GENERATIONS different steps.

    If the replicas of the stage shard the optimizer's state, a copy has two pieces: the state that all replicas share
    (COMMON), and this replica's slices.

    Args:
        state: state of the stage; ``StageState.renew`` may replace its optimizer.
        crossing: transfer from the device that holds the state; None for the CPU.
    """

    def __init__(self, program: StageProgram, state: StageState, crossing: DeviceTransfer | None = None) -> None:
        self._program = program
        self._crossing = crossing or DeviceTransfer(CPU)
        self._state = state
        self._slots = [_Slot() for _ in range(GENERATIONS)]

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps after which the complete copies were taken, in increasing order."""
        return tuple(sorted(slot.step for slot in self._slots if slot.step is not None))

    @property
    def headers(self) -> tuple[CopyHeader, ...]:
        """Headers of the complete copies, one per piece, in increasing order of steps."""
        whole = sorted((slot for slot in self._slots if slot.step is not None), key=lambda slot: slot.step or 0)
        return tuple(header for slot in whole for header in slot.headers.values())

    def take(self, step: int, updates: int) -> None:
        """Copy the whole state at once, between two steps; see ``begin`` for the arguments."""
        self.begin(step, updates)()

    def begin(self, step: int, updates: int, mark: Mark | None = None) -> Callable[[], None]:
        """Begin to copy the state, between two steps.

        The buffers, which the next forward may change, and state that is not in tensors are copied now. If a copy of
        this step exists, nothing is copied; ``forget_after`` drops copies that a rollback has made invalid.

        Args:
            step: number of optimizer steps done.
            updates: number of scheduler steps done: ``state.updates``.
            mark: position in the data stream that the stage reads; None if it reads no stream.

        Returns:
            Function that copies parameters and optimizer state and so completes the copy. The caller must call it once,
            in any thread; the next step of the optimizer waits for it.

        Raises:
            CheckpointError: the optimizer has state that is neither a tensor nor JSON; names its key.
        """
        self._state.wait_until_read()
        if step in self.steps:
            return _nothing
        parts = self._parts()
        slot = self._next()
        slot.fit({piece: part.tensors for piece, part in parts.items()})
        headers = {
            piece: CopyHeader(
                self._program.index, step, updates, slot.blocks[piece].data.nbytes, slot.blocks[piece].table,
                part.groups, part.scalars, None if mark is None or piece != COMMON else mark._asdict(), piece,
                0 if self._state.slices is None else len(self._state.slices.parts),
            )
            for piece, part in parts.items()
        }  # fmt: skip
        changing = {f"{TENSORS}{name}" for name in self._program.buffers}
        common = parts[COMMON].tensors
        slot.blocks[COMMON].copy({name: x for name, x in common.items() if name in changing}, self._crossing)
        done = threading.Event()
        self._state.is_read_until(done)

        def finish() -> None:
            try:
                for piece, part in parts.items():
                    rest = {name: x for name, x in part.tensors.items() if name not in changing}
                    slot.blocks[piece].copy(rest, self._crossing)
                slot.headers, slot.step = headers, step
            finally:
                done.set()

        return finish

    def forget_after(self, step: int) -> None:
        """Drop the copies taken after steps later than ``step``, because the run has rolled back to ``step``.

        The steps are repeated, and may then give another state, for example with other codecs.
        """
        self._state.wait_until_read()
        for slot in self._slots:
            if slot.step is not None and slot.step > step:
                slot.step = None

    def copy(self, step: int, piece: int = COMMON) -> tuple[CopyHeader, torch.Tensor]:
        """Return (header, memory) of one piece of the complete copy taken after ``step``; the memory is not cloned.

        Raises:
            CheckpointError: there is no such copy or piece.
        """
        for slot in self._slots:
            if slot.step == step and piece in slot.headers:
                return slot.headers[piece], slot.blocks[piece].data
        slices = f" with the slices of replica {piece - 1}" * (piece != COMMON)
        raise CheckpointError(
            f"Stage {self._program.index} has no copy of step {step}{slices}, only of {list(self.steps) or 'none'}."
        )

    def _parts(self) -> dict[int, _Part]:
        """Return what to copy into each piece, by the piece's number. The tensors are the state's own, not copies."""
        state = self._state
        held = {**state.parameters, **state.buffers}
        tensors = {f"{TENSORS}{name}": tensor.detach() for name, tensor in held.items()}
        if state.optimizer is None:
            return {COMMON: _Part(tensors, (), {})}
        names = {id(parameter): name for name, parameter in state.parameters.items()}
        parts = optimizer_parts(state.optimizer, names, held, state.slices)
        kept = {f"{OPTIMIZER}{name}": tensor.detach() for name, tensor in parts.tensors.items()}
        if state.slices is None:
            return {COMMON: _Part(tensors | kept, parts.groups, parts.scalars)}
        return {
            COMMON: _Part(tensors, parts.groups, {}),
            1 + state.slices.replica: _Part(kept, (), parts.scalars),
        }

    def _next(self) -> _Slot:
        """Return the slot for the next copy, marked as empty: an empty slot, or else the one with the oldest copy."""
        slot = min(self._slots, key=lambda slot: -1 if slot.step is None else slot.step)
        slot.step = None
        return slot


def _nothing() -> None:
    """Do nothing; ``StageCopies.begin`` returns this function if the copy exists already."""


class _Part(NamedTuple):
    """Contents of one piece of a copy: tensors by their names in the piece; groups and scalars as in CopyHeader."""

    tensors: dict[str, torch.Tensor]
    groups: tuple[OptionGroup, ...]
    scalars: dict[str, dict[str, Any]]


@dataclass(eq=False)
class _Slot:
    """Memory of one copy, reused from copy to copy.

    Attributes:
        blocks, headers: memory and header of each piece, by its number.
        step: step after which the copy was taken; None without a complete copy.
    """

    blocks: dict[int, _Block] = field(default_factory=dict)
    headers: dict[int, CopyHeader] = field(default_factory=dict)
    step: int | None = None

    def fit(self, pieces: Mapping[int, dict[str, torch.Tensor]]) -> None:
        """Allocate memory for the given tensors of each piece, and drop all other pieces."""
        self.blocks = {piece: self.blocks.get(piece) or _Block() for piece in pieces}
        for piece, tensors in pieces.items():
            self.blocks[piece].fit(tensors)


@dataclass(eq=False)
class _Block:
    """Memory of one piece of a copy.

    Attributes:
        data: the memory, uint8.
        table: dtype, shape and position of each tensor in ``data``; see ``table_of``.
        views: tensors as views of ``data``, by name.
    """

    data: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    table: dict[str, Any] = field(default_factory=dict)
    views: dict[str, torch.Tensor] = field(default_factory=dict)

    def fit(self, tensors: dict[str, torch.Tensor]) -> None:
        """Allocate memory for these tensors; no change if names, types and shapes are the same as before."""
        table = table_of(tensors)
        if table == self.table:
            return
        size_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.views = {}
        if size_bytes != self.data.nbytes:
            self.data = torch.empty(0, dtype=torch.uint8)  # release the old memory before allocating new memory
            self.data = torch.empty(size_bytes, dtype=torch.uint8)
        self.table = table
        self.views = {name: view_of(self.data, info) for name, info in read_table(table, size_bytes).items()}

    def copy(self, tensors: dict[str, torch.Tensor], crossing: DeviceTransfer) -> None:
        """Copy these tensors, which may be on a device, into the memory that ``fit`` has allocated for them."""
        if not crossing.device.immediate:  # one by one, so that host memory never holds all of them twice
            for name, tensor in tensors.items():
                self.views[name].copy_(crossing.copied({name: tensor}, TransferKind.SNAPSHOT)[name])
        elif tensors:
            with torch.no_grad():
                torch._foreach_copy_([self.views[name] for name in tensors], list(tensors.values()))


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
        """Store received bytes, which begin at ``offset`` in the copy and must leave no gap after the bytes before.

        Nothing is written if all bytes of ``data`` were received before.

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
        """Return the complete copy, with views of its memory as tensors, as ``copy_source`` takes it.

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
    """Copies of another worker's stage, or of one piece of the stage's state, which this worker receives as a backup.

    The newest complete copy and the copy that is being received are kept.
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
        """Begin to receive a copy, and return it; return the held copy instead if it is complete and of the same step.

        The newest complete copy of an earlier step is kept. Incomplete copies are dropped, and so are copies of later
        steps, because the run has rolled back. The memory of a dropped copy is reused.
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
        """Drop the copies taken after steps later than ``step``, because the run has rolled back to ``step``."""
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
