"""Copies of one stage's whole state between two steps, in memory that is used again.

    take(20)    slot 0: step 20    slot 1: step 10      the oldest one is overwritten
    take(30)    slot 0: step 20    slot 1: step 30
    forget_after(20), take(25)     slot 0: step 20    slot 1: step 25

Two of them, so that all stages always have one step in common: while some have taken the next copy, others have not.

    stage      step 20 | begin | forwards and backwards of step 21 | STEP: waits until finish is done
    a thread           |        [finish: parameters, optimizer]
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from raypipe.engine.checkpoint.manifest import OptionGroup
from raypipe.engine.checkpoint.snapshot import optimizer_parts
from raypipe.engine.checkpoint.tensor_table import read_table, table_of
from raypipe.engine.copy.header import OPTIMIZER, TENSORS, CopyHeader
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
        return tuple(sorted(slot.header.step for slot in self._slots if slot.header is not None))

    @property
    def size_bytes(self) -> int:
        """Of the memory that all copies take."""
        return sum(slot.block.nbytes for slot in self._slots)

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
        tensors, groups, scalars = self._parts()
        slot = self._next()
        slot.fit(tensors)
        told = None if mark is None else mark._asdict()
        header = CopyHeader(self._program.index, step, updates, slot.block.nbytes, slot.table, groups, scalars, told)
        changing = {f"{TENSORS}{name}" for name in self._program.buffers}
        slot.copy({name: tensor for name, tensor in tensors.items() if name in changing}, self._crossing)
        rest = {name: tensor for name, tensor in tensors.items() if name not in changing}
        done = threading.Event()
        self._state.is_read_until(done)

        def finish() -> None:
            try:
                slot.copy(rest, self._crossing)
                slot.header = header
            finally:
                done.set()

        return finish

    def forget_after(self, step: int) -> None:
        """The run has gone back to this step: what it was later may come otherwise, as codecs may be others then."""
        self._state.wait_until_read()
        for slot in self._slots:
            if slot.header is not None and slot.header.step > step:
                slot.header = None

    def source(self, step: int) -> CopySource:
        """The copy of this step; good until two more are taken.

        Raises:
            CheckpointError: there is none.
        """
        header, block = self.copy(step)
        return CopySource(header, views_of(block))

    def copy(self, step: int) -> tuple[CopyHeader, torch.Tensor]:
        """The same as header and block: its own memory, of uint8.

        Raises:
            CheckpointError: there is none.
        """
        for slot in self._slots:
            if slot.header is not None and slot.header.step == step:
                return slot.header, slot.block
        raise CheckpointError(
            f"Stage {self._program.index} has no copy of step {step}, only of {list(self.steps) or 'none'}."
        )

    def _parts(self) -> tuple[dict[str, torch.Tensor], tuple[OptionGroup, ...], dict[str, dict[str, Any]]]:
        """The state's own tensors by their names in a copy, and what is no tensor."""
        state = self._state
        held = {**state.parameters, **state.buffers}
        tensors = {f"{TENSORS}{name}": tensor.detach() for name, tensor in held.items()}
        if state.optimizer is None:
            return tensors, (), {}
        names = {id(parameter): name for name, parameter in state.parameters.items()}
        found = optimizer_parts(state.optimizer, names, held)
        tensors |= {f"{OPTIMIZER}{name}": tensor.detach() for name, tensor in found.tensors.items()}
        return tensors, found.groups, found.scalars

    def _next(self) -> _Slot:
        """The slot to overwrite, which holds nothing from now on: an empty one, else the oldest."""
        slot = min(self._slots, key=lambda slot: -1 if slot.header is None else slot.header.step)
        slot.header = None
        return slot


def _nothing() -> None:
    """There is nothing to finish."""


@dataclass(eq=False)
class _Slot:
    """Memory of one copy.

    Attributes:
        table: of the block; see ``tensor_table``.
        views: of the block, by name.
        header: None where it holds no whole copy.
    """

    block: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    table: dict[str, Any] = field(default_factory=dict)
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    header: CopyHeader | None = None

    def fit(self, tensors: dict[str, torch.Tensor]) -> None:
        """Have room for these tensors: as it is where they were of the same names, types and shapes before."""
        table = table_of(tensors)
        if table == self.table:
            return
        size_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.views = {}
        if size_bytes != self.block.nbytes:
            self.block = torch.empty(0, dtype=torch.uint8)  # give the memory back before there is more of it
            self.block = torch.empty(size_bytes, dtype=torch.uint8)
        self.table = table
        self.views = {name: view_of(self.block, info) for name, info in read_table(table, size_bytes).items()}

    def copy(self, tensors: dict[str, torch.Tensor], crossing: Crossing) -> None:
        """Take these tensors in."""
        if not crossing.device.immediate:  # one by one, so that no second copy of all of them is in host memory
            for name, tensor in tensors.items():
                self.views[name].copy_(crossing.copied({name: tensor}, Crosses.SNAPSHOT)[name])
        elif tensors:
            with torch.no_grad():
                torch._foreach_copy_([self.views[name] for name in tensors], list(tensors.values()))
