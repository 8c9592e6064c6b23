"""Copies of state in memory, between processes: what a worker has, and how another one reads it.

    worker A   WorkerCopies: its own stages after step 20, 21          facts() --> driver: who has what
    worker B   RemoteCopy(A, stage 1, step 21).opened()  --header, bytes in parcels-->  CopySource

The bytes are those of a copy's block, which no step changes; they travel as plain arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from raypipe.engine.checkpoint import StateSource
from raypipe.engine.copy import CopyHeader, CopySource, HeldCopy, JoinedSource, StageCopies
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import StageState
from raypipe.errors import CheckpointError, StageLostError

__all__ = ["CopyFacts", "RemoteCopy", "WorkerCopies", "joined"]

PARCEL_BYTES = 16 << 20
"""Of a copy that travel at once, where a stage waits for it."""
READ_TIMEOUT_S = 120.0
"""For one parcel; a worker that has died is known at once."""


class CopyFacts(NamedTuple):
    """Copies of one stage in one process.

    Attributes:
        generation: of the plan that it was taken under.
        stage: as that plan counts.
        names: of its parameters and buffers.
        steps: after which there is a whole copy, in order.
        size_bytes: of the memory that they take.
    """

    generation: int
    stage: int
    names: tuple[str, ...]
    steps: tuple[int, ...]
    size_bytes: int


class _Own(NamedTuple):
    """Copies of a stage that the worker holds, or held when it was configured before."""

    generation: int
    program: StageProgram
    state: StageState
    copies: StageCopies


class WorkerCopies:
    """Copies of the stages that a worker holds.

    Those of the time before it was configured anew stay until it has taken two of the present: another worker may not
    have taken its first one yet, and then all go back to an older step.
    """

    def __init__(self) -> None:
        self._own: list[_Own] = []
        self._older: list[_Own] = []
        self._taken = 0

    def begin(self, generation: int, programs: Sequence[StageProgram], states: Sequence[StageState]) -> None:
        """The worker holds these stages from now on."""
        self._older, self._taken = [one for one in (*self._own, *self._older) if one.copies.steps], 0
        pairs = zip(programs, states, strict=True)
        self._own = [_Own(generation, program, state, StageCopies(program, state)) for program, state in pairs]

    def take(self, step: int) -> None:
        """Copy the state of every stage, between two steps."""
        if self._taken:
            self._older = []
        for own in self._own:
            own.copies.take(step, own.state.updates)
        self._taken += 1

    def facts(self) -> list[CopyFacts]:
        return [
            CopyFacts(
                own.generation,
                own.program.index,
                (*own.program.parameters, *own.program.buffers),
                own.copies.steps,
                own.copies.size_bytes,
            )
            for own in (*self._own, *self._older)
        ]

    def source(self, generation: int, stage: int, step: int) -> CopySource:
        """The state of a stage after a step.

        Raises:
            CheckpointError: there is no copy of it here.
        """
        return self._of(generation, stage, step).source(step)

    def header(self, generation: int, stage: int, step: int) -> CopyHeader:
        """What is in that copy."""
        return self._of(generation, stage, step).copy(step)[0]

    def data(self, generation: int, stage: int, step: int, begin: int, end: int) -> np.ndarray:
        """Bytes ``begin`` to ``end`` of a copy, as they were: a later copy may take the place of this one."""
        return self._of(generation, stage, step).copy(step)[1][begin:end].numpy().copy()

    def _of(self, generation: int, stage: int, step: int) -> StageCopies:
        for own in (*self._own, *self._older):
            if (own.generation, own.program.index) == (generation, stage) and step in own.copies.steps:
                return own.copies
        raise CheckpointError(f"There is no copy of stage {stage} of plan {generation} after step {step} here.")


@dataclass(frozen=True, slots=True)
class RemoteCopy:
    """A copy that some worker has, as a driver names it to others.

    Attributes:
        actor: that has it.
        key: of the actor, by which it knows itself.
        names: of parameters and buffers in it.
    """

    actor: Any
    key: str
    generation: int
    stage: int
    step: int
    names: tuple[str, ...]

    def opened(self) -> CopySource:
        """All of it, in memory of this process.

        Raises:
            StageLostError: the worker that has it died, or does not answer.
        """
        which = self.generation, self.stage, self.step
        try:
            header = CopyHeader.from_json(ray.get(self.actor.copy_header.remote(*which), timeout=READ_TIMEOUT_S))
            held = HeldCopy(header)
            for begin in range(0, header.size_bytes, PARCEL_BYTES):
                end = min(begin + PARCEL_BYTES, header.size_bytes)
                part = ray.get(self.actor.copy_data.remote(*which, begin, end), timeout=READ_TIMEOUT_S)
                held.place(begin, memoryview(part))
        except (RayError, GetTimeoutError) as error:
            raise StageLostError(
                f"The copy of stage {self.stage} after step {self.step} cannot be read: {str(error).splitlines()[0]}"
            ) from None
        return held.source()


def joined(copies: Iterable[RemoteCopy], own: WorkerCopies, me: str, names: Iterable[str]) -> StateSource:
    """The copies that hold any of these names, as one source; those of this process are read where they lie."""
    wanted = set(names)
    return JoinedSource(
        [
            own.source(copy.generation, copy.stage, copy.step) if copy.key == me else copy.opened()
            for copy in copies
            if wanted.intersection(copy.names)
        ]
    )
