"""DriverActor: owns the stages of one run and feeds them orders. No tensor ever passes through it.

    trainer --run(blueprint, plan) -----> DriverActor --orders--> StageActors
            --news(since) --------------->     |       <--reports---
            --stop(), checkpoint() ------>     |
            <-- records, status, outcome -     |        (3 KB per step of 4 stages and 16 micro-batches)

It makes the plan (runtime/run/planning.py), and holds all that another plan can be made from. The controller of the
schedule works in here too, see runtime/run/controller_thread.py.

It is named ``raypipe/<run>``, and belongs to whoever started it, or to nobody when it is detached. It ends its stages
when it ends; when it is killed they wait a while for another driver of its name, which goes on with them.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray

from raypipe.engine.checkpoint import find_checkpoint, newest_step
from raypipe.engine.metrics import part_before
from raypipe.engine.rundir import RunFolder
from raypipe.engine.setup import RunSetup
from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError, LinkError, StageError, StageLostError
from raypipe.ir.timeline import Timeline
from raypipe.runtime.driver.departure import watching_drains
from raypipe.runtime.driver.publish import Published, Publisher, resident_bytes
from raypipe.runtime.driver.succession import (
    NOTHING_LEFT,
    Charter,
    Left,
    NotTakenOverError,
    Submission,
    continued,
    find_left,
    known_to_stages,
    term_left,
)
from raypipe.runtime.run.blueprint import Assembled, Blueprint, assemble
from raypipe.runtime.run.journal import Journal, News
from raypipe.runtime.run.later import first_plan
from raypipe.runtime.run.lease import Lease
from raypipe.runtime.run.loop import run_loop
from raypipe.runtime.run.meter import Meter
from raypipe.runtime.run.planning import plan_for
from raypipe.runtime.run.plans import wanted_workers
from raypipe.runtime.run.requests import Requests
from raypipe.runtime.run.resuming import stopped_at
from raypipe.runtime.run.spec import Outcome, PlanInForce, RunSpec, Watcher
from raypipe.runtime.run.takeover import Done
from raypipe.runtime.workers.fitting import fit_devices
from raypipe.runtime.workers.fleet import Fleet
from raypipe.runtime.workers.growth import Growth, growth_of
from raypipe.runtime.workers.packing import StoredTensors
from raypipe.runtime.workers.places import PREFIX, Owner, release_orphans
from raypipe.runtime.workers.recovery import Recovery
from raypipe.runtime.workers.roster import Member, shared_memory_notes
from raypipe.runtime.workers.spares import spares_of
from raypipe.runtime.workers.takeover import take_over, take_survivors
from raypipe.runtime.workers.watch import Notice

__all__ = ["DriverActor", "driver_name"]

LINGER_S = 60.0
"""How long a detached driver answers after its run has ended."""


def driver_name(run: str) -> str:
    """The name under which Ray knows the driver of a run."""
    return f"{PREFIX}{run}"


class _DriverActor:
    def __init__(self, run: str, path: str, detached: bool) -> None:
        self._name = driver_name(run)
        self._journal = Journal(run, path)
        self._requests = Requests()
        self._place: Place | None = None  # the run's folder, once it is known
        self._detached = detached
        self._independent = threading.Event()  # of whoever started the run
        self._kept: list[Any] = []  # copies of parameters that this process owns, until the stages have them
        self._predicted: Timeline | None = None
        self._meter: Meter | None = None
        self._again = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        if self._again:
            threading.Thread(target=self._live, args=(None,), name="raypipe run", daemon=True).start()

    def run(self, blueprint: Blueprint, tensors: StoredTensors, resources: Mapping[str, float]) -> None:
        """The whole run in one call; ``news`` tells how it goes and how it ended, and no stage is left after it.

        Args:
            tensors: initial parameters and buffers, of which workers fetch their own.
        """
        self._live(Submission(blueprint, tensors, resources))

    def _live(self, given: Submission | None) -> None:
        """The whole run.

        Args:
            given: by whoever started the run; None where Ray has started this driver again, which was given nothing.
        """
        try:
            self._independent.set()
            # Nobody is there to start a driver again that gives up: it waits for its folder, as long as its stages do.
            spec, grace_s = known_to_stages(self._name) if given is None else (given.blueprint.spec, 0.0)
            self._place = spec.place
            dead = term_left(self._name)
            with Lease.take(spec.place, spec.name, self._journal.begins, dead, grace_s / 2) as lease:
                outcome = self._train(given, lease)
            self._journal.end(outcome, None)
        except Exception as error:  # noqa: BLE001  (told to everybody who asks)
            self._journal.end(None, error)
        self._independent.set()
        if self._detached:
            me = ray.get_runtime_context().current_actor
            threading.Thread(target=_leave, args=(me,), daemon=True).start()

    def _train(self, given: Submission | None, lease: Lease) -> Outcome:
        """Go on with the stages of a driver that is gone, or begin with new ones."""
        owner = Owner(self._name, lease.held.generation)
        left = find_left(owner.name)
        if left is not None:
            self._journal.begins("taking over the stages of a driver that is gone")
            spec, asked = continued(given, left), self._requests
            if spec is None:  # they save a checkpoint, from which it goes on
                spec, asked = replace(left.charter.spec, callbacks=()), Requests()
                asked.stop("the run was submitted again with other settings")
            try:
                outcome = self._go_on(spec, left, given, owner, lease, asked)
                if asked is self._requests:
                    return outcome
            except NotTakenOverError as error:
                RunFolder(spec.place).event("not taken over", str(error))
        release_orphans(owner.name)
        if given is None:
            if left is None or not newest_step(left.charter.spec.place):
                raise StageError(NOTHING_LEFT)
            given = Submission(left.charter.blueprint(left.setup), left.tensors, left.charter.resources)
            self._requests.checked()
        return self._begin(given, owner, lease)

    def _begin(self, given: Submission, owner: Owner, lease: Lease) -> Outcome:
        """With new stages."""
        self._journal.begins("making the plan")
        blueprint, tensors, resources = given
        spec, planned = blueprint.spec, plan_for(blueprint.basis)
        made = assemble(blueprint, planned)
        run, setup, plan = made
        self._journal.begins(f"waiting for the places and processes of {_stages(made)}")
        fleet = self._fleet(0 if spec.workers else setup.num_workers, run, resources, owner, lease)
        try:
            growth = growth_of(fleet, spec, self._requests, self._journal.alert, lease)
            if growth is not None:
                first = growth.plan(partial(first_plan, blueprint.basis, planned))
                if first is None:
                    return stopped_at(spec, self._requests.stop_reason)
                planned, made = first, assemble(blueprint, first)
                run, setup, plan = made
            blueprint, fitted, members = fit_devices(fleet, blueprint, planned)
            if fitted is not planned:
                planned, made = fitted, assemble(blueprint, fitted)
                run, setup, plan = made
            for note in shared_memory_notes(fleet.members):
                RunFolder(spec.place).event("warning", note)
            self._journal.begins(
                f"sending {_stages(made)} their parameters and opening the links between them",
                stages=fleet.facts,
                num_steps=spec.num_steps,
            )
            fleet.configure(run, setup, self._sources(spec, tensors), members)
            if not spec.max_failures:
                # The stages have them now. What no checkpoint holds, buffers that are not persistent, another plan
                # needs; and a run that survives failures may have to begin anew before its first checkpoint.
                tensors.let_go(run.persistent)
                self._kept.clear()
            recovery = self._recovery(fleet, Charter.of(blueprint, planned, resources), made, tensors, growth)
            recovery.begin()
            while not self._requests.wait_checked(1.0):
                self._journal.begins("waiting for the check of the model, which runs where the run was started")
            return self._loop(fleet, spec, plan, recovery, lease, self._requests)
        finally:
            self._end(fleet, owner)

    def _sources(self, spec: RunSpec, tensors: StoredTensors) -> list[StoredTensors | str]:
        """Where new stages take their state; a driver that Ray has started again has not all that a run begins with."""
        newest = find_checkpoint(spec.place)[0] if self._again else None
        return [tensors] if newest is None else [newest.folder, tensors]

    def _go_on(
        self, spec: RunSpec, left: Left, given: Submission | None, owner: Owner, lease: Lease, requests: Requests
    ) -> Outcome:
        """With stages that another driver has left.

        Raises:
            NotTakenOverError: they cannot go on together; they have ended.
        """
        left.end_starting(owner.name)
        failures = left.charter.failures if given is None else 0  # a submission has its own
        charter = left.charter._replace(spec=spec, failures=failures)
        made = assemble(charter.blueprint(left.setup), charter.planned)
        fleet = self._fleet(len(left.roster), left.setup, charter.resources, owner, lease, left.roster)
        try:
            done: list[Done] = []
            lost = None
            try:
                done = take_over(fleet, made.run, made.setup, made.plan.rows, owner.term)
            except (StageError, LinkError) as error:
                if not spec.max_failures or requests is not self._requests:
                    raise NotTakenOverError(str(error)) from None
                lost = StageLostError(f"The driver of this run was lost, and not with it alone: {error}")
                take_survivors(fleet, made.run, made.setup, owner.term)
            self._journal.begins("", stages=fleet.facts, num_steps=spec.num_steps)
            growth = growth_of(fleet, spec, requests, self._journal.alert, lease, charter.asked)
            tensors = left.tensors if given is None else given.tensors
            recovery = self._recovery(fleet, charter, made, tensors, growth)
            if lost is None:
                recovery.begin()
            return self._loop(fleet, spec, made.plan, recovery, lease, requests, done, lost)
        finally:
            self._end(fleet, owner)

    def _fleet(
        self,
        count: int,
        run: RunSetup,
        resources: Mapping[str, float],
        owner: Owner,
        lease: Lease,
        roster: Sequence[Member] = (),
    ) -> Fleet:
        assert self._place is not None, "the run's folder is known before its stages"
        fleet = Fleet(
            count, resources, run.transport, run.link_ports, owner, roster,
            lease_s=run.driver_grace_s, tell=partial(self._tell, RunFolder(self._place)),
        )  # fmt: skip
        if run.worker_price_per_hour is not None:
            count_workers = lambda: len(fleet.roster)  # noqa: E731
            price, held = run.worker_price_per_hour, bool(roster)
            self._meter = Meter(self._place, price, count_workers, held=held, guard=lease.completing)
        return fleet

    def _end(self, fleet: Fleet, owner: Owner) -> None:
        """Of the stages, whether they came to train or not: what they cost is counted while they are there."""
        meter, self._meter = self._meter, None
        try:
            if meter is not None:
                meter.close()
        finally:
            fleet.stop()
            release_orphans(owner.name)  # a spare that was starting

    def _recovery(
        self, fleet: Fleet, charter: Charter, made: Assembled, tensors: StoredTensors, growth: Growth | None
    ) -> Recovery:
        """What brings the stages back."""
        wanted = wanted_workers(charter.basis.request, made.plan.plan, charter.asked)
        spares = growth or spares_of(fleet, charter.spec, wanted, self._requests.join)
        blueprint, planned = charter.blueprint(made.run), charter.planned
        return Recovery(
            fleet, blueprint, planned, made, tensors, spares, charter.packed, charter.asked, charter.failures
        )

    def _loop(
        self,
        fleet: Fleet,
        spec: RunSpec,
        plan: PlanInForce,
        recovery: Recovery,
        lease: Lease,
        requests: Requests,
        taken: Sequence[Done] = (),
        lost: StageLostError | None = None,
    ) -> Outcome:
        self._predicted = plan.predicted
        if plan.predicted is not None:
            fleet.expect(max(span.end_s - span.start_s for span in plan.predicted.spans))
        watcher: Watcher
        publishing: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if requests is self._requests:
            publisher = Publisher(spec.name, plan.plan.schedule.wiring.homes)
            resident = lambda: resident_bytes(fleet.roster)  # noqa: E731
            watcher = Published(self._journal, publisher, plan, spec.max_failures, resident, self._meter)
            publishing = contextlib.closing(watcher)
            self._journal.begins()
        else:  # it only saves a checkpoint; the run that follows tells everybody of these steps
            watcher = Journal(spec.name, str(spec.place))
        # What was imported lives as long as this process. Full collections took 40 % of its processor time
        # (perf, two stages), on hosts where that may be a stage's.
        gc.collect()
        gc.freeze()
        with watching_drains(fleet, spec, requests, self._journal.alert) as drains, contextlib.ExitStack() as inside:
            if requests is self._requests:  # what only saves a checkpoint asks for no workers
                inside.enter_context(recovery.growing(lambda: self._journal.status, lambda: drains.going))
            inside.enter_context(publishing)
            return run_loop(
                fleet, spec, plan, watcher, requests, lease=lease, recovery=recovery, taken=taken, lost=lost
            )
        raise AssertionError("unreachable: closing() swallows nothing")

    def _tell(self, folder: RunFolder, notice: Notice) -> None:
        """Everybody hears at once what happened to a stage, and events.jsonl keeps it."""
        numbers = {"seconds": round(notice.after_s, 3), "process": notice.process, "host": notice.host}
        self._journal.alert(notice.reason)
        with contextlib.suppress(CheckpointError):  # a full disk is told by those who need the folder
            folder.event(notice.means, notice.reason, worker=notice.worker, **numbers)

    @ray.method(concurrency_group="control")
    def news(self, since: int, wait_s: float) -> News:
        """Records number ``since`` and later, and where the run stands; see Journal."""
        return self._journal.news(since, wait_s)

    @ray.method(concurrency_group="control")
    def part_before(self, step: int) -> bytes | None:
        """The newest part of metrics.parquet with steps below ``step``; None where there is none."""
        return None if self._place is None else part_before(self._place, step)

    @ray.method(concurrency_group="control")
    def keep(self, packed: list[Any]) -> Any:
        """A copy of an object that belongs to this process, made by a task, so that no tensor passes through here.

        Args:
            packed: the reference, in a list, so that it is not resolved.
        """
        self._kept.append(_copy.remote(packed[0]))
        ray.wait(self._kept[-1:], fetch_local=False)
        return self._kept[-1]

    @ray.method(concurrency_group="control")
    def wait_started(self, wait_s: float) -> bool:
        """Whether the run has what it needs from the caller, so that it may leave."""
        return self._independent.wait(wait_s)

    @ray.method(concurrency_group="control")
    def go_on(self) -> None:
        """The model has been checked, so training may begin; without this word it waits."""
        self._requests.checked()

    @ray.method(concurrency_group="control")
    def stop(self, reason: str) -> None:
        """End after the segment that is running, with a checkpoint."""
        self._journal.stopping(reason)
        self._requests.stop(reason)

    @ray.method(concurrency_group="control")
    def checkpoint(self) -> None:
        """Save a checkpoint soon; the status tells when it is there."""
        self._requests.checkpoint()

    @ray.method(concurrency_group="control")
    def resize(self, num_stages: int, timeout_s: float, num_replicas: int | tuple[int, ...] | None = None) -> None:
        """Give the run a plan of so many stages; returns when it has it.

        Raises:
            PlanError: there is no such plan, or no place for it.
        """
        self._requests.resize(num_stages, timeout_s, num_replicas=num_replicas)

    @ray.method(concurrency_group="control")
    def predicted(self) -> Timeline | None:
        """The simulated timeline of one step."""
        return self._predicted


def _stages(made: Assembled) -> str:
    count = len(made.setup.programs)
    return "1 stage" if count == 1 else f"{count} stages"


@ray.remote(num_cpus=0)
def _copy(packed: Any) -> Any:
    """The same object once more, which belongs to whoever asked for it."""
    return packed


def _leave(me: Any) -> None:
    """A detached driver belongs to nobody, so it ends itself."""
    time.sleep(LINGER_S)
    ray.kill(me, no_restart=True)


DriverActor = ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"control": 8})(_DriverActor)
