"""What a fleet asks of all its workers about their state: to keep it, to save it, to go back to one that was saved."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from raypipe.engine.checkpoint import FreshOptions
from raypipe.engine.message_log import LoggedStep
from raypipe.engine.reached import Reached, Scalar
from raypipe.ir.report import StepReport
from raypipe.runtime.workers.copies import CopyFacts
from raypipe.runtime.workers.packing import StoredTensors
from raypipe.runtime.workers.places import PLACE_TIMEOUT_S
from raypipe.runtime.workers.replaying_actor import Logged
from raypipe.runtime.workers.roster import Member, results
from raypipe.runtime.workers.shards import SAVE_TIMEOUT_S, entries_of

__all__ = ["StateCalls"]

COME_TIMEOUT_S = 300.0
COPIES_TIMEOUT_S = 10.0
"""For the word of a starved worker: without it, all go back to a checkpoint."""


class StateCalls:
    """Workers, and which stages they hold.

    Args:
        term: of the driver; see Fence.

    Attributes:
        in_use: the members that are workers, by worker.
        moved_bytes: of state that workers read of other workers' copies when they were configured last.
    """

    def __init__(self, term: int) -> None:
        self._term = term
        self._links = -1  # times that links were opened
        self._held: list[tuple[int, ...]] = []  # stages, by worker
        self.in_use: list[Member] = []
        self.moved_bytes = 0

    @property
    def actors(self) -> list[Any]:
        """Of the members in use, by worker."""
        return [member.actor for member in self.in_use]

    def keep_copy(self, step: int, *, send: bool = True, workers: Collection[int] | None = None) -> None:
        """Every stage copies its state in memory, between two runs.

        Args:
            step: optimizer steps that it has done.
            send: another worker is to have the copy too, soon.
            workers: that copy; None for all.
        """
        actors = [actor for at, actor in enumerate(self.actors) if workers is None or at in workers]
        results(
            [actor.keep_copy.remote(self._term, step, send) for actor in actors],
            SAVE_TIMEOUT_S,
            "copying their state",
        )

    def copies(self) -> list[tuple[Any, CopyFacts]]:
        """(actor, what it has) of all copies in memory that can be read now, of own stages before held ones."""
        asked = {member.actor: member.actor.copies.remote() for member in self.in_use if not member.lost}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=COPIES_TIMEOUT_S) if asked else None
        found = []
        for actor, ref in asked.items():
            with contextlib.suppress(RayError):  # of one that does not answer nothing can be read
                found += [(actor, facts) for facts in ray.get(ref, timeout=0)]
        return sorted(found, key=lambda pair: pair[1].held)

    @property
    def links(self) -> int:
        """How often links were opened, counted from 0."""
        return self._links

    def logged(self) -> dict[int, Logged | None]:
        """By worker that lives, what it has kept of what it sent."""
        living = {worker: member.actor for worker, member in enumerate(self.in_use) if not member.lost}
        asked = [actor.logged.remote() for actor in living.values()]
        return dict(zip(living, results(asked, COPIES_TIMEOUT_S, "saying what they have kept"), strict=True))

    def logged_steps(self, worker: int, begin: int, end: int) -> list[LoggedStep]:
        """What all stages did in these steps, as a worker knows it."""
        asked = self.in_use[worker].actor.logged_steps.remote(begin, end)
        (found,) = results([asked], COPIES_TIMEOUT_S, "saying what it has done")
        return list(found)

    @property
    def lost(self) -> frozenset[int]:
        """Workers that no plan can use any more."""
        return frozenset(worker for worker, member in enumerate(self.in_use) if member.lost)

    def reached(self) -> list[Reached]:
        """How far every worker that lives has come, in their order; after ``settle``."""
        asked = [member.actor.reached.remote(self._term) for member in self.in_use if not member.lost]
        return results(asked, COME_TIMEOUT_S, "saying how far they are")

    def come_to(self, step: int, totals: tuple[Scalar, Scalar] | None) -> dict[int, list[list[StepReport]]]:
        """All that live come to the same step; by worker that made it just now, its reports. See JoiningActor."""
        living = {worker: member.actor for worker, member in enumerate(self.in_use) if not member.lost}
        asked = [actor.come_to.remote(self._term, step, totals) for actor in living.values()]
        found = zip(living, results(asked, COME_TIMEOUT_S, "coming to the same step"), strict=True)
        return {worker: reports for worker, reports in found if reports is not None}

    def save(self, folder: str) -> None:
        """Every stage takes a snapshot, between two runs, and writes it to ``folder``; see ``entries``."""
        results([actor.save.remote(self._term, folder) for actor in self.actors], SAVE_TIMEOUT_S, "taking a snapshot")

    def entries(self, folder: str) -> list[dict[str, Any]]:
        """Wait until every stage has written its part of checkpoint ``folder``; the manifest's entries.

        Raises:
            CheckpointError: one of them could not.
        """
        links = self._links
        return entries_of(self.actors, folder, lambda: links == self._links)

    def restore(self, folder: str, fresh: FreshOptions) -> None:
        """Every stage goes back to the state of checkpoint ``folder``, but for these options of the optimizer.

        Raises:
            CheckpointError: it does not fit this model, or cannot be read.
        """
        reads = [actor.restore.remote(self._term, folder, fresh) for actor in self.actors]
        results(reads, SAVE_TIMEOUT_S, "reading a checkpoint")

    def spans(self) -> list[Any]:
        """Spans of the last segment run with keep_spans, of all stages."""
        return [
            span for spans in results([a.spans.remote() for a in self.actors], 60.0, "sending spans") for span in spans
        ]

    def keep_charter(self, charter: bytes, tensors: StoredTensors, names: Sequence[str]) -> None:
        """Have every worker keep what another driver would need to go on with the run; see TakeoverActor."""
        shared = ray.put(charter)
        kept = [actor.keep_charter.remote(self._term, shared, tensors, list(names)) for actor in self.actors]
        results(kept, PLACE_TIMEOUT_S, "keeping what a later driver needs")
