"""In-memory copies of state on one worker: copies of its own stages, and copies of other workers' stages that it holds.

    worker A   take(21): copied and sent by a thread, during step 22      facts() --> driver: which copies exist
    worker B   CopyHolder: A's stages after step 20, 21                   header, data --> a restored worker: RemoteCopy

If the optimizer state is sharded over replicas, a replica's copy has two pieces: the state that is equal on all
replicas (COMMON), and the replica's own slices. Readers get bytes of the copy's memory block as plain arrays.

CopyHolder identifies a stage by the generation of its plan and its number, because another plan may partition the model
differently. Slices of optimizer state are also identified by the replica that steps them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import ray
import torch

from raypipe.data.stream import Mark
from raypipe.engine.copy import (
    COMMON,
    CopyHeader,
    CopyPiece,
    HeldCopies,
    StageCopies,
    views_of,
)
from raypipe.engine.device.device import CPU, Device
from raypipe.engine.messages.transfer import DeviceTransfer
from raypipe.engine.optim.state import StageState
from raypipe.engine.stage.stage import StageProgram
from raypipe.errors import CheckpointError
from raypipe.ir.report import StepReport
from raypipe.runtime.worker.copy_transfer import Begun, CopySender, RemoteCopy


class StageKey(NamedTuple):
    """Key of the copies of a stage, or of one piece of it.

    Attributes:
        generation: number of the plan.
        stage: number of the stage in that plan.
        piece: part of the stage's copy, see CopyHeader.
    """

    generation: int
    stage: int
    piece: int = COMMON


class CopyHolder:
    """Holder of copies of other workers' stages, in the memory of one worker; thread-safe."""

    def __init__(self) -> None:
        self._held: dict[StageKey, HeldCopies] = {}
        self._lock = threading.Lock()

    def begin(self, owner: StageKey, header: CopyHeader) -> bool:
        """Begin to receive a copy; return True if it is complete already.

        If the stage already has a copy of an earlier step under the same plan, copies of older plans are dropped, see
        WorkerCopies.
        """
        with self._lock:
            held = self._held.setdefault(owner, HeldCopies())
            if any(step < header.step for step in held.steps):
                self._held = {of: copies for of, copies in self._held.items() if of.generation >= owner.generation}
            return held.begin(header).whole

    def place(self, owner: StageKey, step: int, offset: int, data: memoryview) -> bool:
        """Store received bytes of a copy; return True once the copy is complete.

        Args:
            owner: key of the copy's stage.
            step: optimizer steps done in the copy.
            offset: index of the first of these bytes in the copy's block.

        Raises:
            CheckpointError: the copy was not begun, or the bytes are not the next ones.
        """
        copy = self._of(owner).copy(step)
        copy.place(offset, data)
        return copy.whole

    def forget_after(self, step: int) -> None:
        """Drop copies of steps after ``step``, to which the run has rolled back."""
        for copies in self.copies().values():
            copies.forget_after(step)

    def keep(self, generation: int, pieces: Collection[tuple[int, int]]) -> None:
        """Drop copies of this plan, except those of ``pieces``; the others are sent to other workers from now on.

        Args:
            pieces: (stage, piece) of the copies to keep.
        """
        with self._lock:
            self._held = {
                of: copies
                for of, copies in self._held.items()
                if of.generation != generation or (of.stage, of.piece) in pieces
            }

    def copies(self) -> dict[StageKey, HeldCopies]:
        """Return all held copies, by the key of their stage."""
        with self._lock:
            return dict(self._held)

    def copy(self, owner: StageKey, step: int) -> tuple[CopyHeader, torch.Tensor]:
        """Return (header, block) of a complete copy; the block is a uint8 tensor.

        Raises:
            CheckpointError: the copy is not here, or not complete.
        """
        copy = self._of(owner).copy(step)
        copy.piece()  # raises if the copy is incomplete
        return copy.header, copy.block

    def _of(self, owner: StageKey) -> HeldCopies:
        with self._lock:
            if owner not in self._held:
                raise CheckpointError(f"No copy of stage {owner.stage} of plan {owner.generation} is held here.")
            return self._held[owner]


COPY_GROUPS = {"copies": 2}
"""Concurrency groups that an actor with a CopyServer needs, so that copies are served while a segment runs."""

Reports = list[list[StepReport]]
"""Reports of one segment, by stage."""


class CopyFacts(NamedTuple):
    """Description of the copies of one stage, or of one piece of it, in one process.

    Attributes:
        generation: number of the plan under which they were taken.
        stage: number of the stage in that plan.
        names: names of the stage's parameters and buffers.
        steps: steps of which there is a complete copy, in order.
        size_bytes: bytes of all these copies.
        held: True if they were received from another worker.
        piece, pieces: see CopyHeader.
    """

    generation: int
    stage: int
    names: tuple[str, ...]
    steps: tuple[int, ...]
    size_bytes: int
    held: bool = False
    piece: int = COMMON
    pieces: int = 0

    def remote(self, actor: Any, step: int) -> RemoteCopy:
        """Return a reference with which other workers read the copy of ``step`` from ``actor``, which has it."""
        return RemoteCopy(actor, actor._actor_id.hex(), self.generation, self.stage, step, self.names, self.piece)


