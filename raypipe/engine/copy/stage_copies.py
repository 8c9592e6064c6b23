"""Copies of one stage's whole state between two steps, in memory that is used again.

    take(20)    slot 0: step 20    slot 1: step 10      the oldest one is overwritten
    take(30)    slot 0: step 20    slot 1: step 30
    forget_after(20), take(25)     slot 0: step 20    slot 1: step 25

Two of them, so that all stages always have one step in common: while some have taken the next copy, others have not.

    stage      step 20 | begin | forwards and backwards of step 21 | STEP: waits until finish is done
    a thread           |        [finish: parameters, optimizer]

A replica that steps slices of the stage copies two pieces of it: what all replicas have alike, and its slices.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from raypipe.engine.checkpoint.manifest import OptionGroup
from raypipe.engine.checkpoint.snapshot import optimizer_parts
from raypipe.engine.checkpoint.tensor_table import read_table, table_of
from raypipe.engine.copy.header import COMMON, OPTIMIZER, TENSORS, CopyHeader
from raypipe.engine.copy.source import CopySource, view_of, views_of
from raypipe.engine.crossing import Crossing
from raypipe.engine.data.stream import Mark
from raypipe.engine.device import CPU, Crosses
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import StageState
from raypipe.errors import CheckpointError

__all__ = ["GENERATIONS", "StageCopies"]

GENERATIONS = 2
"""Copies of a stage that are kept."""


class StageCopies:
    """Of one stage, as it is cut now.

    Args:
        state: whose optimizer may be made anew, see ``bring_back``.
        crossing: from the device where it lies; None for the CPU.
    """

    def __init__(self, program: StageProgram, state: StageState, crossing: Crossing | None = None) -> None:
        self._program = program
        self._crossing = crossing or Crossing(CPU)
        self._state = state
        self._slots = [_Slot() for _ in range(GENERATIONS)]

    @property
    def steps(self) -> tuple[int, ...]:
        """That there is a copy of, in order."""
        return tuple(sorted(slot.step for slot in self._slots if slot.step is not None))

    @property
    def size_bytes(self) -> int:
        """Of the memory that all copies take."""
        return sum(block.data.nbytes for slot in self._slots for block in slot.blocks.values())

    @property
    def headers(self) -> tuple[CopyHeader, ...]:
        """Of all pieces of all copies that are whole, in the order of steps."""
        whole = sorted((slot for slot in self._slots if slot.step is not None), key=lambda slot: slot.step or 0)
        return tuple(header for slot in whole for header in slot.headers.values())

    def take(self, step: int, updates: int) -> None:
        """Copy the state, between two steps; see ``begin``."""
        self.begin(step, updates)()

    def begin(self, step: int, updates: int, mark: Mark | None = None) -> Callable[[], None]:
        """Begin to copy the state, between two steps.

        What is no tensor and the buffers, which the next forward may change, are copied now. The call that is returned
        copies parameters and optimizer, in any thread; the next step of the optimizer waits for it. A copy of this
        step that is there already is the one, see ``forget_after``.

        Args:
            step: optimizer steps done.
            updates: that the scheduler has followed: ``state.updates``.
            mark: of the stream that the stage reads.

        Raises:
            CheckpointError: something of the optimizer's can be neither a tensor nor JSON; names its key.
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
        """The run has gone back to this step: what it was later may come otherwise, as codecs may be others then."""
        self._state.wait_until_read()
        for slot in self._slots:
            if slot.step is not None and slot.step > step:
                slot.step = None

    def source(self, step: int, piece: int = COMMON) -> CopySource:
        """The copy of this step, or a piece of it; good until two more are taken.

        Raises:
            CheckpointError: there is none.
        """
        header, block = self.copy(step, piece)
        return CopySource(header, views_of(block))

    def copy(self, step: int, piece: int = COMMON) -> tuple[CopyHeader, torch.Tensor]:
        """The same as header and block: its own memory, of uint8.

        Raises:
            CheckpointError: there is none.
        """
        for slot in self._slots:
            if slot.step == step and piece in slot.headers:
                return slot.headers[piece], slot.blocks[piece].data
        slices = f" with the slices of replica {piece - 1}" * (piece != COMMON)
        raise CheckpointError(
            f"Stage {self._program.index} has no copy of step {step}{slices}, only of {list(self.steps) or 'none'}."
        )

    def _parts(self) -> dict[int, _Part]:
        """By piece, the state's own tensors by their names in a copy, and what is no tensor."""
        state = self._state
        held = {**state.parameters, **state.buffers}
        tensors = {f"{TENSORS}{name}": tensor.detach() for name, tensor in held.items()}
        if state.optimizer is None:
            return {COMMON: _Part(tensors, (), {})}
        names = {id(parameter): name for name, parameter in state.parameters.items()}
        found = optimizer_parts(state.optimizer, names, held, state.slices)
        kept = {f"{OPTIMIZER}{name}": tensor.detach() for name, tensor in found.tensors.items()}
        if state.slices is None:
            return {COMMON: _Part(tensors | kept, found.groups, found.scalars)}
        return {
            COMMON: _Part(tensors, found.groups, {}),
            1 + state.slices.replica: _Part(kept, (), found.scalars),
        }

    def _next(self) -> _Slot:
        """The slot to overwrite, which holds nothing from now on: an empty one, else the oldest."""
        slot = min(self._slots, key=lambda slot: -1 if slot.step is None else slot.step)
        slot.step = None
        return slot


