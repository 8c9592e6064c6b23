"""Copies of state in memory, as one worker has them: of its own stages, and of other workers' that it holds.

    worker A   take(21): copied and sent by a thread, beside step 22      facts() --> driver: who has what
    worker B   CopyHolder: A's stages after step 20, 21                   header, data --> whoever restores: RemoteCopy

A replica that steps slices of its stage has two pieces of the stage's copy: what all replicas have, and its slices.
The bytes are those of a copy's block, which no step changes; they travel as plain arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from raypipe.engine.checkpoint import StateSource
from raypipe.engine.copy import (
    COMMON,
    GENERATIONS,
    CopyHeader,
    CopySource,
    JoinedSource,
    StageCopies,
    put_together,
    views_of,
)
from raypipe.engine.crossing import Crossing
from raypipe.engine.data.stream import Mark
from raypipe.engine.device import CPU, Device
from raypipe.engine.message_log import MessageLog
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import StageState
from raypipe.ir.report import StepReport
from raypipe.runtime.workers.copy_holder import CopyHolder, StageKey
from raypipe.runtime.workers.copy_sender import Begun, CopySender
from raypipe.runtime.workers.remote_copy import RemoteCopy, Tally

__all__ = ["CopyFacts", "WorkerCopies", "joined"]

Reports = list[list[StepReport]]
"""Of one segment, by stage."""


class CopyFacts(NamedTuple):
    """Copies of one stage in one process, or of a piece of it.

    Attributes:
        generation: of the plan that it was taken under.
        stage: as that plan counts.
        names: of its parameters and buffers.
        steps: after which there is a whole copy, in order.
        size_bytes: of the memory that they take.
        held: for another worker.
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