class _Own(NamedTuple):
    """Copies of a stage of this worker, or of a stage that it had before it was last configured."""

    generation: int
    program: StageProgram
    state: StageState
    copies: StageCopies

    def facts(self) -> list[CopyFacts]:
        """List the facts of each piece; if nothing was copied yet, those of COMMON without steps."""
        program, copies = self.program, self.copies
        names = (*program.parameters, *program.buffers)
        by_piece: dict[int, list[CopyHeader]] = {COMMON: []}
        for header in copies.headers:
            by_piece.setdefault(header.piece, []).append(header)
        return [
            CopyFacts(
                self.generation, program.index, names, tuple(header.step for header in headers),
                sum(header.size_bytes for header in headers), piece=piece,
                pieces=headers[-1].pieces if headers else 0,
            )
            for piece, headers in by_piece.items()
        ]  # fmt: skip


class WorkerCopies:
    """All in-memory copies on one worker.

    Copies from before the last ``configure`` stay until the second copy after it is taken: the driver orders the second
    copy when all workers have the first, and until then all workers may have to roll back to an older step.

    Args:
        busy: returns True while boundary messages wait to be sent; copies are sent in between.

    Attributes:
        holder: copies of other workers' stages.
    """

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._own: list[_Own] = []
        self._older: list[_Own] = []
        self._taken = 0
        self._generation = -1
        self._holds: Collection[tuple[int, int]] = ()
        self._sends: Collection[tuple[int, int]] | None = None
        self._sender = CopySender(busy)
        self.holder = CopyHolder()

    def begin(
        self,
        generation: int,
        programs: Sequence[StageProgram],
        states: Sequence[StageState],
        holder: Any,
        holds: Collection[tuple[int, int]],
        device: Device = CPU,
        sends: Collection[tuple[int, int]] | None = None,
    ) -> None:
        """Set the stages that are copied from now on.

        If they are the present stages of the same plan, with the same state objects, their copies are kept as present
        ones; else the copies of the present stages become older ones.

        Args:
            generation: number of the plan.
            programs, states: this worker's stages and their states.
            holder: actor to which the copies are sent; None sends none.
            holds: (stage, piece) of the copies that other workers send to this one. Held copies of other pieces are
                dropped when the second copy is taken.
            device: device of the states' tensors.
            sends: (stage, piece) of this worker's copies that are sent to ``holder``; None for all.
        """
        self._sender.send_to(holder, generation)
        self._taken, self._generation, self._holds, self._sends = 0, generation, holds, sends
        if [(own.generation, id(own.state)) for own in self._own] == [(generation, id(state)) for state in states]:
            return
        self._older = [one for one in (*self._own, *self._older) if one.copies.steps]
        pairs = zip(programs, states, strict=True)
        self._own = [
            _Own(generation, program, state, StageCopies(program, state, DeviceTransfer(device)))
            for program, state in pairs
        ]

    def forget_after(self, step: int) -> None:
        """Drop own and held copies of steps after ``step``, to which the run has rolled back."""
        self._sender.stop()
        for own in (*self._own, *self._older):
            own.copies.forget_after(step)
        self.holder.forget_after(step)

    def take(
        self, step: int, *, send: bool = True, must: bool = False,
        mark: Callable[[int], Mark | None] = lambda stage: None,
    ) -> None:  # fmt: skip
        """Begin to copy the state of every stage, between two steps; a thread finishes the copies during the next step.

        While the previous copy is being sent to the holder, no copy of this step is made: steps do not wait for a slow
        holder.

        Args:
            step: optimizer steps done.
            send: also send the copies to the holder.
            must: copy this step in any case, after a wait for the previous copy; see CopySender.hurry.
            mark: called with a stage; returns its position in the stream that it reads, or None.

        Raises:
            CheckpointError: an optimizer's state contains something that cannot be copied.
            StageError: the previous copy failed.
        """
        if must:
            self._sender.hurry()
        if not self._sender.ready():
            return
        if self._taken:
            self._older = []
            self.holder.keep(self._generation, self._holds)
        self._taken += 1
        begun = [
            Begun(
                stage := own.program.index,
                own.copies,
                own.copies.begin(step, own.state.updates, mark(stage)),
                self._pieces_sent(own),
            )
            for own in self._own
        ]
        self._sender.begin(step, begun, send=send)

    def wait_until_taken(self) -> None:
        """Wait until the state has been copied on this worker; copies may still be on their way to the holder."""
        for own in self._own:
            own.state.wait_until_read()

    def noted(self, reports: Reports, begin_s: float) -> Reports:
        """Return the reports of a segment with their fields ``copying`` and ``copied`` set.

        Args:
            begin_s: ``time.monotonic()`` at the beginning of the segment.
        """
        copying = self._sender.at_work_since(begin_s)
        at = [self._sender.acknowledged(of_stage[0].stage) for of_stage in reports]
        if not copying and not any(at):
            return reports
        return [
            [replace(report, copying=copying, copied=copied) for report in of_stage]
            for of_stage, copied in zip(reports, at, strict=True)
        ]

    def facts(self) -> list[CopyFacts]:
        """List the facts of all copies, own stages first."""
        held = [
            CopyFacts(
                owner.generation, owner.stage, copies.names, copies.steps, copies.size_bytes, held=True,
                piece=owner.piece, pieces=copies.pieces,
            )
            for owner, copies in self.holder.copies().items()
        ]  # fmt: skip
        return [facts for own in (*self._own, *self._older) for facts in own.facts()] + held

    def has(self, generation: int, stage: int, step: int, piece: int = COMMON) -> bool:
        """Return True if there is a copy, after ``step``, of this piece of a stage of this worker."""
        return self._find(generation, stage, step, piece) is not None

    def piece(self, generation: int, stage: int, step: int, piece: int = COMMON) -> CopyPiece:
        """Return the copy, after ``step``, of a piece of a stage: this worker's stage or a held one.

        Raises:
            CheckpointError: that copy is not here.
        """
        header, block = self.copy(generation, stage, step, piece)
        return CopyPiece(header, views_of(block))

    def data(self, generation: int, stage: int, step: int, piece: int, places: Sequence[tuple[int, int]]) -> np.ndarray:
        """Return byte ranges of a copy, concatenated in a new uint8 array, since a later copy may overwrite the block.

        Args:
            places: (begin, end) of each range, in bytes of the block.
        """
        block = self.copy(generation, stage, step, piece)[1].numpy()
        return np.concatenate([block[begin:end] for begin, end in places])

    def give_up(self) -> None:
        """Stop sending the present copy to the holder; callable from any thread."""
        self._sender.give_up()

    def close(self) -> None:
        """End the thread that copies and sends."""
        self._sender.close()

    def _pieces_sent(self, own: _Own) -> tuple[int, ...]:
        """List the pieces of a stage's copy that are sent to the holder, COMMON first."""
        here = (COMMON,) if own.state.slices is None else (COMMON, 1 + own.state.slices.replica)
        return tuple(piece for piece in here if self._sends is None or (own.program.index, piece) in self._sends)

    def copy(self, generation: int, stage: int, step: int, piece: int) -> tuple[CopyHeader, torch.Tensor]:
        """Return (header, block) of a copy: of a stage of this worker, or a held one.

        Raises:
            CheckpointError: that copy is not here.
        """
        copies = self._find(generation, stage, step, piece)
        return (
            self.holder.copy(StageKey(generation, stage, piece), step) if copies is None else copies.copy(step, piece)
        )

    def _find(self, generation: int, stage: int, step: int, piece: int) -> StageCopies | None:
        """Return the copies of a stage of this worker, if this piece after ``step`` is among them; else None."""
        for own in (*self._own, *self._older):
            if (own.generation, own.program.index) == (generation, stage) and any(
                (header.step, header.piece) == (step, piece) for header in own.copies.headers
            ):
                return own.copies
        return None


