"""DriverActor: owns the stages of one run and feeds them orders. No tensor ever passes through it.

    trainer --run(blueprint, plan) -----> DriverActor --orders--> StageActors
            --news(since) --------------->     |       <--reports---
            --stop(), checkpoint() ------>     |
            <-- records, status, outcome -     |        (3 KB per step of 4 stages and 16 micro-batches)

It makes the plan (runtime/run/planning.py), and holds all that another plan can be made from. The controller of the
schedule works in here too, see runtime/run/controller_thread.py.

It is named ``raypipe/<run>``. The stages belong to it and die with it; it belongs to whoever started it, or to
nobody when it is detached.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import ray

from raypipe.engine.metrics import part_before
from raypipe.engine.rundir import RunFolder
from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError
from raypipe.ir.report import StepRecord, StepReport
from raypipe.ir.timeline import Timeline
from raypipe.planner.control import ControllerDecision
from raypipe.runtime.driver.publish import Publisher
from raypipe.runtime.run.blueprint import Blueprint, assemble
from raypipe.runtime.run.journal import Journal, News
from raypipe.runtime.run.lease import Lease
from raypipe.runtime.run.loop import run_loop
from raypipe.runtime.run.planning import plan_for
from raypipe.runtime.run.requests import Requests
from raypipe.runtime.run.spec import Outcome, PlanInForce
from raypipe.runtime.workers.drain_watch import DrainWatch
from raypipe.runtime.workers.fleet import Fleet
from raypipe.runtime.workers.packing import StoredTensors
from raypipe.runtime.workers.places import Owner
from raypipe.runtime.workers.recovery import Recovery
from raypipe.runtime.workers.spares import Spares
from raypipe.runtime.workers.watch import Notice

__all__ = ["DriverActor", "driver_name"]

LINGER_S = 60.0
"""How long a detached driver answers after its run has ended."""


def driver_name(run: str) -> str:
    """The name under which Ray knows the driver of a run."""
    return f"raypipe/{run}"


class _DriverActor:
    def __init__(self, run: str, path: str, detached: bool) -> None:
        self._journal = Journal(run, path)
        self._requests = Requests()
        self._place: Place | None = None  # the run's folder, once it is known
        self._detached = detached
        self._independent = threading.Event()  # of whoever started the run
        self._kept: list[Any] = []  # copies of parameters that this process owns, until the stages have them
        self._predicted: Timeline | None = None

    def run(self, blueprint: Blueprint, tensors: StoredTensors, resources: Mapping[str, float]) -> None:
        """The whole run in one call; ``news`` tells how it goes and how it ended, and no stage is left after it.

        Args:
            tensors: initial parameters and buffers, of which workers fetch their own.
        """
        spec = blueprint.spec
        try:
            self._independent.set()
            self._place = spec.place
            with Lease.take(spec.place, spec.name, self._journal.begins) as lease:
                outcome = self._train(blueprint, tensors, resources, lease)
            self._journal.end(outcome, None)
        except Exception as error:  # noqa: BLE001  (told to everybody who asks)
            self._journal.end(None, error)
        self._independent.set()
        if self._detached:
            me = ray.get_runtime_context().current_actor
            threading.Thread(target=_leave, args=(me,), daemon=True).start()

    def _train(
        self,
        blueprint: Blueprint,
        tensors: StoredTensors,
        resources: Mapping[str, float],
        lease: Lease,
    ) -> Outcome:
        self._journal.begins("making the plan")
        spec, made = blueprint.spec, assemble(blueprint, plan_for(blueprint.basis))
        run, setup, plan = made
        self._predicted = plan.predicted
        count = len(setup.programs)
        stages = "1 stage" if count == 1 else f"{count} stages"
        self._journal.begins(f"waiting for the places and processes of {stages}")
        owner = Owner(driver_name(spec.name), lease.held.generation)
        fleet = Fleet(
            setup.num_workers, resources, run.transport, run.link_ports, owner,
            lease_s=run.driver_grace_s, tell=partial(self._tell, RunFolder(spec.place)),
        )  # fmt: skip
        if plan.predicted is not None:
            fleet.expect(max(span.end_s - span.start_s for span in plan.predicted.spans))
        journal = _Published(self._journal, Publisher(spec.name, setup.homes), plan)
        for note in fleet.notes:
            RunFolder(spec.place).event("warning", note)
        with contextlib.ExitStack() as stack:
            stack.callback(fleet.stop)
            self._journal.begins(
                f"sending {stages} their parameters and opening the links between them",
                stages=fleet.facts,
                num_steps=spec.num_steps,
            )
            fleet.configure(run, setup, [tensors])
            if not spec.max_failures:
                # The stages have them now. What no checkpoint holds, buffers that are not persistent, another plan
                # needs; and a run that survives failures may have to begin anew before its first checkpoint.
                tensors.let_go(run.persistent)
                self._kept.clear()
            # What was imported lives as long as this process. Full collections took 40 % of its processor time
            # (perf, two stages), on hosts where that may be a stage's.
            gc.collect()
            gc.freeze()
            while not self._requests.wait_checked(1.0):
                self._journal.begins("waiting for the check of the model, which runs where the run was started")
            self._journal.begins()
            offered = (spec.num_workers or 0) if spec.max_failures else 0
            spares = Spares(fleet, offered, RunFolder(spec.place).event)
            spares.refill()
            recovery = Recovery(fleet, blueprint, made, tensors, spares)
            drains = DrainWatch(lambda: fleet.nodes, self._requests.leave, RunFolder(spec.place).event)
            stack.callback(drains.close)
            return run_loop(fleet, spec, plan, journal, self._requests, lease=lease, recovery=recovery)
        raise AssertionError("unreachable: an ExitStack swallows nothing")

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
    def resize(self, num_stages: int, timeout_s: float) -> None:
        """Give the run a plan of so many stages; returns when it has it.

        Raises:
            PlanError: there is no such plan, or no place for it.
        """
        self._requests.resize(num_stages, timeout_s)

    @ray.method(concurrency_group="control")
    def predicted(self) -> Timeline | None:
        """The simulated timeline of one step."""
        return self._predicted


class _Published:
    """A journal whose steps Prometheus sees too.

    Args:
        plan: in force, for what is known before its first step.
    """

    def __init__(self, journal: Journal, publisher: Publisher, plan: PlanInForce) -> None:
        self._journal = journal
        self._publisher = publisher
        publisher.event("predicted_step_seconds", plan.predicted_step_s)
        publisher.event("generation", plan.plan.generation)
        if plan.retune is not None:
            publisher.event("group_size", plan.retune.choice.spec.group_size)
        self.resumed, self.tell = journal.resumed, journal.tell

    def planned(self, plan: PlanInForce) -> None:
        self._publisher.resized(plan.plan.schedule.wiring.homes)
        self._publisher.event("predicted_step_seconds", plan.predicted_step_s)
        self._publisher.event("generation", plan.plan.generation)

    def counted(self, metric: str, value: float = 1.0) -> None:
        self._publisher.event(metric, value)

    def step(self, record: StepRecord, reports: Sequence[StepReport]) -> None:
        self._journal.step(record, reports)
        self._publisher.step(record, reports)

    def decided(self, decision: ControllerDecision) -> None:
        self._journal.decided(decision)
        if decision.choice is not None:
            self._publisher.event("retunes")
            self._publisher.event("group_size", decision.choice.spec.group_size)


@ray.remote(num_cpus=0)
def _copy(packed: Any) -> Any:
    """The same object once more, which belongs to whoever asked for it."""
    return packed


def _leave(me: Any) -> None:
    """A detached driver belongs to nobody, so it ends itself."""
    time.sleep(LINGER_S)
    ray.kill(me, no_restart=True)


DriverActor = ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"control": 8})(_DriverActor)