class _Own(NamedTuple):
    """Copies of a stage that the worker has, or had when it was configured before."""

    generation: int
    program: StageProgram
    state: StageState
    copies: StageCopies

    def facts(self) -> list[CopyFacts]:
        """Of each piece; without steps where nothing was copied yet."""
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
    """All copies that one worker has.

    Those of the time before it was configured anew stay until it takes the second one of the present: the driver has
    that taken when all workers have the first, and until then all may have to go back to an older step.

    Args:
        busy: whether boundary messages wait to leave, so that nothing is sent beside them.

    Attributes:
        holder: of other workers' copies.
        log: of what this worker has sent since the copies, for who goes on from one of another stage.
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
        self.log = MessageLog()

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
        """The worker holds these stages from now on.

        Where it held them before under the same plan, and its state has gone back in place, it keeps their copies.

        Args:
            holder: the actor of the worker that is sent their copies; None for nobody.
            holds: (stage, piece) of other workers' copies that are sent here. Others go like those of the time before.
            device: where the states lie.
            sends: (stage, piece) of its own that the holder is sent; None for all.
        """
        self._sender.send_to(holder, generation)
        self.log.reopen()
        if generation != self._generation:
            self.log.clear()
        self._taken, self._generation, self._holds, self._sends = 0, generation, holds, sends
        if [(own.generation, id(own.state)) for own in self._own] == [(generation, id(state)) for state in states]:
            return
        self._older = [one for one in (*self._own, *self._older) if one.copies.steps]
        pairs = zip(programs, states, strict=True)
        self._own = [
            _Own(generation, program, state, StageCopies(program, state, Crossing(device))) for program, state in pairs
        ]

    def begin_log(self, generation: int, step: int, state_bytes: int) -> MessageLog:
        """The state is that after ``step`` steps under this plan; what is done from there on is kept."""
        self._generation = generation
        self.log.reopen()
        self.log.clear()
        self.log.copied(step, state_bytes)
        return self.log

    def forget_after(self, step: int) -> None:
        """The run has gone back to this step: copies of later ones count no more, its own and those that it holds."""
        self._sender.stop()
        self.log.forget_after(step)
        for own in (*self._own, *self._older):
            own.copies.forget_after(step)
        self.holder.forget_after(step)

    def take(
        self, step: int, *, send: bool = True, must: bool = False,
        mark: Callable[[int], Mark | None] = lambda stage: None,
    ) -> None:  # fmt: skip
        """Begin to copy the state of every stage, between two steps; the rest happens beside the next one.

        While the copy before is on its way to the holder there is none of this step: steps do not wait for a holder
        that is slow or does not answer.

        Args:
            send: whether the holder is to have them too.
            must: there has to be one of this step; see CopySender.hurry.
            mark: (stage) -> where the stream goes on that it reads.

        Raises:
            CheckpointError: an optimizer keeps what cannot be copied.
            StageError: the copy before failed.
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
        self.log.copied(step, sum(own.copies.size_bytes for own in self._own) // GENERATIONS)

    def wait_until_taken(self) -> None:
        """For the copies of this worker; they may still be on their way to the holder."""
        for own in self._own:
            own.state.wait_until_read()

    def noted(self, reports: Reports, begin_s: float) -> Reports:
        """The reports of a segment that began then (monotonic clock), with what the driver is to know of copies."""
        copying = self._sender.at_work_since(begin_s)
        at = [self._sender.acknowledged(of_stage[0].stage) for of_stage in reports]
        if not copying and not any(at):
            return reports
        return [
            [replace(report, copying=copying, copied=copied) for report in of_stage]
            for of_stage, copied in zip(reports, at, strict=True)
        ]

    def facts(self) -> list[CopyFacts]:
        """Of all of them, its own first."""
        held = [
            CopyFacts(
                owner.generation, owner.stage, copies.names, copies.steps, copies.size_bytes, held=True,
                piece=owner.piece, pieces=copies.pieces,
            )
            for owner, copies in self.holder.copies().items()
        ]  # fmt: skip
        return [facts for own in (*self._own, *self._older) for facts in own.facts()] + held

    def has(self, generation: int, stage: int, step: int, piece: int = COMMON) -> bool:
        """Whether there is a copy of a stage of its own after a step, or this piece of it."""
        return any(
            (header.step, header.piece) == (step, piece)
            for own in (*self._own, *self._older)
            if (own.generation, own.program.index) == (generation, stage)
            for header in own.copies.headers
        )

    def source(self, generation: int, stage: int, step: int, piece: int = COMMON) -> CopySource:
        """The state of a stage after a step, or a piece of it.

        Raises:
            CheckpointError: there is no copy of it here.
        """
        header, block = self._copy(generation, stage, step, piece)
        return CopySource(header, views_of(block))

    def header(self, generation: int, stage: int, step: int, piece: int = COMMON) -> CopyHeader:
        """What is in that copy."""
        return self._copy(generation, stage, step, piece)[0]

    def data(self, generation: int, stage: int, step: int, piece: int, places: Sequence[tuple[int, int]]) -> np.ndarray:
        """Bytes of a copy, as they were: a later copy may take the place of this one.

        Args:
            places: begin and end of each piece.
        """
        block = self._copy(generation, stage, step, piece)[1].numpy()
        return np.concatenate([block[begin:end] for begin, end in places])

    def give_up(self) -> None:
        """Send no more of what is on its way to the holder, from any thread."""
        self._sender.give_up()

    def close(self) -> None:
        """End the thread that copies and sends."""
        self._sender.close()

    def _pieces_sent(self, own: _Own) -> tuple[int, ...]:
        """Of a stage's copy, in their order."""
        here = (COMMON,) if own.state.slices is None else (COMMON, 1 + own.state.slices.replica)
        return tuple(piece for piece in here if self._sends is None or (own.program.index, piece) in self._sends)

    def _copy(self, generation: int, stage: int, step: int, piece: int) -> tuple[CopyHeader, torch.Tensor]:
        for own in (*self._own, *self._older):
            if (own.generation, own.program.index) == (generation, stage) and any(
                (header.step, header.piece) == (step, piece) for header in own.copies.headers
            ):
                return own.copies.copy(step, piece)
        return self.holder.copy(StageKey(generation, stage, piece), step)


def joined(
    copies: Iterable[RemoteCopy], own: WorkerCopies, me: str, names: Iterable[str]
) -> tuple[StateSource, Tally, Mark | None]:
    """The copies that hold any of these names, as one source; the bytes that are read of other workers'; and the mark.

    Those of this process are read where they lie, its own of a stage of which a replica's was named among them.

    Args:
        copies: of each stage all pieces.
    """
    wanted, moved, named = set(names), Tally(), list(copies)
    stages = {copy.stage for copy in named if copy.piece == COMMON and wanted.intersection(copy.names)}
    pieces = [
        own.source(*copy.of) if copy.key == me or own.has(*copy.of) else copy.opened(moved)
        for copy in named
        if copy.stage in stages
    ]
    sources = put_together(pieces)
    marks = (Mark.of(source.header.mark) for source in sources if source.header.mark is not None)
    return JoinedSource(sources), moved, next(marks, None)