class CopyServer:
    """Mixin of an actor: methods with which other workers read copies from this one, and send copies to it.

    The methods take no term, so that any worker may call them at any time (see Fence).
    """

    def __init__(self) -> None:
        self._copies = WorkerCopies(self._sends)

    @ray.method(concurrency_group="copies")
    def copies(self) -> list[CopyFacts]:
        """List the facts of all copies on this worker."""
        return self._copies.facts()

    @ray.method(concurrency_group="copies")
    def copy_header(self, generation: int, stage: int, step: int, piece: int = COMMON) -> bytes:
        """Return the header of a copy, for RemoteCopy."""
        return self._copies.copy(generation, stage, step, piece)[0].to_json()

    @ray.method(concurrency_group="copies", enable_task_events=False)
    def copy_data(
        self, generation: int, stage: int, step: int, piece: int, places: Sequence[tuple[int, int]]
    ) -> np.ndarray:
        """Return byte ranges of a copy, for RemoteCopy; no event per call is added to Ray's list of tasks."""
        return self._copies.data(generation, stage, step, piece, places)

    @ray.method(concurrency_group="copies")
    def hold_copy(self, generation: int, header: bytes) -> bool:
        """Begin to receive a copy with this header, as JSON; see CopyHolder.begin."""
        parsed = CopyHeader.from_json(header)
        return self._copies.holder.begin(StageKey(generation, parsed.stage, parsed.piece), parsed)

    @ray.method(concurrency_group="copies", enable_task_events=False)
    def hold_copy_part(self, generation: int, stage: int, step: int, piece: int, offset: int, data: np.ndarray) -> bool:
        """Store received bytes of a copy; see CopyHolder.place."""
        return self._copies.holder.place(StageKey(generation, stage, piece), step, offset, data.data)

    def _forget_copies(self) -> None:
        """Drop all copies, own and held: later ones belong to another run, or this worker has left the plan."""
        self._copies.close()
        self._copies = WorkerCopies(self._sends)

    def _sends(self) -> bool:
        """Return True while a boundary message waits to be sent."""
        return False
