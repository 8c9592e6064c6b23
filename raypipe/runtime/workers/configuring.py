"""How members of a fleet become the workers of a plan: with its stages and their state, or with other links alone.

configure   load: everybody reads its state while the others still hold it     configure: links, executors
regroup     load: only who joins                                               configure: programs stay
replay      load: who takes the place of a lost worker, which does steps again      regroup is next
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from raypipe.engine.checkpoint import StateSource
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.errors import StageLostError
from raypipe.ir.report import StepReport
from raypipe.ir.segment import RowsKey
from raypipe.planner.copies import holders, pieces_sent
from raypipe.runtime.workers.places import PLACE_TIMEOUT_S
from raypipe.runtime.workers.remote_copy import RemoteCopy
from raypipe.runtime.workers.replaying_actor import Todo
from raypipe.runtime.workers.roster import SPARE, Member, Roster, chosen, results
from raypipe.runtime.workers.state_calls import StateCalls

__all__ = ["Configuring"]

OPEN_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 3600.0
Sources = Sequence[StateSource | str | RemoteCopy]


class Configuring(StateCalls):
    """See the module.

    Args:
        term: of the driver; see Fence.
        roster: all members.
    """

    def __init__(self, term: int, roster: Roster) -> None:
        super().__init__(term)
        self._roster = roster
        self._run_setup: RunSetup | None = None
        self._rows: set[RowsKey] = set()
        self._names: list[str] = []  # of the workers, for people: "Stage 1", "Stages 0 and 3"
        self._halted = False

    @property
    def roster(self) -> list[Member]:
        """All members that live, or did when they were heard of last."""
        return self._roster.members

    def configure(
        self, run: RunSetup, setup: GenerationSetup, sources: Sources, members: Sequence[int] | None = None
    ) -> None:
        """Make members the workers of a plan and open links anew; processes stay, and the others are spares.

        Args:
            run: sent to each member when a plan first uses it, however often the run is planned anew.
            setup: what the plan says; addresses are filled in here.
            sources: where the workers find the state that they hold, see StageActor.load; none where every worker keeps
                the stages that it has.
            members: positions in the roster of workers 0, 1, ...; None takes those in use, then spares.

        Raises:
            PlanError: there are fewer members than workers.
            RaypipeError: what went wrong on the first stage that failed.
        """
        workers = chosen(self.roster, setup.num_workers, members)
        setup = self._addressed(run, setup, workers)
        self.moved_bytes = 0
        shared = ray.put(setup)
        if sources:  # while everybody still holds what the others may have to read
            self._load(workers, shared, dict.fromkeys(range(len(workers)), sources))
        self._open(workers, setup, shared)

    def regroup(
        self,
        run: RunSetup,
        setup: GenerationSetup,
        members: Sequence[int] | None = None,
        joining: Mapping[int, Sources] | None = None,
    ) -> None:
        """Give the stages that the workers have other numbers of replicas; see ``configure``.

        Args:
            joining: by worker that is a spare until now, where it finds its state.
        """
        workers = chosen(self.roster, setup.num_workers, members)
        setup = self._addressed(run, setup, workers)
        self.moved_bytes = 0
        if joining:
            self._load(workers, ray.put(setup), joining)
        self._open(workers, setup, ray.put(replace(setup, programs=())))

    def replay(
        self, run: RunSetup, setup: GenerationSetup, copies: Mapping[int, Sources], todo: Mapping[int, Todo]
    ) -> dict[int, list[list[list[StepReport]]]]:
        """Have workers that were lost, and replaced, do steps again alone; ``regroup`` opens links between all.

        Args:
            copies: by worker, of the state that it begins with.
            todo: by the same workers.

        Returns:
            By worker its reports, by step and stage.

        Raises:
            StageLostError: a worker was lost meanwhile.
        """
        workers = [self.roster[at] for at in self.positions()]
        shared = ray.put(self._addressed(run, setup, workers))
        self._load(workers, shared, copies)
        asked = [workers[at].actor.replay.remote(self._term, at, shared, one) for at, one in todo.items()]
        return dict(zip(todo, results(asked, LOAD_TIMEOUT_S, "doing steps again"), strict=True))

    def positions(self, members: Sequence[Member] | None = None) -> list[int]:
        """Where members lie in the roster.

        Args:
            members: workers 0, 1, ...; None for those in use.

        Raises:
            StageLostError: one of them has been lost.
        """
        places = {id(member): at for at, member in enumerate(self.roster) if not member.lost}
        found = [places.get(id(member)) for member in (self.in_use if members is None else members)]
        if None in found:
            raise StageLostError("Another worker was lost while the run recovered.")
        return [at for at in found if at is not None]

    def _addressed(self, run: RunSetup, setup: GenerationSetup, workers: Sequence[Member]) -> GenerationSetup:
        self._join(run, workers)
        return replace(setup, addresses=tuple(member.facts["address"] for member in workers))

    def _load(self, workers: Sequence[Member], shared: Any, sources: Mapping[int, Sources]) -> None:
        loads = [
            workers[at].actor.load.remote(self._term, at, shared, list(of_worker)) for at, of_worker in sources.items()
        ]
        self.moved_bytes = sum(results(loads, LOAD_TIMEOUT_S, "taking the state of their stages"))

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
            shared = ray.put(run)
            results(
                [member.actor.join.remote(self._term, shared) for member in new], PLACE_TIMEOUT_S, "joining the run"
            )
            for member in new:
                member.joined = True