def _nothing() -> None:
    """There is nothing to finish."""


class _Part(NamedTuple):
    """What a piece holds: tensors by name in it; see CopyHeader."""

    tensors: dict[str, torch.Tensor]
    groups: tuple[OptionGroup, ...]
    scalars: dict[str, dict[str, Any]]


@dataclass(eq=False)
class _Slot:
    """Memory of one copy, and what it holds, by piece.

    Attributes:
        step: None where it holds no whole copy.
    """

    blocks: dict[int, _Block] = field(default_factory=dict)
    headers: dict[int, CopyHeader] = field(default_factory=dict)
    step: int | None = None

    def fit(self, pieces: Mapping[int, dict[str, torch.Tensor]]) -> None:
        """Have room for these tensors of these pieces, and of no others."""
        self.blocks = {piece: self.blocks.get(piece) or _Block() for piece in pieces}
        for piece, tensors in pieces.items():
            self.blocks[piece].fit(tensors)


@dataclass(eq=False)
class _Block:
    """Memory of one piece.

    Attributes:
        data: of uint8.
        table: of it; see ``tensor_table``.
        views: of it, by name.
    """

    data: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    table: dict[str, Any] = field(default_factory=dict)
    views: dict[str, torch.Tensor] = field(default_factory=dict)

    def fit(self, tensors: dict[str, torch.Tensor]) -> None:
        """Have room for these tensors: as it is where they were of the same names, types and shapes before."""
        table = table_of(tensors)
        if table == self.table:
            return
        size_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.views = {}
        if size_bytes != self.data.nbytes:
            self.data = torch.empty(0, dtype=torch.uint8)  # give the memory back before there is more of it
            self.data = torch.empty(size_bytes, dtype=torch.uint8)
        self.table = table
        self.views = {name: view_of(self.data, info) for name, info in read_table(table, size_bytes).items()}

    def copy(self, tensors: dict[str, torch.Tensor], crossing: Crossing) -> None:
        """Take these tensors in."""
        if not crossing.device.immediate:  # one by one, so that no second copy of all of them is in host memory
            for name, tensor in tensors.items():
                self.views[name].copy_(crossing.copied({name: tensor}, Crosses.SNAPSHOT)[name])
        elif tensors:
            with torch.no_grad():
                torch._foreach_copy_([self.views[name] for name in tensors], list(tensors.values()))
