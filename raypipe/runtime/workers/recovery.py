"""Recovery and resizing of a run on Ray: the same plan, or another one, on workers that live, with the state of a step.

    settle          who is left; whoever is dead or stuck is ended
    fellows         replicas that share out their state go on without a lost one, which joins later
    replace_lost    spares, else new processes; where there is no place for one, a plan for those that are left
    newest_copies   of the newest step whose state every stage can reach; where there is none, a checkpoint
    configure       every stage takes that state, by name, and new links

A failure in any of these is a failure like the first: the loop counts it and calls again, with what is left then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from raypipe.engine.checkpoint import find_checkpoint, newest_step
from raypipe.errors import CheckpointError, PlanError, RanOut, StageError, StageLostError
from raypipe.planner.regroup import left
from raypipe.planner.replan import Offer
from raypipe.planner.segments import Position
from raypipe.runtime.run.blueprint import Assembled, Blueprint
from raypipe.runtime.run.planned import Asked, Planned
from raypipe.runtime.run.plans import Plans
from raypipe.runtime.run.recovery import Recovered, Regrouper, Replayer
from raypipe.runtime.run.replanning import replanning_of
from raypipe.runtime.run.same_run import fresh_options
from raypipe.runtime.run.spec import PlanInForce
from raypipe.runtime.run.status import RunStatus
from raypipe.runtime.workers.fleet import Fleet
from raypipe.runtime.workers.growth import Growth
from raypipe.runtime.workers.laps import Laps
from raypipe.runtime.workers.newest_copies import newest_copies, why_none
from raypipe.runtime.workers.packing import StoredTensors
from raypipe.runtime.workers.places import PLACE_TIMEOUT_S
from raypipe.runtime.workers.regrouping import Regrouping
from raypipe.runtime.workers.remote_copy import RemoteCopy
from raypipe.runtime.workers.replaying import Replaying
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
        charter: (plan, size asked for, failures) -> what a later driver needs to know of a run that has this plan.
        asked: the size that somebody asked an earlier driver for.
        failures: that an earlier driver of this submission has survived.
    """

    def __init__(
        self,
        fleet: Fleet,
        blueprint: Blueprint,
        planned: Planned,
        made: Assembled,
        tensors: StoredTensors,
        spares: Spares | Growth,
        charter: Callable[[Planned, Asked | None, int], bytes],
        asked: Asked | None = None,
        failures: int = 0,
    ) -> None:
        self.failures = failures
        self._spares, self._growth = spares, spares if isinstance(spares, Growth) else None
        self._shards = blueprint.setup.settings.shard_optimizer
        self._charter, self._plans = charter, Plans(blueprint, planned, made, asked)
        self._fleet, self._blueprint, self._tensors = fleet, blueprint, tensors
        self.replanning = replanning_of(blueprint, self._plans.first, self._plans.limits)
        self.groups: Regrouper | None = None
        if made.setup.lanes > 1:  # there may be replicas
            ways = self._keep_charter, spares.refill, self._hand_over
            self.groups = Regrouping(fleet, self._plans, *ways, shards=self._shards)
        self._replaying = Replaying(fleet, self._plans, self._keep_charter, spares.refill)
        self.replays: Replayer | None = self._replaying
        self._lighter: Assembled | None = None  # to be taken at the next recovery

    def begin(self) -> None:
        """The fleet is complete: its workers keep what a later driver needs, and spares start."""
        self._keep_charter(self._plans.made)
        self._spares.refill()

    def keep_copy(self, step: int) -> None:
        """See Recoverer."""
        self._fleet.keep_copy(step)

    def lighten(self, ran_out: RanOut) -> None:
        """See Recoverer."""
        made = self._plans.made
        found = self._plans.limits.lighter(made.plan.plan, ran_out)
        self._lighter = self._plans.of_stages(len(made.setup.programs), made.setup.num_workers, found)

    def recover(self, steps: Collection[int]) -> Recovered:
        """See Recoverer."""
        clock = Laps()
        fleet = self._fleet
        fleet.settle()
        clock.lap("settle")
        # Before anybody is replaced: who is new has no copies, and who waits for one should not wait for long.
        held = fleet.copies()
        copies = newest_copies(held, self._plans, steps)
        why = "" if copies else why_none(held, self._plans)
        made, changed = self._lighter or self._plans.made, self._lighter is not None
        replaced, lost = tuple[str, ...](), tuple[str, ...]()
        try:
            if (no_place := self._replaying.no_place) is not None:  # it has been waited for
                raise no_place
            if (fellows := self._fellows()) is not None:
                lost, made, changed = fleet.forget_lost(), fellows, True
            else:
                replaced = fleet.replace_lost(made.setup.num_workers)
        except PlanError as error:
            fewer = self._fewer(error)
            if fewer is None:
                return self._stopped(clock)
            made, changed = fewer, True
        clock.lap("replace")
        try:
            step, source, position = self._restore(made, copies, steps, why)
        except PlanError as error:  # one of them was lost meanwhile, so that there are too few
            raise StageLostError(f"A worker was lost while the run recovered: {error}") from None
        except CheckpointError as error:  # storage may answer the next time
            raise StageLostError(f"The run could not go back: {error}") from None
        self._plans.made, self._lighter = made, None
        self.begin()
        clock.lap("restore")
        plan = made.plan if changed else None
        return Recovered(
            step, source, position, replaced, clock.laps_s, fleet.facts, plan, fleet.moved_bytes, lost=lost
        )

    def _fellows(self) -> Assembled | None:
        """A plan for the replicas that are left, where they share out the state of their optimizer.

        All of them go back, whether others are there or not; so nobody waits for a process that starts, which joins
        later. None where a stage has no replica left, or spares are there for all that were lost.
        """
        fleet, made = self._fleet, self._plans.made
        # A run that may change its number of workers looks how many there can be; with less memory it has another plan.
        if not self._shards or self._growth is not None or self._lighter is not None:
            return None
        if len(fleet.in_use) != made.setup.num_workers or len(fleet.spares) >= len(fleet.lost):
            return None  # others were lost while it recovered; or there are spares, or only links failed
        remaining = left(made.setup.homes, fleet.lost)
        return self._plans.counted_anew(tuple(map(len, remaining))) if all(remaining) else None

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
        return self._plans.planned_for(workers)

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

    def resize(
        self,
        num_stages: int,
        step: int,
        planned: Planned | None = None,
        replicas: int | tuple[int, ...] | None = None,
    ) -> Recovered:
        """See Recoverer."""
        with self._refusing():
            clock, fleet, plans = Laps(), self._fleet, self._plans
            made = plans.resized(num_stages, replicas) if planned is None else plans.assembled(planned)
            clock.lap("plan")
            # Who asked for a size waits for places; a run that grows by itself has its workers, or does without.
            fleet.grow(made.setup.num_workers, PLACE_TIMEOUT_S if planned is None else None)
            clock.lap("workers")
            fleet.keep_copy(step, send=False)
            asked = None
            if planned is None:
                asked = Asked(num_stages, made.setup.num_workers, made.plan.plan.partition.replicas)
            self._hand_over(made, step, asked=asked)
            fleet.end_spares(keep=self._spares.count)
            clock.lap("move")
            return self._changed(step, clock, (), made.plan)

    def move(self, nodes: Collection[str], step: int) -> Recovered | None:
        """See Recoverer."""
        with self._refusing():
            clock, fleet = Laps(), self._fleet
            fleet.end_spares(on=nodes)
            leaving = tuple(str(m.facts["host"]) for m in fleet.in_use if m.facts["node"] in nodes)
            if not leaving:
                fleet.go_on()
                return None
            made, members = self._beside(nodes)
            clock.lap("workers")
            fleet.keep_copy(step)
            plan = None if made is self._plans.made else made.plan
            self._hand_over(made, step, members)
            fleet.end_spares(on=nodes)
            clock.lap("move")
            self._spares.refill()
            return self._changed(step, clock, leaving, plan)

    def take(self, offer: Offer, step: int) -> Recovered:
        """See Recoverer."""
        with self._refusing():
            clock, fleet, setup = Laps(), self._fleet, self._plans.made.setup
            if offer.generation != setup.generation:
                raise PlanError("The run has another plan than the one that was to be changed.")
            made = self._plans.of_stages(len(setup.programs), setup.num_workers, offer.found.decision)
            clock.lap("plan")
            fleet.keep_copy(step, send=False)
            self._hand_over(made, step)
            clock.lap("move")
            return self._changed(step, clock, (), made.plan)

    def _changed(self, step: int, clock: Laps, leaving: tuple[str, ...], plan: PlanInForce | None) -> Recovered:
        """What a change between two steps came to."""
        fleet = self._fleet
        return Recovered(
            step, "the stages themselves", None, leaving, clock.laps_s, fleet.facts, plan, fleet.moved_bytes
        )

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """A change that cannot be made leaves the run as it was, and able to go on."""
        try:
            if self._blueprint.setup.transport == "ray_collective":
                raise PlanError(
                    "transport='ray_collective': the links of a run are opened once, so its stages stay on the workers "
                    "that they are on. Take transport='tcp' for a run that may change."
                )
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
            return self._plans.made, self._fleet.members_besides(nodes)
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
            asked: it is of this size because somebody asked for it: a run that may change its size grows no further,
                and one with replicas has as many from now on.

        Raises:
            StageLostError: a copy is not there any more. No older state will do: the run has not gone back.
        """
        copies = newest_copies(self._fleet.copies(), self._plans, {step})
        if not copies:
            raise StageLostError(
                f"A worker was lost, or does not answer, while the run changed its plan at step {step}."
            )
        try:
            self._fleet.configure(made.run, made.setup, copies, members)
        except CheckpointError as error:
            raise StageLostError(f"The run could not change its plan: {error}") from None
        self._plans.made = made
        if asked is not None:
            self._plans.asked = asked
            self._spares.wants(asked)
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
        return None if planned is None else self._plans.assembled(planned)

    def _stopped(self, clock: Laps) -> Recovered:
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
            if self._plans.replicas:
                return self._plans.for_fewer(workers)
            if self._growth is not None:
                if workers < self._growth.least():
                    raise PlanError(f"num_workers asks for {self._growth.least()} at least.")
                return self._plans.assembled(self.planned_for(workers))
            each = max(1, len(self._plans.made.setup.programs) // self._plans.made.setup.num_workers)
            return self._plans.of_stages(workers * each, workers)
        except PlanError as impossible:
            raise StageError(f"{error} Nor can the run go on with the {workers} that are left: {impossible}") from None

    def _keep_charter(self, made: Assembled) -> None:
        """Have every worker keep what a later driver needs."""
        names = [name for name in sorted(self._tensors.names) if name not in made.run.persistent]
        charter = self._charter(self._plans.planned_of(made), self._plans.asked, self.failures)
        self._fleet.keep_charter(charter, self._tensors, names)

    def _restore(
        self, made: Assembled, copies: Sequence[RemoteCopy], steps: Collection[int], why: str
    ) -> tuple[int, str, Position | None]:
        """(step, where from, position of a checkpoint) of the newest state that all can have; now they have it.

        Args:
            copies, why: of the newest of these steps, or why there are none, for people.
        """
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
        source = f"{newest.folder}: {why}" if why else newest.folder
        return step, source, Position(**newest.manifest.position)
