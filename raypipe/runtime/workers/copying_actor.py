"""What a stage actor inherits to copy its state in memory, to hold copies of others, and to hand out any of them.

driver      --keep_copy(20)-->  copied now, between two runs; orders that say so do it between two segments
            --copies()------->  what is here
neighbour   --hold_copy(header), hold_copy_part(bytes) ...
whoever is restored  --copy_header, copy_data--> see RemoteCopy
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import ray

from raypipe.engine.copy import COMMON, CopyHeader
from raypipe.engine.data.stream import Mark
from raypipe.engine.executor import Executor
from raypipe.runtime.workers.copies import CopyFacts, WorkerCopies
from raypipe.runtime.workers.copy_holder import StageKey
from raypipe.runtime.workers.takeover_actor import TakeoverActor

__all__ = ["COPY_GROUPS", "CopyingActor"]

COPY_GROUPS = {"copies": 2}
"""Concurrency groups of such an actor: copies come and go while a segment runs."""


class CopyingActor(TakeoverActor):
    """See the module. What another worker calls obeys no driver, and is not fenced."""

    _executor: Executor | None = None

    def __init__(self) -> None:
        super().__init__()
        self._copies = WorkerCopies(self._sends)

    def keep_copy(self, term: int, step: int, send: bool) -> None:
        """Copy the state in memory, between two steps.

        Args:
            step: optimizer steps that it has done.
            send: the copy to its holder too, from now on.
        """
        self._fence.check(term)
        self._copies.take(step, send=send, must=True, mark=self._mark)
        self._copies.wait_until_taken()

    @ray.method(concurrency_group="copies")
    def copies(self) -> list[CopyFacts]:
        """What copies of state are here."""
        return self._copies.facts()

    @ray.method(concurrency_group="copies")
    def copy_header(self, generation: int, stage: int, step: int, piece: int = COMMON) -> bytes:
        """See RemoteCopy."""
        return self._copies.header(generation, stage, step, piece).to_json()

    @ray.method(concurrency_group="copies", enable_task_events=False)
    def copy_data(
        self, generation: int, stage: int, step: int, piece: int, places: Sequence[tuple[int, int]]
    ) -> np.ndarray:
        """See RemoteCopy. Ray's list of tasks is spared one for every parcel."""
        return self._copies.data(generation, stage, step, piece, places)

    @ray.method(concurrency_group="copies")
    def hold_copy(self, generation: int, header: bytes) -> bool:
        """See CopyHolder.begin."""
        found = CopyHeader.from_json(header)
        return self._copies.holder.begin(StageKey(generation, found.stage, found.piece), found)

    @ray.method(concurrency_group="copies", enable_task_events=False)
    def hold_copy_part(self, generation: int, stage: int, step: int, piece: int, offset: int, data: np.ndarray) -> bool:
        """See CopyHolder.place."""
        return self._copies.holder.place(StageKey(generation, stage, piece), step, offset, data.data)

    def _forget_copies(self) -> None:
        """All of them: what comes belongs to another run, or to another time in this one."""
        self._copies.close()
        self._copies = WorkerCopies(self._sends)

    def _mark(self, stage: int) -> Mark | None:
        """Where the stream of train_data goes on, between two steps, if this stage reads one."""
        return None if self._executor is None else self._executor.works[stage].feed.mark()

    def _sends(self) -> bool:
        """Whether a boundary message waits to leave."""
        executor = self._executor
        return executor is not None and any(channel.busy for channel in executor.channels.values())
