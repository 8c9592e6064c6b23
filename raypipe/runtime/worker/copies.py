"""In-memory copies of state on one worker: copies of its own stages, and copies of other workers' stages that it holds.

    worker A   take(21): a thread copies and sends, during step 22      facts() --> driver: which copies exist
    worker B   hold, place: receive A's stages after steps 20, 21       header, data --> a restored worker (RemoteCopy)

Worker B is the *holder* of A's copies. A copy has a header and one memory block with all tensors. If the optimizer
state is sharded over replicas, a replica's copy has two pieces, each with its own block: the state that is equal on all
replicas (COMMON), and the replica's own slices.

The key of a copy from another worker is (generation, stage, piece). The generation is the number of the plan: another
plan may partition the model differently.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from raypipe.data.stream import Mark
from raypipe.engine.copy import COMMON, CopyHeader, CopyPiece, HeldCopies, HeldCopy, StageCopies, views_of
from raypipe.engine.device.device import CPU, Device
from raypipe.engine.messages.transfer import DeviceTransfer
from raypipe.engine.optim.state import StageState
from raypipe.engine.stage.stage import StageProgram
from raypipe.errors import CheckpointError
from raypipe.ir.report import StepReport
from raypipe.runtime.worker.copy_transfer import Begun, CopySender, RemoteCopy


class StageKey(NamedTuple):
    """Key of the copies of a stage, or of one piece of the stage.

    Attributes:
        generation: number of the plan under which the copies were made.
        stage: number of the stage in that plan.
        piece: part of the stage's copy, see CopyHeader.
    """

    generation: int
    stage: int
    piece: int = COMMON


Reports = list[list[StepReport]]
"""Reports of one segment, by stage."""


class CopyFacts(NamedTuple):
    """Description of the copies of one stage, or of one piece of it, in one process.

    Attributes:
        generation: number of the plan under which the copies were made.
        stage: number of the stage in that plan.
        names: names of the stage's parameters and buffers.
        steps: numbers of optimizer steps after which there is a complete copy, in increasing order.
        held: True if the copies were received from another worker.
        piece, pieces: see CopyHeader.
    """

    generation: int
    stage: int
    names: tuple[str, ...]
    steps: tuple[int, ...]
    held: bool = False
    piece: int = COMMON
    pieces: int = 0

    def remote(self, actor: Any, step: int) -> RemoteCopy:
        """Return a reference with which any worker can read the copy after ``step`` steps from its holder ``actor``."""
        return RemoteCopy(actor, actor._actor_id.hex(), self.generation, self.stage, step, self.names, self.piece)


class _Own(NamedTuple):
    """Copies of one stage of this worker: a stage of the present plan, or of the plan before the last ``configure``."""

    generation: int
    program: StageProgram
    state: StageState
    copies: StageCopies

    def facts(self) -> list[CopyFacts]:
        """List the facts of the copies by piece; before the first copy, one item for COMMON, without steps."""
        program, copies = self.program, self.copies
        names = (*program.parameters, *program.buffers)
        by_piece: dict[int, list[CopyHeader]] = {COMMON: []}
        for header in copies.headers:
            by_piece.setdefault(header.piece, []).append(header)
        return [
            CopyFacts(
                self.generation, program.index, names, tuple(header.step for header in headers), False, piece,
                headers[-1].pieces if headers else 0,
            )
            for piece, headers in by_piece.items()
        ]  # fmt: skip


class WorkerCopies:
    """All in-memory copies on one worker. Copies of other workers' stages are received and read in any thread.

    Copies from before the last ``configure`` are dropped when the second copy after it is made. The driver requests
    that second copy once all workers have the first; until then, workers may have to roll back to an older step.

    Args:
        busy: returns True while activations or gradients wait to be sent to a neighbour; copies are then sent slowly.
    """

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._own: list[_Own] = []
        self._older: list[_Own] = []
        self._taken = 0
        self._generation = -1
        self._holds: Collection[tuple[int, int]] = ()
        self._sends: Collection[tuple[int, int]] | None = None
        self._sender = CopySender(busy)
        self._lock = threading.Lock()
        self._held: dict[StageKey, HeldCopies] = {}  # of other workers' stages

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

        If ``generation`` and the state objects are equal to those of the last call, the stages' copies are kept.
        Otherwise these copies count as older ones, which the second ``take`` drops.

        Args:
            generation: number of the plan.
            programs, states: programs and states of the stages, in the same order.
            holder: actor to which the copies are sent; None sends none.
            holds: (stage, piece) of the copies that other workers send to this worker. The second ``take`` drops
                received copies of this plan that are not listed.
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
        """Drop all copies, own and received, of steps after ``step``, because the run has rolled back to ``step``."""
        self._sender.stop()
        for own in (*self._own, *self._older):
            own.copies.forget_after(step)
        with self._lock:
            for copies in self._held.values():
                copies.forget_after(step)

    def take(
        self, step: int, *, send: bool = True, must: bool = False,
        mark: Callable[[int], Mark | None] = lambda stage: None,
    ) -> None:  # fmt: skip
        """Begin to copy the state of every stage, between two steps; a thread finishes the copies during the next step.

        If the previous copy is still being sent, this step is not copied, so that steps do not wait for a slow holder.

        Args:
            step: optimizer steps done.
            send: also send the copies to the holder.
            must: copy this step in any case: wait until the previous copy was sent or given up, see CopySender.hurry.
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
            with self._lock:
                self._held = {
                    of: copies
                    for of, copies in self._held.items()
                    if of.generation != self._generation or (of.stage, of.piece) in self._holds
                }
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
        """Wait until the state has been copied into this worker's memory; the transfer to the holder may still run."""
        for own in self._own:
            own.state.wait_until_read()

    def noted(self, reports: Reports, begin_s: float) -> Reports:
        """Return a segment's reports with ``copying`` and ``copied`` set, from copies made and sent since ``begin_s``.

        ``begin_s`` is the monotonic time at which the segment began.
        """
        copying = self._sender.at_work_since(begin_s)
        at = [self._sender.acknowledged(of_stage[0].stage) for of_stage in reports]
        if not copying and not any(at):
            return reports
        return [
            [replace(report, copying=copying, copied=copied) for report in of_stage]
            for of_stage, copied in zip(reports, at, strict=True)
        ]

    def hold(self, generation: int, header: CopyHeader) -> bool:
        """Begin to receive a copy of another worker's stage; return True if this copy is complete already.

        If this worker has an earlier copy of this stage under this plan, it drops the received copies of older plans.

        Args:
            generation: number of the plan under which the copy was made.
        """
        with self._lock:
            held = self._held.setdefault(StageKey(generation, header.stage, header.piece), HeldCopies())
            if any(step < header.step for step in held.steps):
                self._held = {of: copies for of, copies in self._held.items() if of.generation >= generation}
            return held.begin(header).whole

    def place(self, key: StageKey, step: int, offset: int, data: memoryview) -> bool:
        """Store received bytes of a copy; return True once this copy is complete.

        Args:
            key: stage and piece of the copy.
            step: optimizer steps done in the copied state.
            offset: position of the bytes in the copy's block; it must follow the last byte received before.

        Raises:
            CheckpointError: the copy was not begun, or the bytes are not the next ones.
        """
        copy = self._held_copy(key, step)
        copy.place(offset, data)
        return copy.whole

    def facts(self) -> list[CopyFacts]:
        """List the facts of all copies: first of this worker's stages, then of other workers' stages."""
        with self._lock:
            held = [
                CopyFacts(of.generation, of.stage, copies.names, copies.steps, True, of.piece, copies.pieces)
                for of, copies in self._held.items()
            ]
        return [facts for own in (*self._own, *self._older) for facts in own.facts()] + held

    def has(self, generation: int, stage: int, step: int, piece: int = COMMON) -> bool:
        """Return True if this worker has such a copy of a stage of its own; for the arguments see ``copy``."""
        return self._find(generation, stage, step, piece) is not None

    def piece(self, generation: int, stage: int, step: int, piece: int = COMMON) -> CopyPiece:
        """Return a copy as a source of tensors; for the arguments and errors see ``copy``."""
        header, block = self.copy(generation, stage, step, piece)
        return CopyPiece(header, views_of(block))

    def give_up(self) -> None:
        """Stop sending the copy that is being sent to the holder; callable from any thread."""
        self._sender.give_up()

    def close(self) -> None:
        """End the thread that copies and sends."""
        self._sender.close()

    def _pieces_sent(self, own: _Own) -> tuple[int, ...]:
        """List the pieces of a stage's copy (see CopyHeader) that are sent to the holder, COMMON first."""
        here = (COMMON,) if own.state.slices is None else (COMMON, 1 + own.state.slices.replica)
        return tuple(piece for piece in here if self._sends is None or (own.program.index, piece) in self._sends)

    def copy(self, generation: int, stage: int, step: int, piece: int) -> tuple[CopyHeader, torch.Tensor]:
        """Return (header, memory block) of a copy, either of this worker's own stage or received from another worker.

        Args:
            generation: number of the plan under which the copy was made.
            step: optimizer steps done in the copied state.
            piece: part of the stage's copy, see CopyHeader.

        Raises:
            CheckpointError: this worker has no such copy, or it is incomplete.
        """
        if (copies := self._find(generation, stage, step, piece)) is not None:
            return copies.copy(step, piece)
        held = self._held_copy(StageKey(generation, stage, piece), step)
        held.piece()  # raises if the copy is incomplete
        return held.header, held.block

    def _find(self, generation: int, stage: int, step: int, piece: int) -> StageCopies | None:
        """Return the copies of a stage of this worker that include the one described, else None; see ``copy``."""
        for own in (*self._own, *self._older):
            if (own.generation, own.program.index) == (generation, stage) and any(
                (header.step, header.piece) == (step, piece) for header in own.copies.headers
            ):
                return own.copies
        return None

    def _held_copy(self, key: StageKey, step: int) -> HeldCopy:
        with self._lock:
            if key not in self._held:
                raise CheckpointError(f"No copy of stage {key.stage} of plan {key.generation} is held here.")
            return self._held[key].copy(step)
