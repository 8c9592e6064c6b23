"""DriverActor: the Ray actor that owns the stages of one run and sends them commands. No tensor passes through it.

    trainer --run(submission) ----------> DriverActor --commands--> StageActors
            --news(since) --------------->     |       <--reports----
            --stop(), checkpoint() ------>     |
            <-- records, status, outcome -     |        (3 KB per step of 4 stages and 16 micro-batches)

The submission has the plan, and all data for making another one (run/plans/planning.py). The controller that adapts the
schedule runs in the actor too, see run/controller_thread.py.

The actor's name is ``raypipe/<run>``. Unless the actor is detached, it ends with the process that started it. The
driver ends its stages when the run ends. If the driver is killed, its stages wait for driver_grace_s for another driver
of this name, which takes them over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray
import torch
from ray.util.annotations import RayDeprecationWarning

from raypipe.engine.io.run_files import part_before
from raypipe.engine.io.storage import Place
from raypipe.errors import LinkError, PlanError, StageError, StageLostError
from raypipe.ir.plan import Plan
from raypipe.ir.timeline import Timeline
from raypipe.run.generate_loop import Generation
from raypipe.run.journal import Journal, News
from raypipe.run.lease import Lease
from raypipe.run.loop import LoopSetup, run_loop
from raypipe.run.plans.blueprint import Blueprint, Charter, assemble
from raypipe.run.plans.later import Offered, first_plan, within
from raypipe.run.plans.plans import wanted_workers
from raypipe.run.reporting import Reporter
from raypipe.run.requests import Requests
from raypipe.run.same_run import stopped_at
from raypipe.run.spec import Outcome, PlanInForce, Planned, RunSpec, Watcher
from raypipe.run.spending import Meter
from raypipe.run.stage_changes import Failures
from raypipe.runtime.driver.driver_failover import (
    NOTHING_LEFT,
    Left,
    Submission,
    continued,
    find_left,
    known_to_stages,
    term_left,
    watching_drains,
)
from raypipe.runtime.driver.publish import Published, Publisher, resident_bytes
from raypipe.runtime.fleet.fleet import Fleet
from raypipe.runtime.fleet.growth import Growth, growth_of, spares_of
from raypipe.runtime.fleet.recovery import Recovery
from raypipe.runtime.fleet.roster import Member, Terms, shared_memory_notes
from raypipe.runtime.fleet.waiting import Waiting
from raypipe.runtime.fleet.watch import MemberEvent
from raypipe.runtime.worker.packing import StoredTensors
from raypipe.runtime.worker.places import PREFIX, Owner, release_orphans
from raypipe.runtime.worker.stage_process import enter

LOST = "the driver of this run was lost"
LINGER_S = 60.0
"""Seconds for which a detached driver still answers calls after its run has ended."""
FOLDER_SHARE = 0.5
"""Maximum wait of a restarted driver for the lease of the run's folder, as a share of driver_grace_s. The driver waits,
because Ray does not restart a driver that gave up. The share is below 1, because the stages must outlive the wait.
"""


def driver_name(run: str) -> str:
    """Return the name under which Ray knows the driver actor of this run."""
    return f"{PREFIX}{run}"


class _DriverActor:
    def __init__(self, run: str, path: str, detached: bool, folder: str) -> None:
        enter(folder)
        self._name = driver_name(run)
        self._journal = Journal(run, path)
        self._requests = Requests()
        self._place: Place | None = None  # the run's folder, once it is known
        self._event: Callable[..., None]  # appends to its events.jsonl; a full disk is an alert
        self._detached = detached
        self._independent = threading.Event()  # set once the process that started the run may end
        self._kept: list[Any] = []  # copies of parameters that this process owns, until the stages have them
        self._meter: Meter | None = None
        with warnings.catch_warnings():  # this property of Ray calls deprecated ones
            warnings.simplefilter("ignore", RayDeprecationWarning)
            again = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        if again:
            threading.Thread(target=self._live, args=(None,), name="raypipe run", daemon=True).start()

    def run(self, submission: Submission) -> None:
        """Execute the whole run, and end its stages; progress, outcome and errors are returned by ``news``."""
        self._live(submission)

    def _live(self, submission: Submission | None) -> None:
        """Take the lease of the run's folder, train, and put the outcome or the error into the journal.

        Args:
            submission: None in a driver that Ray has restarted, which reads its inputs from living stages.
        """
        try:
            self._independent.set()
            # A restarted driver that gives up is not restarted again: it waits for its folder, half as long as stages.
            known = known_to_stages(self._name) if submission is None else submission.charter.blueprint
            spec, grace_s = known.spec, known.setup.driver_grace_s if submission is None else 0.0
            self._place = spec.place
            self._event = Reporter(replace(spec, callbacks=()), self._journal).log
            dead = term_left(self._name)
            with Lease.take(spec.place, spec.name, self._journal.begins, dead, FOLDER_SHARE * grace_s) as lease:
                outcome = self._train(submission, lease)
            self._requests.end()  # here too: the loop, which ends them, may not have begun
            self._journal.end(outcome, None)
        except Exception as error:  # noqa: BLE001  (clients get it with the news)
            self._requests.end()
            self._journal.end(None, error)
        self._independent.set()
        if self._detached:
            me = ray.get_runtime_context().current_actor
            threading.Thread(target=_leave, args=(me,), daemon=True).start()

    def _train(self, submission: Submission | None, lease: Lease) -> Outcome:
        """Train the run, on the stages of a lost driver if there are any, else on new stages; return the outcome.

        Stages of a lost driver continue from their in-memory copies. In two cases, new stages replace them and resume
        from the newest checkpoint: if the submission has other settings (the old stages first save a checkpoint), or if
        max_failures is 0, so that stages have no copies.

        Args:
            submission: None in a driver that Ray has restarted, which cannot start new stages.
            lease: this driver's lease on the run (run/lease.py).

        Raises:
            StageError: the stages of the lost driver could not be taken over, or none can continue and there is no
                submission. LinkError and PlanError are raised too if they prevent the takeover.
            ConfigError: the submission has other settings, without resume=True.
        """
        owner = Owner(self._name, lease.held.generation)
        left = find_left(owner.name)
        if left is not None:
            self._journal.begins("taking over the stages of a driver that is gone")
            before = left.charter.blueprint.spec
            spec, requests = continued(submission, left), self._requests
            if spec is None:  # the stages save a checkpoint, from which the run resumes
                spec, requests = replace(before, callbacks=()), Requests()
                requests.stop("the run was submitted again with other settings")
            try:
                if not before.max_failures:
                    raise StageError("With FailureConfig(max_failures=0) stages keep no copies of their state.")
                outcome = self._go_on(spec, left, submission, owner, lease, requests)
                if requests is self._requests:
                    return outcome
            except (StageError, LinkError, PlanError) as error:
                if before.max_failures and requests is self._requests:
                    raise
                self._event("not taken over", f"{error} The run goes on from its newest checkpoint.")
        release_orphans(owner.name)
        if submission is None:
            raise StageError(NOTHING_LEFT)
        return self._begin(submission, owner, lease)

    def _begin(self, submission: Submission, owner: Owner, lease: Lease) -> Outcome:
        """Start stages, wait for them, send them their state, and train until the run ends."""
        charter, tensors = submission
        blueprint, planned, spec = charter.blueprint, charter.planned, charter.blueprint.spec
        self._journal.begins(f"waiting for the places and processes of {_stages(planned.plan)}")
        fleet = self._fleet(blueprint, owner, lease)
        try:
            waiting = self._waiting(fleet, blueprint, lease, self._requests)
            growth = growth_of(fleet, spec, self._requests, waiting, self._event)
            failures = Failures(spec.max_failures)
            while True:
                try:
                    started = self._start(fleet, submission, waiting, growth)
                    break
                except (StageLostError, LinkError) as error:
                    if not failures.survivable(error):
                        raise
                    if not fleet.drop_lost() and isinstance(error, LinkError):  # links that cannot be opened at all
                        raise
                    if why_not := failures.counted(error, 0):
                        raise type(error)(f"{error}\nThe run ends: {why_not}.") from None
                    reason = f"{str(error).splitlines()[0]} Missing workers are started again."
                    self._event("failure", reason, step=0, failures=failures.count)
            if started is None:
                return stopped_at(spec, self._requests.stop_reason)
            blueprint, planned, made = started
            # Of members in use, by worker; before, of all in the roster's order.
            self._journal.update(stages=fleet.facts)
            if not spec.max_failures:
                # The stages have the tensors now. Another plan still needs those that are in no checkpoint (buffers
                # that are not persistent); a run that survives failures may begin anew before its first checkpoint.
                tensors.let_go(blueprint.setup.persistent)
                self._kept.clear()
            charter = Charter(blueprint, planned, failures=failures.count)
            recovery = self._recovery(fleet, charter, made, tensors, growth, waiting)
            recovery.begin()
            while not self._requests.wait_checked(1.0):
                self._journal.begins("waiting for the check of the model, which runs where the run was started")
            return self._loop(fleet, spec, made, recovery, lease, self._requests)
        finally:
            self._end(fleet, owner)

    def _start(
        self, fleet: Fleet, submission: Submission, waiting: Waiting, growth: Growth | None
    ) -> tuple[Blueprint, Planned, PlanInForce] | None:
        """Wait for workers, and make them the stages of a plan that fits their devices; None if the run was stopped.

        Raises:
            StageLostError, LinkError: a worker was lost meanwhile; the call may be repeated after ``fleet.drop_lost``.
        """
        blueprint, planned = submission.charter.blueprint, submission.charter.planned
        first: Planned | None = planned
        if growth is not None:
            first = growth.plan(partial(first_plan, blueprint.basis, planned))
        elif not waiting.for_workers(planned.plan.schedule.num_workers):
            first = None
        fitted = None if first is None else fit_devices(fleet, blueprint, first, waiting, self._event)
        if fitted is None:
            return None
        blueprint, planned, members = fitted
        made = assemble(blueprint, planned)
        for note in shared_memory_notes(fleet.members):
            self._event("warning", note)
        self._journal.begins(
            f"sending {_stages(planned.plan)} their parameters and opening the links between them",
            stages=fleet.facts,
            num_steps=blueprint.spec.num_steps,
        )
        fleet.configure(blueprint.setup, made.setup, [submission.tensors], members)
        return blueprint, planned, made

    def _go_on(
        self, spec: RunSpec, left: Left, submission: Submission | None, owner: Owner, lease: Lease, requests: Requests
    ) -> Outcome:
        """Adopt the stages that a lost driver has left, roll them back to their in-memory copies, and train on.

        Args:
            spec: settings of the run from now on.
            left: state of the lost driver.
            submission: new submission of the run, whose count of failures begins at 0; None in a restarted driver.
            requests: requests of clients; a separate object with a request to stop, if stages only save a checkpoint.
        """
        left.end_starting(owner.name)
        failures = left.charter.failures if submission is None else 0  # a new submission counts anew
        blueprint = replace(left.charter.blueprint, spec=spec)
        charter = left.charter._replace(blueprint=blueprint, failures=failures)
        made = assemble(blueprint, charter.planned)
        fleet = self._fleet(blueprint, owner, lease, left.roster)
        try:
            fleet.adopt(blueprint.setup, made.setup)
            lost = StageError(LOST)
            if fleet.lost:
                lost = StageLostError(f"{LOST}, and {len(fleet.lost)} of {made.setup.num_workers} workers with it")
            self._journal.begins("", num_steps=spec.num_steps)
            waiting = self._waiting(fleet, blueprint, lease, requests)
            growth = growth_of(fleet, spec, requests, waiting, self._event, charter.requested)
            tensors = left.tensors if submission is None else submission.tensors
            recovery = self._recovery(fleet, charter, made, tensors, growth, waiting)
            return self._loop(fleet, spec, made, recovery, lease, requests, lost)
        finally:
            self._end(fleet, owner)

    def _fleet(self, blueprint: Blueprint, owner: Owner, lease: Lease, roster: Sequence[Member] = ()) -> Fleet:
        run = blueprint.setup
        terms = Terms(
            blueprint.resources, run.transport, run.link_ports, owner, run.driver_grace_s, folder=run.working_folder
        )
        fleet = Fleet(len(roster), terms, roster, self._on_event)
        if run.worker_price_per_hour is not None:
            assert self._place is not None, "the run's folder is known before its stages"
            count_workers = lambda: len(fleet.roster)  # noqa: E731
            price, held = run.worker_price_per_hour, bool(roster)
            self._meter = Meter(self._place, price, count_workers, held=held, guard=lease.completing)
        return fleet

    def _waiting(self, fleet: Fleet, blueprint: Blueprint, lease: Lease, requests: Requests) -> Waiting:
        """Create the Waiting of this run; its waits end with an error if another driver takes the run's folder."""
        patience, spec = blueprint.pipeline.resource_timeout_s, blueprint.spec
        if patience == "auto" and spec.workers is not None:  # the run is configured for workers that come and go
            patience = None
        return Waiting(fleet, requests, self._journal.waits, self._event, patience, lease.check)

    def _end(self, fleet: Fleet, owner: Owner) -> None:
        """Close the meter of the run's cost, then end all stages, including those that are still starting."""
        meter, self._meter = self._meter, None
        try:
            if meter is not None:
                meter.close()
        finally:
            fleet.stop()
            release_orphans(owner.name)  # a spare that was starting

    def _recovery(
        self,
        fleet: Fleet,
        charter: Charter,
        made: PlanInForce,
        tensors: StoredTensors,
        growth: Growth | None,
        waiting: Waiting,
    ) -> Recovery:
        """Create the Recovery of this run.

        Args:
            made: plan in force, assembled.
            growth: starts workers in a run that may change their number. None for a fixed number of workers; Spares are
                then created instead.
        """
        blueprint = charter.blueprint
        wanted = wanted_workers(blueprint.basis.request, made.plan, charter.requested)
        spares = growth or spares_of(fleet, blueprint.spec, wanted, self._requests.join, self._event)
        return Recovery(fleet, charter, made, tensors, spares, waiting)

    def _loop(
        self,
        fleet: Fleet,
        spec: RunSpec,
        plan: PlanInForce,
        recovery: Recovery,
        lease: Lease,
        requests: Requests,
        lost: StageError | None = None,
    ) -> Outcome:
        self._journal.planned(plan)
        # If it only saves a checkpoint, the run that follows reports these steps, and may grow.
        watcher: Watcher = Journal(spec.name, str(spec.place))
        # Imported modules live as long as this process. Full collections of them took 40 % of its processor time
        # (perf, two stages), which stages may need.
        gc.collect()
        gc.freeze()
        with (
            watching_drains(fleet, spec, requests, partial(self._journal.alert, "node goes"), self._event) as drains,
            contextlib.ExitStack() as inside,
        ):
            if requests is self._requests:
                inside.enter_context(recovery.growing(lambda: self._journal.status, lambda: drains.going))
                publisher = Publisher(spec.name, plan.plan.schedule.wiring.homes)
                resident = lambda: resident_bytes(fleet.roster)  # noqa: E731
                published = Published(self._journal, publisher, plan, spec.max_failures, resident, self._meter)
                watcher = inside.enter_context(contextlib.closing(published))
                self._journal.begins()
            setup = LoopSetup(fleet, spec, plan, watcher, requests, lease=lease, recovery=recovery, lost=lost)
            return run_loop(setup)
        raise AssertionError("unreachable: closing() swallows nothing")

    def _on_event(self, event: MemberEvent) -> None:
        """Send an alert that a worker is lost or slow to all clients, and record the event in events.jsonl."""
        numbers = {"seconds": round(event.after_s, 3), "process": event.process, "host": event.host}
        name = "a spare worker" if event.worker is None else f"worker {event.worker}"
        self._journal.alert(f"{name}: {event.failure}", event.reason)
        self._event(event.failure, event.reason, worker=event.worker, **numbers)

    @ray.method(concurrency_group="control")
    def news(self, since: int, wait_s: float) -> News:
        """Return the records from number ``since`` on, and the status of the run; see Journal.news."""
        return self._journal.news(since, wait_s)

    @ray.method(concurrency_group="control")
    def part_before(self, step: int) -> bytes | None:
        """Return the bytes of the newest part of metrics.parquet with steps below ``step``; None without a part."""
        return None if self._place is None else part_before(self._place, step)

    @ray.method(concurrency_group="control")
    def keep(self, packed: list[Any]) -> Any:
        """Copy an object of Ray's store, so that it outlives its first owner; return the reference to the copy.

        A task makes the copy, so that no tensor passes through this process.

        Args:
            packed: list of one reference to the object; Ray does not resolve references inside a list.
        """
        self._kept.append(_copy.remote(packed[0]))
        ray.wait(self._kept[-1:], fetch_local=False)
        return self._kept[-1]

    @ray.method(concurrency_group="control")
    def wait_started(self, wait_s: float) -> bool:
        """Wait until the run no longer needs the process that started it; return False on timeout."""
        return self._independent.wait(wait_s)

    @ray.method(concurrency_group="control")
    def go_on(self) -> None:
        """Let training begin; the client calls this after its check of the model has passed."""
        self._requests.checked()

    @ray.method(concurrency_group="control")
    def stop(self, reason: str) -> None:
        """Request that the run saves a checkpoint and stops after the mini-batches in progress.

        Args:
            reason: text for the status and the outcome.
        """
        self._journal.stopping(reason)
        self._requests.stop(reason)

    @ray.method(concurrency_group="control")
    def checkpoint(self) -> None:
        """Request a checkpoint; the status shows when it is complete."""
        self._requests.checkpoint()

    @ray.method(concurrency_group="control")
    def resize(self, num_stages: int, timeout_s: float, num_replicas: int | tuple[int, ...] | None = None) -> None:
        """Change the number of stages or replicas, and return when the new plan is in force.

        Args:
            timeout_s: maximum seconds to wait; see Requests.resize.
            num_replicas: replicas per stage, one number for all stages or one for each; None for the configured number.

        Raises:
            PlanError: no such plan exists, there are not enough workers for it, or the wait timed out.
        """
        self._requests.resize(num_stages, timeout_s, num_replicas=num_replicas)

    @ray.method(concurrency_group="text")
    def generate(self, generation: Generation, timeout_s: float) -> torch.Tensor:
        """Generate text on the stages between two steps, and return its tokens; see Requests.generate."""
        return self._requests.generate(lambda: generation, timeout_s)

    @ray.method(concurrency_group="control")
    def predicted(self) -> Timeline | None:
        """Return the simulated timeline of one step of the plan in force; None if the plan has no predicted times."""
        return self._journal.predicted


