"""Configuration of a fleet: makes its members (actors) the workers of a plan, and calls methods of all workers.

A plan is applied by three calls to stage actors, each finished on all workers before the next one begins:

join        send the run's setup to members that do not have it yet
load        workers that need other state read it, while the workers that have it still hold it
configure   open links and make executors; workers get the stage programs here if ``load`` has not sent them
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from raypipe.engine.io.checkpoint.restore import FreshOptions
from raypipe.engine.io.checkpoint.state_source import StateSource
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.worker_progress import WorkerProgress
from raypipe.errors import CheckpointError
from raypipe.ir.report import StepReport
from raypipe.ir.segment import RowsKey
from raypipe.planner.copy_interval import holders, pieces_sent
from raypipe.planner.state_sources import Living, members_by_number
from raypipe.runtime.fleet.roster import SPARE, Member, Roster, results
from raypipe.runtime.worker.copies import CopyFacts
from raypipe.runtime.worker.copy_transfer import RemoteCopy
from raypipe.runtime.worker.packing import StoredTensors
from raypipe.runtime.worker.places import PLACE_TIMEOUT_S
from raypipe.runtime.worker.stage_process import holder_of

SAVE_TIMEOUT_S, COME_TIMEOUT_S = 3600.0, 300.0
COPIES_TIMEOUT_S = 10.0
"""Seconds to wait for the workers' lists of copies. The time is long enough for a worker starved of CPU, because
without its copies all workers may have to roll back to a checkpoint."""


class Configuring:
    """Workers of a plan: assigns members (actors) to worker numbers, and calls methods of all workers at once.

    Args:
        term: number of the driver, sent with every call; stages obey the driver of the highest term only.
        places: list of the members (roster).

    Attributes:
        places: list of the members, and of requested placement groups for further ones.
        in_use: members that are workers of the current plan, indexed by worker number.
        moved_bytes: bytes of state that workers read from other workers' copies during the last ``configure``.
    """

    def __init__(self, term: int, places: Roster) -> None:
        self._term, self.places = term, places
        self._run_setup: RunSetup | None = None
        self._rows: set[RowsKey] = set()
        self._names: list[str] = []  # of the workers, for messages: "Stage 1", "Stages 0 and 3"
        self._halted = False
        self._links = -1  # number of times that links were opened, less one
        self._held: list[tuple[int, ...]] = []  # stages, by worker
        self.in_use: list[Member] = []
        self.moved_bytes = 0

    @property
    def roster(self) -> list[Member]:
        """List of all members; lost members are in it until they are dropped."""
        return self.places.members

    def configure(
        self,
        run: RunSetup,
        setup: GenerationSetup,
        sources: Sources | Mapping[int, Sources],
        members: Sequence[int] | None = None,
    ) -> None:
        """Make members the workers of a plan and open new links; no process is started or ended.

        Members that the plan does not use become spares.

        Args:
            run: setup of the run; sent once to each member, when a plan first uses that member.
            setup: setup of the plan, in which this method fills in the addresses.
            sources: sources from which workers read their state, see StageActor.load: a sequence for all workers, or a
                mapping from worker number to sequence. Workers without sources keep their state.
            members: indices into ``roster`` of workers 0, 1, ...; None takes the workers in use, then spares.

        Raises:
            PlanError: there are fewer members than workers, or a node has another folder at the run's path.
            RaypipeError: error of the first worker that failed.
        """
        if members is None:
            members = [member.position for member in members_by_number(self.living(), setup.num_workers)]
        workers = [self.roster[at] for at in members]
        self._join(run, workers)
        setup = replace(setup, addresses=tuple(member.facts["address"] for member in workers))
        self.moved_bytes = 0
        shared = ray.put(setup)
        if isinstance(sources, Mapping):
            by_worker = sources
        else:
            by_worker = dict.fromkeys(range(len(workers)), sources) if sources else {}
        if by_worker:  # while all workers still hold the copies that others may read
            loads = [workers[at].actor.load.remote(self._term, at, shared, list(of)) for at, of in by_worker.items()]
            self.moved_bytes = sum(results(loads, LOAD_TIMEOUT_S, "taking the state of their stages"))
        if by_worker or isinstance(sources, Mapping):  # all workers have the programs
            shared = ray.put(replace(setup, programs=()))
        self._open(workers, setup, shared)

    def living(
        self, step: int | None = None, *, linked: bool = True, without: Collection[str] = (), ready: bool = False
    ) -> list[Living]:
        """List living members, workers and spares, in the form that ``planner/state_sources.py`` takes.

        Args:
            step: optimizer steps done in the workers' state; None if unknown.
            linked: True if the links between the workers still work.
            without: Ray's ids of nodes that are to be left; members on them get ``stays=False``.
            ready: leave out spares that do not have the run's setup yet.
        """
        return [
            Living(at, m.worker, None if m.worker is None else step, m.facts.get("node") not in without, linked)
            for at, m in enumerate(self.roster)
            if not m.lost and not (ready and m.worker is None and not m.joined)
        ]

    def _open(self, workers: Sequence[Member], setup: GenerationSetup, shared: Any) -> None:
        resting = [m for m in self.in_use if not m.lost and not any(m is one for one in workers)]
        self._links += 1
        self._assign(workers, setup)
        results([member.actor.rest.remote(self._term) for member in resting], PLACE_TIMEOUT_S, "leaving the pipeline")
        assert self._run_setup is not None, "workers have joined a run"
        apart = self._run_setup.settings.shard_optimizer
        held_by = holders([member.facts["node"] for member in workers], setup.homes, shared_out=apart)
        sent = pieces_sent(setup.homes, held_by, shared_out=apart)
        opening = []
        for worker, (actor, at) in enumerate(zip(self.actors, held_by, strict=True)):
            holds = [piece for pieces, to in zip(sent, held_by, strict=True) if to == worker for piece in pieces]
            holder = None if at is None else self.actors[at]
            opening.append(actor.configure.remote(self._term, worker, shared, self._links, holder, holds, sent[worker]))
        results(opening, OPEN_TIMEOUT_S + PLACE_TIMEOUT_S, "opening their links")

    def _assign(self, workers: Sequence[Member], setup: GenerationSetup) -> None:
        placement = setup.placement(0)
        for member in self.roster:
            member.worker, member.name = None, SPARE
        for worker, member in enumerate(workers):
            member.worker, member.name = worker, placement.name_of(worker).capitalize()
        self.in_use = list(workers)
        self._rows, self._halted = set(), False
        self._held = [placement.stages_of(worker) for worker in range(len(workers))]
        self._names = [member.name for member in workers]

    def _join(self, run: RunSetup, members: Sequence[Member]) -> None:
        if run is not self._run_setup:
            self._run_setup = run
            for member in self.roster:
                member.joined = False
        if new := [member for member in members if not member.joined]:
            shared, held_by = ray.put(run), holder_of(run.place)
            joining = [member.actor.join.remote(self._term, shared, held_by) for member in new]
            results(joining, PLACE_TIMEOUT_S, "joining the run")
            for member in new:
                member.joined = True

    @property
    def actors(self) -> list[Any]:
        """Actors of the members in use, by worker."""
        return [member.actor for member in self.in_use]

    def keep_copy(self, step: int, *, send: bool = True, workers: Collection[int] | None = None) -> None:
        """Have workers copy the state of their stages to memory, while no ``Fleet.run`` is in progress.

        Args:
            step: optimizer steps done.
            send: also send the copies to other workers, in the background.
            workers: numbers of the workers that copy; None for all.
        """
        actors = [actor for at, actor in enumerate(self.actors) if workers is None or at in workers]
        results(
            [actor.keep_copy.remote(self._term, step, send) for actor in actors],
            SAVE_TIMEOUT_S,
            "copying their state",
        )

    def copies(self) -> list[tuple[Any, CopyFacts]]:
        """List (actor, facts) of the in-memory copies on all living workers.

        Copies that workers made of their own stages come before copies that they hold for other workers. Copies on
        workers that do not answer within COPIES_TIMEOUT_S are left out.
        """
        calls = {member.actor: member.actor.copies.remote() for member in self.in_use if not member.lost}
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=COPIES_TIMEOUT_S) if calls else None
        copies = []
        for actor, ref in calls.items():
            with contextlib.suppress(RayError):  # copies of an actor that does not answer cannot be read
                copies += [(actor, facts) for facts in ray.get(ref, timeout=0)]
        return sorted(copies, key=lambda pair: pair[1].held)

    @property
    def lost(self) -> frozenset[int]:
        """Numbers of the workers whose processes have ended."""
        return frozenset(worker for worker, member in enumerate(self.in_use) if member.lost)

    def reached(self) -> list[WorkerProgress]:
        """Return the progress of every living worker, by increasing number, after the caller has called ``settle``."""
        calls = [member.actor.reached.remote(self._term) for member in self.in_use if not member.lost]
        return results(calls, COME_TIMEOUT_S, "reporting how far they are")

    def come_to(self, step: int, totals: tuple[torch.Tensor, torch.Tensor] | None) -> dict[int, list[list[StepReport]]]:
        """Bring all living workers to the same step; see StageActor.come_to.

        Args:
            step: largest number of optimizer steps that any worker has completed.
            totals: gradient norm and loss of that step; None if all workers have completed it.

        Returns:
            Reports of that step by worker, only of the workers that completed it in this call.
        """
        living = {worker: member.actor for worker, member in enumerate(self.in_use) if not member.lost}
        calls = [actor.come_to.remote(self._term, step, totals) for actor in living.values()]
        by_worker = zip(living, results(calls, COME_TIMEOUT_S, "coming to the same step"), strict=True)
        return {worker: reports for worker, reports in by_worker if reports is not None}

    def save(self, folder: str) -> None:
        """Have every worker take a snapshot and begin to write it to ``folder``; ``entries`` waits for the files.

        Call it while no ``Fleet.run`` is in progress.
        """
        results([actor.save.remote(self._term, folder) for actor in self.actors], SAVE_TIMEOUT_S, "taking a snapshot")

    def entries(self, folder: str) -> list[dict[str, Any]]:
        """Wait until all workers have written checkpoint ``folder``; return the entries for its manifest.

        The first replica of a stage writes the stage. Other replicas write and return entries only if they hold slices
        of the optimizer state.

        Raises:
            CheckpointError: a worker failed to write its part, did not finish in time, or was configured anew.
        """
        links, actors, deadline_s = self._links, self.actors, time.monotonic() + SAVE_TIMEOUT_S
        entries: list[dict[str, Any]] = []
        failure: CheckpointError | None = None
        missing = set(range(len(actors)))
        while missing and time.monotonic() < deadline_s:
            calls = {worker: actors[worker].entries.remote(folder) for worker in sorted(missing)}
            for worker, call in calls.items():
                try:
                    (new,) = results([call], SAVE_TIMEOUT_S, "writing a checkpoint")
                except CheckpointError as error:  # wait for the others, so that no write to the folder is under way
                    failure, new = failure or error, []
                if new is not None:
                    entries += new
                    missing.discard(worker)
            if links != self._links:
                raise CheckpointError(f"{folder} was not completed: the stages were configured anew meanwhile.")
        if failure is not None:
            raise failure
        if missing:
            raise CheckpointError(f"{folder} was not written within {SAVE_TIMEOUT_S:g} s.")
        return entries

    def restore(self, folder: str, fresh: FreshOptions) -> None:
        """Load checkpoint ``folder`` on every worker.

        Args:
            fresh: optimizer options that keep their present values instead of the checkpoint's.

        Raises:
            CheckpointError: the checkpoint does not fit this model, or cannot be read.
        """
        reads = [actor.restore.remote(self._term, folder, fresh) for actor in self.actors]
        results(reads, SAVE_TIMEOUT_S, "reading a checkpoint")

    def spans(self) -> list[Any]:
        """Return the timed actions (Span) of all stages in the last segment that was run with keep_spans=True."""
        return [
            span for spans in results([a.spans.remote() for a in self.actors], 60.0, "sending spans") for span in spans
        ]

    def keep_charter(self, charter: bytes, tensors: StoredTensors, names: Sequence[str]) -> None:
        """Store on every worker what another driver needs to resume the run.

        Args:
            charter: pickled Charter (the driver's inputs and plan).
            tensors: initial tensors of the run.
            names: names of the initial tensors that are in no checkpoint; only these are stored.
        """
        shared = ray.put(charter)
        kept = [actor.keep_charter.remote(self._term, shared, tensors, list(names)) for actor in self.actors]
        results(kept, PLACE_TIMEOUT_S, "keeping what a later driver needs")


OPEN_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 3600.0
Sources = Sequence[StateSource | str | RemoteCopy]
