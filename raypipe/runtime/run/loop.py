"""The run as a loop over orders: the same for actors and for threads, so it imports no Ray.

newest checkpoint --> where to begin
orders --> fleet --> reports of all stages --> one StepRecord per step --> progress, metrics, run folder
   ^                        |
   +------- controller <-------+                  now and then, and at the end: a checkpoint
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

from raypipe.engine.checkpoint import Manifest, make_manifest
from raypipe.engine.norms import norm_of
from raypipe.engine.rundir import RunFolder
from raypipe.errors import CheckpointError
from raypipe.ir.report import StepRecord, StepReport, mean_loss, merge_reports
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import RowsKey, Segment
from raypipe.ir.timeline import Timeline
from raypipe.ir.work_order import Order
from raypipe.planner.control import ControllerConfig
from raypipe.planner.rows import rows_for
from raypipe.planner.segments import (
    Flow,
    Position,
    draining_segment,
    flowing_segments,
    next_segment,
)
from raypipe.runtime.run.checkpoints import Checkpoints
from raypipe.runtime.run.controller_thread import ActiveSettings, ControllerThread, step_done
from raypipe.runtime.run.forwards import evaluation_orders, forwards
from raypipe.runtime.run.lease import Lease
from raypipe.runtime.run.requests import Requests
from raypipe.runtime.run.resuming import beginning
from raypipe.runtime.run.spec import AnyFleet, Outcome, PlanInForce, RunSpec, Watcher

__all__ = ["run_loop"]

CONTROLLER = "controller.json"
METRICS_EVERY_S = 30.0
"""metrics.parquet is written anew this often: what a crash costs, against a file that grows with the run."""


def run_loop(
    fleet: AnyFleet,
    spec: RunSpec,
    plan: PlanInForce,
    watcher: Watcher,
    requests: Requests,
    make_controller: Callable[[ControllerConfig, str], ControllerThread] = ControllerThread,
    *,
    lease: Lease | None = None,
) -> Outcome:
    """Begin where the newest checkpoint ends, train, evaluate, save. Metrics are written whatever happens.

    Args:
        make_controller: called with ``plan.retune`` and the state that an earlier submission left, where that is
            wanted.
        lease: on the run's folder; None where nobody else can know of it.

    Raises:
        LeaseError: another process has taken the run over; nothing more is written then.
    """
    loop = _Loop(fleet, spec, plan, watcher, requests, make_controller, lease)
    try:
        outcome = loop.run()
    except BaseException as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if lease is None or not lease.lost:
            loop.try_to(lambda: loop.folder.event("fail", reason, step=loop.at.step))
            loop.try_to(lambda: loop.folder.write_metrics(loop.records))
        raise
    finally:
        loop.checkpoints.close()
        loop.end_retuning()
    loop.folder.write_metrics(loop.records)
    return outcome


class _Ordered(NamedTuple):
    """A segment that was ordered, the position after it, and what it runs with.

    ``counts`` is false for a step whose seconds say nothing of the next: the first, and those with a checkpoint.
    """

    segment: Segment
    after: Position
    setting: ActiveSettings = ActiveSettings()
    counts: bool = True


class _Loop:
    """One call of run_loop.

    Attributes:
        at: position after the last step that every stage has finished.
        records: of all steps of the run, those of earlier submissions included.
    """

    def __init__(
        self,
        fleet: AnyFleet,
        spec: RunSpec,
        plan: PlanInForce,
        watcher: Watcher,
        requests: Requests,
        make_controller: Callable[[ControllerConfig, str], ControllerThread],
        lease: Lease | None,
    ) -> None:
        self._lease = lease
        self.fleet, self.spec, self.watcher, self.requests = fleet, spec, watcher, requests
        self.plan = plan
        self._make_controller = make_controller
        self._controller: ControllerThread | None = None
        self._schedules = dict(plan.schedules)
        self.folder = RunFolder(spec.place)
        self.records: list[StepRecord] = []
        self.at = Position()
        self.checkpoints = Checkpoints(spec.place, fleet, spec.checkpoints, self._manifest, self._tell, lease)
        self._ordered: dict[int, _Ordered] = {}  # by first step: segments that have not ended
        self._calm = False  # whether the step that is ordered next is like the one before
        self._asked = False  # for a checkpoint that has not been ordered
        self._empty = True  # whether the pipeline runs nothing of the steps to come
        self._ends: dict[int, Position] = {}  # where the steps ended after which there is a checkpoint
        self._saving: set[int] = set()
        self._skipped = 0  # steps of this submission that were not finite
        self._saved = self._completed = 0  # steps after which a snapshot was taken last, and given a manifest
        self._trace_step = 0
        self._end_s: float | None = None
        self._written_s = time.monotonic()
        self._evaluated = 0
        self._complaint = ""  # of the last write that training does not need, where it failed

    def run(self) -> Outcome:
        spec, requests = self.spec, self.requests
        if self._lease is not None and self._lease.taken_from:
            self.folder.event("take over", f"{self._lease.taken_from} is dead or did not renew its lease")
        self._resume()
        self._begin_retuning()
        began_at = self._saved = self._completed = self.at.step
        self._trace_step = min(spec.num_steps - 1, began_at + max(2, (spec.num_steps - began_at) // 2))
        self.folder.write_plan(self.plan.plan.to_json())
        self.folder.write_config(spec.config_yaml)
        self.folder.event("start", "fit was called", step=began_at, num_steps=spec.num_steps, **self._signature())
        requests.serve(self.fleet)
        eval_loss: float | None = None
        if began_at >= spec.num_steps:  # nothing is left to do but to say how good it is
            eval_loss = self._evaluate() if self._evaluates_after(began_at) else None
        while self.at.step < spec.num_steps and not requests.stop_reason:
            self._train()
            if self._evaluates_after(self.at.step):
                eval_loss = self._evaluate()
                self._complete(eval_loss)
        if self._saved < self.at.step:  # stopped between two checkpoints
            self.fleet.save(self.checkpoints.begin(self.at.step))
        if self._completed < self.at.step:
            self._complete(None)
        self.checkpoints.finish(self.at.step)
        if self.at.step > began_at:
            measured = Timeline(tuple(self.fleet.spans()), "measured", name=spec.name)
            timelines = [found for found in (self.plan.predicted, measured) if found is not None]
            self.try_to(lambda: self.folder.write_timelines(timelines))
        self.end_retuning()
        stopped = requests.stop_reason if self.at.step < spec.num_steps else ""
        decision, reason = ("stop", stopped) if stopped else ("finish", "all steps done")
        self._tell(decision, reason, step=self.at.step, checkpoint=self.checkpoints.latest)
        return Outcome(eval_loss, self.checkpoints.latest, self.at.step, stopped)

    def _resume(self) -> None:
        """Go back to the newest good checkpoint of this run, if it has one."""
        spec = self.spec
        begins = beginning(spec, self.folder)
        found = begins.checkpoint
        if found is not None:
            self.fleet.restore(found.folder, begins.fresh)
            self.at = Position(**found.manifest.position)
            self.records = self.folder.read_metrics(before=self.at.step)
            self.checkpoints.latest = str(spec.place / found.folder)
            self.watcher.resumed(self.records, self.at.step, self.checkpoints.latest)
            self.folder.event("resume", f"from {found.folder}", step=self.at.step)
        begins.keep(spec)

    def _begin_retuning(self) -> None:
        """Where the controller of an earlier submission stood, with a run that has been trained before."""
        spec = self.spec
        if self.plan.retune is None:
            return
        known = self.at.step and spec.place.exists(CONTROLLER)
        state = spec.place.read_bytes(CONTROLLER).decode(errors="replace") if known else ""
        self._controller = self._make_controller(self.plan.retune, state)

    def end_retuning(self) -> None:
        """End the controller, once; what it has decided is told, and what it knows stays in the run's folder."""
        controller = self._controller
        if controller is not None:
            controller.close()
            self._hear(controller)
            self._keep(controller)
            self._controller = None

    def _keep(self, controller: ControllerThread) -> None:
        self.try_to(lambda: self.spec.place.write_bytes(CONTROLLER, controller.state.encode()))

    def _train(self) -> None:
        """Train to the end, to a stop, or to a checkpoint whose score is an evaluation."""
        self._calm = False
        self._follow(self.fleet.run(self._orders(), self._schedule))
        if not self._empty:  # stopped in the middle: what is under way is completed
            segment = draining_segment(self._flow(), self.spec.minibatch_size, self.spec.microbatch_size, self.at)
            after = self.at.after(segment, self.spec.num_samples["train"])
            segment = replace(segment, generation=self.plan.plan.generation)
            self._ordered[segment.first_step] = _Ordered(segment, after)
            self._follow(self.fleet.run(iter([Order(segment)]), self._schedule, last=True))

    def _follow(self, news: Iterator[list[list[StepReport]]]) -> None:
        for reports in news:
            if self._lease is not None:
                self._lease.check()
            segment, after, setting, counts = self._ordered.pop(self.at.step)
            for of_step in zip(*reports, strict=True):
                record = merge_reports(of_step, self._end_s, norm_of)
                if setting.choice is not None:
                    record = replace(record, schedule=setting.name)
                self._end_s = max(r.end_s for r in of_step)
                self.records.append(record)
                self.watcher.step(record, of_step)
                self._count_skipped(record)
                self._retune(record.seconds, of_step, setting, counts=counts)
            self.at = after
            self._empty = segment.phase.ends_empty
            if self.at.step in self._saving:
                self._saved = self.at.step
                if not self._evaluates_after(self.at.step):
                    self._complete(None)
            if time.monotonic() - self._written_s > METRICS_EVERY_S:
                self._write_metrics()

    def _count_skipped(self, record: StepRecord) -> None:
        if record.skipped:
            self._skipped += 1
            why = f"the loss is {record.loss:g} and the gradient norm {record.grad_norm:g}"
            self.try_to(lambda: self.folder.event("skip", why, step=record.step, skipped=self._skipped))

    def _retune(self, seconds: float, of_step: Sequence[StepReport], setting: ActiveSettings, *, counts: bool) -> None:
        """Tell the controller of a step, and hear what it has decided meanwhile."""
        if self._controller is not None:
            self._controller.told(step_done(seconds, setting, of_step, counts=counts))
            self._hear(self._controller)

    def _hear(self, controller: ControllerThread) -> None:
        """Tell everybody of what was decided; a change is kept at once, for the driver may die."""
        decisions = controller.decisions()
        for found in decisions:
            numbers = found.numbers
            if found.choice is not None and self.plan.retune is not None:
                numbers = {**numbers, "choice": self.plan.retune.name(found.choice)}
            self.try_to(partial(self.folder.event, found.verdict, found.reason, step=found.step, **numbers))
            self.watcher.decided(found)
        if any(found.choice is not None for found in decisions):
            self._keep(controller)
        if complaint := controller.take_complaint():
            self._tell("controller", complaint, step=self.at.step)

    def _orders(self) -> Iterator[Order]:
        spec = self.spec
        for unnumbered, after, setting in self._segments():
            segment = replace(unnumbered, generation=self.plan.plan.generation)
            self._asked = self._asked or self.requests.take_checkpoint()
            due = segment.phase.ends_empty and (
                after.step == spec.num_steps or self.checkpoints.due(after.step) or self._asked
            )
            if due:
                self._saving.add(after.step)
                self._asked = False
            save_to = self.checkpoints.begin(after.step) if due else ""
            traced = segment.first_step <= self._trace_step < after.step
            calm = not due and not traced
            self._ordered[segment.first_step] = _Ordered(segment, after, setting, counts=self._calm and calm)
            self._calm = calm
            measured = self._controller is not None
            yield Order(segment, keep_spans=traced, save_to=save_to, measure=measured, codecs=setting.codecs)
            if due and self._evaluates_after(after.step):
                return

    def _segments(self) -> Iterator[tuple[Segment, Position, ActiveSettings]]:
        """What comes next, the position after it, and what it runs with: the controller's word of that moment."""
        spec = self.spec
        if self.plan.flow is not None:
            flowing = flowing_segments(
                self.plan.flow,
                spec.num_samples["train"],
                spec.minibatch_size,
                spec.microbatch_size,
                spec.num_steps,
                self.at,
                empty_after=self.checkpoints.due_at,
                empty_soon=lambda: self._asked or self.requests.wants_checkpoint or self.checkpoints.overdue,
            )
            yield from ((segment, after, ActiveSettings()) for segment, after in flowing)
            return
        at = self.at
        while at.step < spec.num_steps:
            setting = self._controller.setting if self._controller is not None else ActiveSettings()
            count = setting.num_microbatches
            size = spec.microbatch_size if count is None else math.ceil(spec.minibatch_size / count)
            segment, at = next_segment(spec.num_samples["train"], spec.minibatch_size, size, at)
            yield segment if setting.spec is None else replace(segment, spec=setting.spec), at, setting

    def _flow(self) -> Flow:
        assert self.plan.flow is not None, "only an asynchronous schedule ends with micro-batches under way"
        return self.plan.flow

    def _evaluates_after(self, step: int) -> bool:
        """Whether an evaluation belongs to the checkpoint of ``step``: at the end, and where it is the score."""
        if "eval" not in self.spec.num_samples or self.requests.stop_reason:
            return False
        return step >= self.spec.num_steps or self.spec.checkpoints.score_attribute == "eval_loss"

    def _write_metrics(self) -> None:
        self._written_s = time.monotonic()
        self.try_to(lambda: self.folder.write_metrics(self.records))

    def _complete(self, eval_loss: float | None) -> None:
        self._write_metrics()  # first: a run that goes on from this checkpoint finds the steps before it here
        self._completed = self.at.step
        # Schedulers take as many steps again as updates were made, and a skipped one is none.
        self._ends[self.at.step] = replace(self.at, updates=self.at.updates - self._skipped)
        self.checkpoints.complete(self.at.step, self._metrics(eval_loss))

    def _evaluate(self) -> float | None:
        """Loss over the evaluation samples: each mini-batch's weighs as much as its items; sums are added up.

        None when the run was stopped meanwhile.
        """
        spec = self.spec
        sizes = spec.minibatch_size, spec.microbatch_size
        orders = evaluation_orders(
            spec.num_samples["eval"], *sizes, self._evaluated, generation=self.plan.plan.generation
        )
        self._evaluated += sum(len(order.segment.microbatch_samples) for order in orders)
        found = list(forwards(self.fleet, orders, self._schedule))
        if self.requests.stop_reason:
            return None
        return mean_loss(found, sums=spec.sums_losses)

    def _schedule(self, key: RowsKey) -> Schedule:
        if key not in self._schedules:
            self._schedules[key] = rows_for(self.plan.plan, key)
        return self._schedules[key]

    def _metrics(self, eval_loss: float | None) -> dict[str, float]:
        last = self.records[-1]
        found = {"loss": last.loss, "grad_norm": last.grad_norm}
        return found if eval_loss is None else {**found, "eval_loss": eval_loss}

    def try_to(self, write: Callable[[], None]) -> None:
        """Write what training does not need: a full disk is told and ends neither the run nor hides why it ended."""
        try:
            write()
        except CheckpointError as error:
            self._complaint = str(error)
            self.watcher.tell(message=self._complaint)
        else:
            if self._complaint:
                self._complaint = ""
                self.watcher.tell(message="")

    def _tell(self, decision: str, reason: str, **numbers: Any) -> None:
        self.try_to(lambda: self.folder.event(decision, reason, **numbers))
        self.watcher.tell(checkpoint=self.checkpoints.latest)

    def _signature(self) -> dict[str, Any]:
        return {} if self._lease is None else self._lease.signature()

    def _manifest(self, step: int, entries: list[dict[str, Any]], metrics: Mapping[str, float]) -> Manifest:
        spec = self.spec
        return make_manifest(
            step,
            entries,
            position=asdict(self._ends[step]),
            seed=spec.seed,
            minibatch_size=spec.minibatch_size,
            microbatch_size=spec.microbatch_size,
            num_samples=spec.num_samples["train"],
            aliases=spec.aliases,
            metrics=metrics,
            **self._signature(),
        )
