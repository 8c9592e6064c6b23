"""Copies of other workers' stages that a worker holds.

A stage is known by the generation of its plan and its number: another plan may cut the model otherwise. Slices of its
optimizer's state are known by the replica that steps them, too: a plan with other numbers of replicas is another one.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import NamedTuple

import torch

from raypipe.engine.copy import COMMON, CopyHeader, HeldCopies
from raypipe.errors import CheckpointError

__all__ = ["CopyHolder", "StageKey"]


class StageKey(NamedTuple):
    """Whose copies they are.

    Attributes:
        generation: of the plan.
        stage: in it.
        piece: of its copy, see CopyHeader.
    """

    generation: int
    stage: int
    piece: int = COMMON


class CopyHolder:
    """Of one worker, as long as its process lives."""

    def __init__(self) -> None:
        self._held: dict[StageKey, HeldCopies] = {}
        self._lock = threading.Lock()

    def begin(self, owner: StageKey, header: CopyHeader) -> bool:
        """Expect a copy; whether it is here already.

        The second copy of a plan's stage ends those of older plans, see WorkerCopies.
        """
        with self._lock:
            held = self._held.setdefault(owner, HeldCopies())
            if any(step < header.step for step in held.steps):
                self._held = {of: copies for of, copies in self._held.items() if of.generation >= owner.generation}
            return held.begin(header).whole

    def place(self, owner: StageKey, step: int, offset: int, data: memoryview) -> bool:
        """Bytes of it; whether it is whole now.

        Raises:
            CheckpointError: nobody began it, or they are not the next ones.
        """
        copy = self._of(owner).copy(step)
        copy.place(offset, data)
        return copy.whole

    def forget_after(self, step: int) -> None:
        """The run has gone back to this step."""
        for copies in self.copies().values():
            copies.forget_after(step)

    def keep(self, generation: int, pieces: Collection[tuple[int, int]]) -> None:
        """Of this plan only these copies, as (stage, piece): the others are sent to other workers by now."""
        with self._lock:
            self._held = {
                of: copies
                for of, copies in self._held.items()
                if of.generation != generation or (of.stage, of.piece) in pieces
            }

    def copies(self) -> dict[StageKey, HeldCopies]:
        """All that are held, by owner."""
        with self._lock:
            return dict(self._held)

    def copy(self, owner: StageKey, step: int) -> tuple[CopyHeader, torch.Tensor]:
        """Header and block of a whole copy.

        Raises:
            CheckpointError: it is not here.
        """
        copy = self._of(owner).copy(step)
        copy.source()  # refuses one that is not whole
        return copy.header, copy.block

    def _of(self, owner: StageKey) -> HeldCopies:
        with self._lock:
            if owner not in self._held:
                raise CheckpointError(f"No copy of stage {owner.stage} of plan {owner.generation} is held here.")
            return self._held[owner]