def _stages(plan: Plan) -> str:
    count = plan.partition.num_stages
    return "1 stage" if count == 1 else f"{count} stages"


@ray.remote(num_cpus=0)
def _copy(packed: Any) -> Any:
    """Return the argument unchanged: Ray stores it as a new object, owned by the process that called this task."""
    return packed


def _leave(me: Any) -> None:
    """End a detached driver (actor ``me``) LINGER_S seconds after its run; until then clients can fetch the outcome."""
    time.sleep(LINGER_S)
    ray.kill(me, no_restart=True)


GROUPS = {"control": 8, "text": 4}
"""Number of threads by concurrency group. Generations wait for minutes, and must not keep a stop waiting."""

DriverActor = ray.remote(num_cpus=0, max_restarts=0, concurrency_groups=GROUPS)(_DriverActor)


NO_KERNELS = (
    "{where} has no CuPy, so the processor encodes and decodes what stages send, and more bytes are copied: "
    "pip install 'raypipe[cuda13]' (or raypipe[cuda12]) there."
)


def fit_devices(
    fleet: Fleet, blueprint: Blueprint, planned: Planned, waiting: Waiting, event: Callable[..., None]
) -> tuple[Blueprint, Planned, tuple[int, ...] | None] | None:
    """Make a plan that fits the memory of the fleet's devices; wait for more workers if the plan needs more.

    Args:
        planned: plan that is kept if it fits.
        event: called with (decision, reason, ...) to record an event of the run.

    Returns:
        (blueprint, plan, indices into ``fleet.roster`` of workers 0, 1, ..., or None for the roster's order); None if
        the run was stopped.

    Raises:
        PlanError: no plan fits, or too few workers came in time.
    """
    if blueprint.pipeline.codec_forward != "none" or blueprint.pipeline.codec_backward != "none":
        for where in sorted({f"{facts['device']} on {facts['host']}" for facts in fleet.members if not facts["codes"]}):
            event("warning", NO_KERNELS.format(where=where))
    offered = [Offered(facts["device"], facts["device_bytes"]) for facts in fleet.members]
    fit = within(blueprint.basis, planned, offered)
    if fit.basis is not blueprint.basis:
        blueprint = dataclasses.replace(blueprint, basis=fit.basis)
    if fit.why:
        event("fit the devices", fit.why)
        if not waiting.for_workers(fit.planned.plan.schedule.num_workers):
            return None
    return blueprint, fit.planned, fit.members
