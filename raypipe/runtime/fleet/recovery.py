"""Recovery: implements the transitions of a run on Ray (run/transitions.py), after failures and between steps.

A transition applies the present plan or another one to living workers, all of which then have the state of one step:

    settle            end the work of all workers; kill those that are stuck
    plan              keep the plan, or make one: for a requested change, for fewer workers, or for more replicas
    replace_lost      replace lost workers by spares, else by new processes
    plan_transition   choose the members, and sources of the newest state that all of them can have
    configure         have members load that state by the names of tensors, and open new links

If a synchronous run loses replicas, the remaining ones first complete the same step (engine/executor.py) and keep their
state. Then micro-batches are distributed over them, and the unfinished step is repeated. If the optimizer state is
sharded over replicas, slices are lost: all workers then roll back to in-memory copies, and the state is sharded anew.

If a transition fails, the training loop counts another failure and requests a rollback.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from raypipe.engine.io.checkpoint.find_checkpoint import find_checkpoint, newest_step
from raypipe.engine.worker_progress import newest_common_step
from raypipe.errors import CheckpointError, PlanError, RanOut, StageError, StageLostError
from raypipe.ir.schedule import groups_in
from raypipe.planner.elastic import counts_of, left, with_spares
from raypipe.planner.repartition import Offer
from raypipe.planner.segments import Position
from raypipe.planner.state_sources import Copy, Layout, Living, Transition, lacking, plan_transition
from raypipe.run.plans.blueprint import Charter
from raypipe.run.plans.plans import Plans
from raypipe.run.plans.replanning import replanning_of
from raypipe.run.requests import Resize
from raypipe.run.same_run import fresh_options
from raypipe.run.spec import PlanInForce, RequestedSize
from raypipe.run.status import RunStatus
from raypipe.run.transitions import Change, Join, Laps, Move, Recovered, Steps
from raypipe.runtime.fleet.configuring import Sources
from raypipe.runtime.fleet.fleet import Fleet
from raypipe.runtime.fleet.growth import Growth, Spares
from raypipe.runtime.fleet.waiting import Waiting
from raypipe.runtime.worker.packing import StoredTensors
from raypipe.runtime.worker.places import PLACE_TIMEOUT_S

TENSORS_LOST = (
    "A stage was lost before the first checkpoint, and with an earlier driver the parameters that the run began with. "
    "Start the run again under the same name. Copies of state that are left: {copies}; those of steps {steps} would do."
)

BETWEEN_STEPS = "the stages themselves"
"""Text for ``Recovered.source`` after a change between two steps, in which no state is rolled back."""


class Recovery:
    """Implementation of the protocol Transitions for one run. ``step`` counts optimizer steps in all methods.

    Args:
        fleet: fleet, configured for the plan in force.
        charter: settings of the run, and the plan from which ``made`` was assembled.
        made: plan in force.
        tensors: initial parameters and buffers of the run.
        spares: starts further spares after one was used; a Growth if the run may change its number of workers.
        waiting: waits for workers if there is no plan for the workers that are left.
    """

    def __init__(
        self,
        fleet: Fleet,
        charter: Charter,
        made: PlanInForce,
        tensors: StoredTensors,
        spares: Spares | Growth,
        waiting: Waiting,
    ) -> None:
        blueprint = charter.blueprint
        self.failures = charter.failures
        self._waiting = waiting
        self._spares, self._growth = spares, spares if isinstance(spares, Growth) else None
        self._shards = blueprint.setup.settings.shard_optimizer
        self._plans = Plans(blueprint, made, charter.requested)
        self._fleet, self._blueprint, self._tensors = fleet, blueprint, tensors
        self.replanning = replanning_of(blueprint, self._plans.first, self._plans.limits)
        self._settling = Laps()  # phases since ``catch_up``
        self._lighter: PlanInForce | None = None  # for the next recovery
        self._reported = made  # plan in force as far as the loop knows
        fleet.expect(made.predicted)

    def begin(self) -> None:
        """Store the plan in force on all workers, for a later driver, and start missing spares."""
        self._keep_charter(self._plans.made)
        self._spares.refill()

    def keep_copy(self, step: int) -> None:
        """Have every worker make an in-memory copy of its state after ``step`` steps; see Transitions."""
        self._fleet.keep_copy(step)

    def lighten(self, ran_out: RanOut) -> None:
        """Make a plan that needs less memory on the worker that ran out; the next rollback uses it; see Transitions."""
        made = self._plans.made
        decision = self._plans.limits.lighter(made.plan, ran_out)
        self._lighter = self._plans.of_stages(len(made.setup.programs), made.setup.num_workers, decision)

    def carry_out(self, change: Change, step: int) -> Recovered | None:
        """Apply a change of the workers or of the plan; return None if nothing has to change; see Transitions."""
        try:
            match change:
                case Resize():
                    return self._resize(change, step)
                case Move(nodes):
                    return self._move(nodes, step)
                case Join():
                    return self._join(step)
                case Offer():
                    return self._take(change, step)
        except PlanError:  # the run continues unchanged
            self._fleet.accept_orders()
            raise

    def catch_up(self, step: int) -> Steps | None:
        """Bring the remaining replicas to the newest step that one of them has completed; see Transitions."""
        fleet, made = self._fleet, self._plans.made
        # If stages do not wait for one norm, one may have stepped while another still lacks gradients of that step.
        step_alone = made.flow is not None or made.plan.schedule.wiring.norm_per_stage
        if made.setup.lanes == 1 or self._shards or step_alone:
            return None
        self._settling = Laps()
        fleet.settle()
        self._settling.lap("settle")
        if len(fleet.in_use) != made.setup.num_workers:  # numbered for a plan whose links failed to open
            return None
        if not all(left(made.setup.homes, fleet.lost)) or (known := newest_common_step(fleet.reached(), step)) is None:
            return None
        newer, totals = known
        steps = fleet.undelivered_reports(newer - step, fleet.come_to(newer, totals))
        self._settling.lap("complete")
        # Without reports of a step there would be no record of it; reports are also missing after a driver was lost.
        return steps if len(steps) == newer - step and all(steps) else None

    def roll_back(self, steps: Collection[int]) -> Recovered:
        """Roll all stages back to the newest state that all of them can load; see Transitions.

        The state is that of in-memory copies of one of ``steps``, or else that of the newest checkpoint.
        """
        clock = Laps()
        fleet = self._fleet
        fleet.settle()
        clock.lap("settle")
        # Before workers are replaced, which takes a while: new workers have no copies.
        copies = self._copies(steps)
        made = self._lighter or self._plans.made
        replaced, lost = tuple[str, ...](), tuple[str, ...]()
        try:
            if (survivors := self._smaller_replicas()) is not None:
                lost, made = fleet.forget_lost(), survivors
            else:
                replaced = fleet.replace_lost(made.setup.num_workers)
        except PlanError as error:
            smaller = self._plan_for_fewer(error, made)
            if smaller is None:
                return self._stopped(clock)
            if smaller is made:  # workers have come meanwhile
                replaced = fleet.replace_lost(made.setup.num_workers)
            made = smaller
        clock.lap("replace")
        try:
            step, source, position = self._restore(made, copies)
        except PlanError as error:  # a worker was lost meanwhile, so that there are too few
            raise StageLostError(f"A worker was lost while the run recovered: {error}") from None
        except CheckpointError as error:  # storage may work at the next attempt
            raise StageLostError(f"The run could not roll back: {error}") from None
        self._lighter = None
        self.begin()
        clock.lap("restore")
        return self._result(step, source, clock, position=position, replaced=replaced, lost=lost)

    def regroup(self, step: int) -> Recovered:
        """Distribute micro-batches over the remaining replicas, after ``catch_up``; see Transitions."""
        fleet, clock = self._fleet, self._settling
        remaining = left(self._plans.made.setup.homes, fleet.lost)
        lost = fleet.forget_lost()
        if not all(remaining):
            raise StageLostError("Another worker was lost while the run went on without one.")
        made = self._plans.regrouped(tuple(map(len, remaining)))
        self._hand_over(made, step, linked=False)
        clock.lap("links")
        self._spares.refill()
        clock.lap("charter")
        return self._result(step, "replicas", clock, lost=lost)

    def _join(self, step: int) -> Recovered | None:
        """Turn spares into replicas of the stages that lack replicas; return None if no replica can be added."""
        fleet, homes, clock = self._fleet, self._plans.made.setup.homes, Laps()
        fleet.accept_orders()
        counts = with_spares(homes, self._plans.replicas, len(fleet.spares))
        if counts == counts_of(homes):
            return None
        if self._shards:  # all replicas partition their slices anew
            made, peers = self._plans.counted_anew(counts), None
        else:
            here = zip(groups_in(homes), counts, strict=True)
            made, peers = self._plans.regrouped(counts), [group[0] for group, count in here if count > len(group)]
        fleet.keep_copy(step, send=False, workers=peers)
        clock.lap("copy")
        self._hand_over(made, step, ready=True)
        clock.lap("links")
        self._spares.refill()
        clock.lap("charter")
        return self._result(step, "replicas", clock)

    def _smaller_replicas(self) -> PlanInForce | None:
        """Make a plan for the remaining replicas if the optimizer state is sharded over replicas; else return None.

        New processes join later. The result is None, too, if a stage has no replica left, if spares can replace all
        lost workers, if the number of workers may change, or if ``lighten`` has made a plan.
        """
        fleet, made = self._fleet, self._plans.made
        # A run that may change its number of workers chooses it itself; after running out of memory it has another.
        if not self._shards or self._growth is not None or self._lighter is not None:
            return None
        if len(fleet.in_use) != made.setup.num_workers or len(fleet.spares) >= len(fleet.lost):
            return None  # more workers were lost during recovery; or there are spares, or only links failed
        remaining = left(made.setup.homes, fleet.lost)
        return self._plans.counted_anew(tuple(map(len, remaining))) if all(remaining) else None

    @contextlib.contextmanager
    def growing(
        self, status: Callable[[], RunStatus], going: Callable[[], Mapping[str, float | None]]
    ) -> Iterator[None]:
        """Run the thread of Growth inside the context; do nothing for a run with a fixed number of workers.

        Args:
            status: returns the status of the run.
            going: returns the nodes that are about to go, with their deadlines; see DrainWatch.
        """
        if self._growth is None:
            yield
            return
        basis = self._blueprint.basis
        parameter_bytes = 4.0 * sum(basis.recipe.sizes.values())
        state_bytes = parameter_bytes * (1.0 + basis.request.optimizer_factor)
        self._growth.serve(self._plans.planned_for, state_bytes, status, going)
        with contextlib.closing(self._growth):
            yield

    def _resize(self, wanted: Resize, step: int) -> Recovered:
        """Change the number of workers: apply the plan in the request, or make one for the requested size."""
        if wanted.withdrawn:
            raise PlanError(wanted.withdrawn)
        clock, fleet, plans, planned = Laps(), self._fleet, self._plans, wanted.planned
        made = plans.resized(wanted.num_stages, wanted.num_replicas) if planned is None else plans.assembled(planned)
        clock.lap("plan")
        # A resize by the user waits for places; a run that grows by itself has its workers already.
        fleet.places.grow(made.setup.num_workers, PLACE_TIMEOUT_S if planned is None else None)
        clock.lap("workers")
        fleet.keep_copy(step, send=False)
        size = None
        if planned is None:
            size = RequestedSize(wanted.num_stages, made.setup.num_workers, made.plan.partition.replicas)
        self._hand_over(made, step, size=size)
        fleet.places.end_spares(keep=self._spares.count)
        clock.lap("move")
        return self._result(step, BETWEEN_STEPS, clock)

    def _move(self, nodes: Collection[str], step: int) -> Recovered | None:
        """Move stages away from these nodes (Ray's ids); return None if no worker is on them."""
        clock, fleet = Laps(), self._fleet
        fleet.places.end_spares(on=nodes)
        leaving = tuple(str(m.facts["host"]) for m in fleet.in_use if m.facts["node"] in nodes)
        if not leaving:
            fleet.accept_orders()
            return None
        made = self._plan_avoiding(nodes)
        clock.lap("workers")
        fleet.keep_copy(step)
        self._hand_over(made, step, without=nodes)
        fleet.places.end_spares(on=nodes)
        clock.lap("move")
        self._spares.refill()
        return self._result(step, BETWEEN_STEPS, clock, replaced=leaving)

    def _take(self, offer: Offer, step: int) -> Recovered:
        """Apply an offered partition of the stages."""
        clock, fleet, setup = Laps(), self._fleet, self._plans.made.setup
        if offer.generation != setup.generation:
            raise PlanError("The plan of the run is no longer the one for which the change was made.")
        made = self._plans.of_stages(len(setup.programs), setup.num_workers, offer.decision)
        clock.lap("plan")
        fleet.keep_copy(step, send=False)
        self._hand_over(made, step)
        clock.lap("move")
        return self._result(step, BETWEEN_STEPS, clock)

    def _result(self, step: int, source: str, clock: Laps, **fields: Any) -> Recovered:
        """Create the result of a transition.

        The result has the plan in force if the training loop does not have that plan yet. The plan may come from an
        earlier transition, which failed after it had configured the workers.

        Args:
            source: description of the place from which the state of ``step`` was read.
            clock: durations of the transition's phases.
            fields: further fields of Recovered.
        """
        fleet, made = self._fleet, self._plans.made
        plan, self._reported = None if made is self._reported else made, made
        return Recovered(
            step, source, seconds=clock.laps_s, stages=fleet.facts, plan=plan, moved_bytes=fleet.moved_bytes, **fields
        )

    def _plan_avoiding(self, nodes: Collection[str]) -> PlanInForce:
        """Start missing workers outside these nodes, and return the plan in force; if that fails, plan fewer workers.

        Raises:
            PlanError: workers cannot be started, and there is no plan for the workers on other nodes.
        """
        fleet, made = self._fleet, self._plans.made
        try:
            fleet.places.grow(fleet.places.living + max(0, made.setup.num_workers - len(fleet.places.staying(nodes))))
            if len(fleet.places.staying(nodes)) < made.setup.num_workers:
                raise PlanError("Only nodes that are about to go have room for other workers.")
            return made
        except PlanError as error:
            try:
                return self._planned_for(len(fleet.places.staying(nodes)), error)
            except StageError as impossible:
                raise PlanError(str(impossible)) from None

    def _copies(self, steps: Collection[int]) -> list[Copy]:
        """List the in-memory copies of ``steps`` on living workers; leave out copies made under unknown plans."""
        copies = []
        for actor, facts in self._fleet.copies():
            if num_stages := self._plans.num_stages(facts.generation):
                usable = tuple(step for step in facts.steps if step in steps)
                stage = facts.generation, num_stages, facts.stage
                copies.append(Copy((actor, facts), *stage, usable, facts.piece, facts.pieces))
        return copies

    def _transition(
        self, made: PlanInForce, living: Sequence[Living], copies: Sequence[Copy], saved: int | None = None
    ) -> Transition | None:
        """Choose members for plan ``made``, and the sources of their state; see ``plan_transition``.

        Args:
            saved: step of the newest checkpoint; None without a checkpoint, or if it must not be used.
        """
        current, wanted = (Layout(one.setup.generation, one.setup.homes) for one in (self._plans.made, made))
        return plan_transition(current, wanted, living, copies, saved)

    def _apply(self, made: PlanInForce, transition: Transition, sources: Sources | None = None) -> None:
        """Make members the workers of plan ``made``, which is in force from now on; see ``Fleet.configure``.

        Args:
            sources: sources from which all workers read their state. None for the copies of the transition, which are
                read by the members that cannot keep their state.
        """
        step, read = transition.step or 0, dict[int, Sources]()
        for worker, copies in transition.sources.items():
            read[worker] = [facts.remote(actor, step) for actor, facts in (copy.holder for copy in copies)]
        given = read if sources is None else sources
        self._fleet.configure(self._blueprint.setup, made.setup, given, transition.members)
        self._plans.made = made
        self._fleet.expect(made.predicted)

    def _hand_over(
        self,
        made: PlanInForce,
        step: int,
        *,
        size: RequestedSize | None = None,
        linked: bool = True,
        without: Collection[str] = (),
        ready: bool = False,
    ) -> None:
        """Apply a plan between two steps, with the state after ``step`` that workers or in-memory copies have.

        Args:
            size: size that the user requested, as a maximum for Growth and a target for Spares; None for other changes.
            linked, without, ready: see ``Fleet.living``.

        Raises:
            StageLostError: the state of ``step`` is lost; an older state is not used.
        """
        living = self._fleet.living(step, linked=linked, without=without, ready=ready)
        lost = f"A worker was lost, or does not answer, while the run changed its plan at step {step}."
        try:
            transition = self._transition(made, living, self._copies({step}))
        except PlanError:
            raise StageLostError(lost) from None
        if transition is None or transition.step != step:
            raise StageLostError(lost)
        try:
            self._apply(made, transition)
        except CheckpointError as error:
            raise StageLostError(f"The run could not change its plan: {error}") from None
        if size is not None:
            self._plans.requested = size
            self._spares.resized(size)
        self._keep_charter(made)

    def _plan_for_fewer(self, error: PlanError, made: PlanInForce) -> PlanInForce | None:
        """Make a plan for the remaining workers, or wait for more; return None if the run was stopped meanwhile.

        Args:
            error: reason why lost workers were not replaced, for messages.
            made: plan with all workers; it is returned once as many workers are there again.

        Raises:
            PlanError: too few workers came in time.
        """
        if self._growth is None:
            try:
                return self._planned_for(len(self._fleet.roster), error)
            except StageError:
                return made if self._waiting.for_workers(made.setup.num_workers) else None
        planned = self._growth.plan(self._plans.planned_for)
        return None if planned is None else self._plans.assembled(planned)

    def _stopped(self, clock: Laps) -> Recovered:
        """Return the result for a run that was stopped while it waited for workers: the last checkpoint's position."""
        self._fleet.in_use = []
        newest = find_checkpoint(self._blueprint.spec.place)[0]
        at, source = (
            (Position(), "nothing") if newest is None else (Position(**newest.manifest.position), newest.folder)
        )
        return Recovered(at.step, source, at, (), clock.laps_s, stopped=True)

    def _planned_for(self, workers: int, error: PlanError) -> PlanInForce:
        """Make a plan for ``workers`` workers: with fewer replicas if the run has replicas, else with fewer stages.

        Raises:
            StageError: no worker is left, or no such plan exists; the message includes ``error``.
        """
        if not workers:
            raise StageError(f"No worker of the run is left, and {error}")
        try:
            if self._plans.replicas:
                return self._plans.for_fewer(workers)
            if self._growth is not None:
                if workers < self._growth.least():
                    raise PlanError(f"num_workers requires {self._growth.least()} at least.")
                return self._plans.assembled(self._plans.planned_for(workers))
            each = max(1, len(self._plans.made.setup.programs) // self._plans.made.setup.num_workers)
            return self._plans.of_stages(workers * each, workers)
        except PlanError as impossible:
            raise StageError(f"{error} Nor can the run go on with the {workers} that are left: {impossible}") from None

    def _keep_charter(self, made: PlanInForce) -> None:
        """Store on every worker the inputs with which a later driver can resume the run with plan ``made``."""
        names = [name for name in sorted(self._tensors.names) if name not in self._blueprint.setup.persistent]
        blueprint = replace(self._blueprint, setup=None)  # type: ignore[arg-type]  # every worker has it
        charter = Charter(blueprint, made.planned, self._plans.requested, self.failures)
        self._fleet.keep_charter(ray.cloudpickle.dumps(charter), self._tensors, names)

    def _restore(self, made: PlanInForce, copies: Sequence[Copy]) -> tuple[int, str, Position | None]:
        """Apply plan ``made`` with the newest state that all workers can have.

        Returns:
            (steps done in that state, description of its source, position in the data). The position is None if the
            source is in-memory copies.

        Raises:
            StageError: there is neither a usable copy nor a checkpoint, and the initial tensors are lost.
        """
        fleet, place = self._fleet, self._blueprint.spec.place
        living = fleet.living(linked=False)
        transition = self._transition(made, living, copies, newest_step(place) if copies else None)
        assert transition is not None, "links are to be opened"
        if transition.step is not None:
            self._apply(made, transition)
            return transition.step, "copies in memory", None
        saved = find_checkpoint(place)[0]
        if saved is None:
            if not self._blueprint.setup.persistent <= set(self._tensors.names):
                known = [
                    f"stage {f.stage} of plan {f.generation} after steps {list(f.steps)}" for _, f in fleet.copies()
                ]
                steps = sorted({step for copy in copies for step in copy.steps})
                raise StageError(TENSORS_LOST.format(copies=", ".join(known) or "none", steps=steps))
            self._apply(made, transition, [self._tensors])
            return 0, "the parameters that the run began with", Position()
        self._apply(made, transition, [saved.folder, self._tensors])
        step = saved.manifest.step
        # Optimizer options that a new submission changed are only in later checkpoints.
        fleet.restore(saved.folder, fresh_options(place, step))
        why = lacking(copies)
        return step, f"{saved.folder}: {why}" if why else saved.folder, Position(**saved.manifest.position)
