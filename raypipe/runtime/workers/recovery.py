"""Recovery and resizing of a run on Ray: the same plan, or another one, on workers that live, with the state of a step.

    settle          who is left; whoever is dead or stuck is ended
    replace_lost    spares, else new processes; where there is no place for one, a plan for those that are left
    newest_common   the newest step whose state every stage can reach: copies in memory, else a checkpoint
    configure       every stage takes that state, by name, and new links

A failure in any of these is a failure like the first: the loop counts it and calls again, with what is left then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from raypipe.engine.checkpoint import find_checkpoint, newest_step
from raypipe.errors import CheckpointError, PlanError, RanOut, StageError, StageLostError
from raypipe.planner.recovery import Copy, newest_common
from raypipe.planner.regroup import counts_for
from raypipe.planner.replan import Offer
from raypipe.planner.segments import Position
from raypipe.planner.tune import Decision
from raypipe.runtime.run.blueprint import Assembled, Blueprint, assemble
from raypipe.runtime.run.memory_limits import MemoryLimits
from raypipe.runtime.run.planned import Asked, Planned
from raypipe.runtime.run.planning import another, for_workers, later_plan
from raypipe.runtime.run.recovery import Recovered
from raypipe.runtime.run.regroup import regroup
from raypipe.runtime.run.replanning import replanning_of
from raypipe.runtime.run.same_run import fresh_options
from raypipe.runtime.run.spec import PlanInForce
from raypipe.runtime.run.status import RunStatus
from raypipe.runtime.workers.fleet import Fleet
from raypipe.runtime.workers.growth import Growth
from raypipe.runtime.workers.packing import StoredTensors
from raypipe.runtime.workers.places import PLACE_TIMEOUT_S
from raypipe.runtime.workers.remote_copy import RemoteCopy
from raypipe.runtime.workers.spares import Spares

__all__ = ["Recovery"]

TENSORS_LOST = (
    "A stage was lost before the first checkpoint, and with an earlier driver the parameters that the run began with. "
    "Start the run again under the same name. Copies of state that are left: {copies}; those of steps {steps} would do."
)


class Recovery:
    """Brings the stages of one run back, and gives them other plans; see ``Recoverer``.

    Args:
        planned, made: what the fleet is configured for.
        tensors: that the run began with.
        spares: that are started again when one was used; of a run that may change its number of workers, its growth.
        charter: (plan, size asked for) -> what a later driver needs to know of a run that has this plan.
    """

    def __init__(
        self,
        fleet: Fleet,
        blueprint: Blueprint,
        planned: Planned,
        made: Assembled,
        tensors: StoredTensors,
        spares: Spares | Growth,
        charter: Callable[[Planned, Asked | None], bytes],
    ) -> None:
        self._spares, self._growth = spares, spares if isinstance(spares, Growth) else None
        self._charter, self._planned = charter, {made.setup.generation: planned}
        self._fleet, self._blueprint, self._made, self._tensors = fleet, blueprint, made, tensors
        self._first = made.plan.plan  # which says how mini-batches are parted
        self._num_stages = {self._first.generation: len(made.setup.programs)}  # by generation of the plan
        self._limits = MemoryLimits(blueprint.basis, self._first)
        self.replanning = replanning_of(blueprint, self._first, self._limits)
        self._lighter: Assembled | None = None  # to be taken at the next recovery

    def begin(self) -> None:
        """The fleet is complete: its workers keep what a later driver needs, and spares start."""
        self._keep_charter(self._made)
        self._spares.refill()

    def keep_copy(self, step: int) -> None:
        """See Recoverer."""
        self._fleet.keep_copy(step)

    def lighten(self, ran_out: RanOut) -> None:
        """See Recoverer."""
        setup = self._made.setup
        found = self._limits.lighter(self._made.plan.plan, ran_out)
        self._lighter = self._plan(len(setup.programs), setup.num_workers, found)

    def recover(self, steps: Collection[int]) -> Recovered:
        """See Recoverer."""
        clock = _Clock()
        fleet = self._fleet
        fleet.settle()
        clock.lap("settle")
        # Before anybody is replaced: who is new has no copies, and who waits for one should not wait for long.
        copies = self._copies(steps)
        made, changed = self._lighter or self._made, self._lighter is not None
        try:
            replaced = fleet.replace_lost(made.setup.num_workers)
        except PlanError as error:
            fewer = self._fewer(error)
            if fewer is None:
                return self._stopped(clock)
            replaced, made, changed = (), fewer, True
        clock.lap("replace")
        try:
            step, source, position = self._restore(made, copies, steps)
        except PlanError as error:  # one of them was lost meanwhile, so that there are too few
            raise StageLostError(f"A worker was lost while the run recovered: {error}") from None
        except CheckpointError as error:  # storage may answer the next time
            raise StageLostError(f"The run could not go back: {error}") from None
        self._made, self._lighter = made, None
        self.begin()
        clock.lap("restore")
        plan = made.plan if changed else None
        return Recovered(step, source, position, replaced, clock.laps_s, fleet.facts, plan, fleet.moved_bytes)

    @property
    def state_bytes(self) -> float:
        """Of all parameters and of the optimizer, about: 4 bytes for each element."""
        basis = self._blueprint.basis
        return 4.0 * sum(basis.recipe.sizes.values()) * (1.0 + basis.optimizer_factor)

    def planned_for(self, workers: int) -> Planned:
        """A plan for so many workers; mini-batches are parted as before. It changes nothing, from any thread.

        Raises:
            PlanError: there is none.
        """
        basis = self._blueprint.basis
        request, asked = basis.request, self._asked
        if asked is not None:
            request = replace(request, num_stages=asked.num_stages, split_points=())
        return later_plan(for_workers(basis, self._first, request, workers))

    @property
    def _asked(self) -> Asked | None:
        return None if self._growth is None else self._growth.asked

    @contextlib.contextmanager
    def growing(
        self, status: Callable[[], RunStatus], going: Callable[[], Mapping[str, float | None]]
    ) -> Iterator[None]:
        """Inside, a run that may change its number of workers grows where that pays.

        Args:
            status: of the run.
            going: nodes that are about to go, and their deadlines; see DrainWatch.
        """
        if self._growth is None:
            yield
            return
        self._growth.serve(self, status, going)
        with contextlib.closing(self._growth):
            yield

    def resize(self, num_stages: int, step: int, planned: Planned | None = None) -> Recovered:
        """See Recoverer."""
        with self._refusing():
            clock, fleet = _Clock(), self._fleet
            made = self._plan(num_stages, None) if planned is None else self._assembled(planned)
            clock.lap("plan")
            # Who asked for a size waits for places; a run that grows by itself has its workers, or does without.
            fleet.grow(made.setup.num_workers, PLACE_TIMEOUT_S if planned is None else None)
            clock.lap("workers")
            fleet.keep_copy(step, send=False)
            asked = None if planned is not None else Asked(num_stages, made.setup.num_workers)
            self._hand_over(made, step, asked=asked)
            fleet.end_spares(keep=self._spares.count)
            clock.lap("move")
            return self._changed(step, clock, (), made.plan)

    def move(self, nodes: Collection[str], step: int) -> Recovered | None:
        """See Recoverer."""
        with self._refusing():
            clock, fleet = _Clock(), self._fleet
            fleet.end_spares(on=nodes)
            leaving = tuple(str(m.facts["host"]) for m in fleet.in_use if m.facts["node"] in nodes)
            if not leaving:
                fleet.go_on()
                return None
            made, members = self._beside(nodes)
            clock.lap("workers")
            fleet.keep_copy(step)
            plan = None if made is self._made else made.plan
            self._hand_over(made, step, members)
            fleet.end_spares(on=nodes)
            clock.lap("move")
            self._spares.refill()
            return self._changed(step, clock, leaving, plan)

    def take(self, offer: Offer, step: int) -> Recovered:
        """See Recoverer."""
        with self._refusing():
            clock, fleet, setup = _Clock(), self._fleet, self._made.setup
            if offer.generation != setup.generation:
                raise PlanError("The run has another plan than the one that was to be changed.")
            made = self._plan(len(setup.programs), setup.num_workers, offer.found.decision)
            clock.lap("plan")
            fleet.keep_copy(step, send=False)
            self._hand_over(made, step)
            clock.lap("move")
            return self._changed(step, clock, (), made.plan)

    def _changed(self, step: int, clock: _Clock, leaving: tuple[str, ...], plan: PlanInForce | None) -> Recovered:
        """What a change between two steps came to."""
        fleet = self._fleet
        return Recovered(
            step, "the stages themselves", None, leaving, clock.laps_s, fleet.facts, plan, fleet.moved_bytes
        )

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """A change that cannot be made leaves the run as it was, and able to go on."""
        try:
            yield
        except PlanError:
            self._fleet.go_on()
            raise

    def _beside(self, nodes: Collection[str]) -> tuple[Assembled, list[int]]:
        """The plan, and the members for it, where these nodes may not be used.

        Raises:
            PlanError: there is no place for another worker, nor a plan without it.
        """
        try:
            return self._made, self._fleet.members_besides(nodes)
        except PlanError as error:
            staying = self._fleet.staying(nodes)
            try:
                made = self._planned_for(len(staying), error)
            except StageError as impossible:
                raise PlanError(str(impossible)) from None
            return made, staying[: made.setup.num_workers]

    def _hand_over(
        self, made: Assembled, step: int, members: Sequence[int] | None = None, asked: Asked | None = None
    ) -> None:
        """Give workers a plan, with the state of this step, of which every stage has just taken a copy.

        Args:
            asked: it is of this size because somebody asked for it: a run that may change its size grows no further.

        Raises:
            StageLostError: a copy is not there any more. No older state will do: the run has not gone back.
        """
        copies = self._copies({step})
        if not copies:
            raise StageLostError(
                f"A worker was lost, or does not answer, while the run changed its plan at step {step}."
            )
        try:
            self._fleet.configure(made.run, made.setup, copies, members)
        except CheckpointError as error:
            raise StageLostError(f"The run could not change its plan: {error}") from None
        self._made = made
        if asked is not None and self._growth is not None:
            self._growth.wants(asked)
        self._keep_charter(made)

    def _fewer(self, error: PlanError) -> Assembled | None:
        """A plan for the workers that are left; where those are too few for the run, it waits for more.

        None where the run is stopped meanwhile.

        Args:
            error: why there are no others.
        """
        if self._growth is None:
            return self._planned_for(len(self._fleet.roster), error)
        planned = self._growth.plan(self.planned_for)
        return None if planned is None else self._assembled(planned)

    def _stopped(self, clock: _Clock) -> Recovered:
        """The run was stopped while it waited: its newest checkpoint counts, and no worker is in use any more."""
        self._fleet.in_use = []
        newest = find_checkpoint(self._blueprint.spec.place)[0]
        at, source = (
            (Position(), "nothing") if newest is None else (Position(**newest.manifest.position), newest.folder)
        )
        return Recovered(at.step, source, at, (), clock.laps_s, stopped=True)

    def _planned_for(self, workers: int, error: PlanError) -> Assembled:
        """A plan for the workers that are left, with as many stages on each as before."""
        if not workers:
            raise StageError(f"No worker of the run is left, and {error}")
        try:
            if (request := self._blueprint.basis.request).replicated:
                return self._with_replicas(counts_for(request.replicas_of(len(self._made.setup.programs)), workers))
            if self._growth is not None:
                if workers < self._growth.least():
                    raise PlanError(f"num_workers asks for {self._growth.least()} at least.")
                return self._assembled(self.planned_for(workers))
            each = max(1, len(self._made.setup.programs) // self._made.setup.num_workers)
            return self._plan(workers * each, workers)
        except PlanError as impossible:
            raise StageError(f"{error} Nor can the run go on with the {workers} that are left: {impossible}") from None

    def _with_replicas(self, counts: tuple[int, ...] | None) -> Assembled:
        """The same stages with so many replicas each.

        Raises:
            PlanError: not even one for each stage.
        """
        if counts is None:
            raise PlanError(f"The run has {len(self._made.setup.programs)} stages, and each needs a worker.")
        planned = self._planned[self._made.setup.generation]
        planned, made = regroup(planned, self._made, counts, max(self._num_stages) + 1)
        self._planned[made.setup.generation] = planned
        self._num_stages[made.setup.generation] = len(counts)
        return made

    def _plan(self, num_stages: int, num_workers: int | None, decision: Decision | None = None) -> Assembled:
        cluster = None if decision is None else decision.cluster
        first, basis = self._first, self._blueprint.basis
        basis = another(basis, first, num_stages=num_stages, num_workers=num_workers, cluster=cluster)
        planned = later_plan(basis, decision)
        return self._assembled(planned if decision is None else self._limits.capped(planned))

    def _assembled(self, planned: Planned) -> Assembled:
        """The run's next plan, with a generation of its own."""
        planned = replace(planned, plan=replace(planned.plan, generation=max(self._num_stages) + 1))
        made = assemble(self._blueprint, planned)
        self._planned[made.setup.generation] = planned
        self._num_stages[made.setup.generation] = len(made.setup.programs)
        return made

    def _copies(self, steps: Collection[int]) -> Sequence[RemoteCopy]:
        """Of the newest of these steps that every stage of a plan has a copy of somewhere; none without one."""
        held = self._fleet.copies()
        for generation in sorted({facts.generation for _, facts in held}, reverse=True):
            mine = {(actor, facts.stage): facts.names for actor, facts in held if facts.generation == generation}
            here = [Copy(actor, f.stage, f.steps) for actor, f in held if f.generation == generation]
            found = newest_common(here, self._num_stages.get(generation, 0), steps)
            if found is not None:
                step, by_stage = found
                return [
                    RemoteCopy(actor, actor._actor_id.hex(), generation, stage, step, mine[actor, stage])
                    for stage, (actor, *_) in by_stage.items()
                ]
        return ()

    def _keep_charter(self, made: Assembled) -> None:
        """Have every worker keep what a later driver needs."""
        names = [name for name in sorted(self._tensors.names) if name not in made.run.persistent]
        charter = self._charter(self._planned[made.setup.generation], self._asked)
        self._fleet.keep_charter(charter, self._tensors, names)

    def _restore(
        self, made: Assembled, copies: Sequence[RemoteCopy], steps: Collection[int]
    ) -> tuple[int, str, Position | None]:
        """(step, where from, position of a checkpoint) of the newest state that all can have; now they have it."""
        fleet, run, setup, place = self._fleet, made.run, made.setup, self._blueprint.spec.place
        saved = newest_step(place) if copies else None
        if copies and (saved is None or saved <= copies[0].step):
            fleet.configure(run, setup, copies)
            return copies[0].step, "copies in memory", None
        newest = find_checkpoint(place)[0]
        if newest is None:
            if not run.persistent <= set(self._tensors.names):
                left = [
                    f"stage {f.stage} of plan {f.generation} after steps {list(f.steps)}" for _, f in fleet.copies()
                ]
                raise StageError(TENSORS_LOST.format(copies=", ".join(left) or "none", steps=sorted(steps)))
            fleet.configure(run, setup, [self._tensors])
            return 0, "the parameters that the run began with", Position()
        fleet.configure(run, setup, [newest.folder, self._tensors])
        step = newest.manifest.step
        # Options of the optimizer that were changed when the run was submitted again stand in later checkpoints only.
        fleet.restore(newest.folder, fresh_options(place, step))
        return step, newest.folder, Position(**newest.manifest.position)


class _Clock:
    """Seconds of one part after the other."""

    def __init__(self) -> None:
        self._then_s = time.monotonic()
        self.laps_s: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now_s = time.monotonic()
        self.laps_s[name] = now_s - self._then_s
        self._then_s = now_s
