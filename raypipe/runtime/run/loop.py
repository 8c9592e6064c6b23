"""The run as a loop over orders: the same for actors and for threads, so it imports no Ray.

newest checkpoint --> where to begin
orders --> fleet --> reports of all stages --> one StepRecord per step --> progress, metrics, run folder
   ^                        |
   +------- controller <-------+                  now and then, and at the end: a checkpoint
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from raypipe.engine.checkpoint import FreshOptions, Manifest, make_manifest
from raypipe.engine.metrics import MetricsWriter
from raypipe.engine.norms import norm_of
from raypipe.engine.rundir import RunFolder
from raypipe.errors import LinkError, PlanError, RaypipeError, StageError
from raypipe.ir.report import StepRecord, StepReport, mean_loss, merge_reports
from raypipe.ir.timeline import Timeline
from raypipe.planner.control import ControllerConfig
from raypipe.planner.segments import Position
from raypipe.runtime.run.checkpoints import Checkpoints
from raypipe.runtime.run.control import Control
from raypipe.runtime.run.controller_thread import ControllerThread
from raypipe.runtime.run.forwards import evaluation_orders, forwards
from raypipe.runtime.run.lease import Lease
from raypipe.runtime.run.notes import Notes
from raypipe.runtime.run.ordering import Ordering
from raypipe.runtime.run.recovery import Failures, Recovered, Recoverer, noticed
from raypipe.runtime.run.requests import Requests
from raypipe.runtime.run.resuming import beginning, left_at
from raypipe.runtime.run.spec import AnyFleet, Outcome, PlanInForce, RunSpec, Watcher
from raypipe.runtime.run.takeover import Done

__all__ = ["run_loop"]

MOST_MARKS = 8


def run_loop(
    fleet: AnyFleet,
    spec: RunSpec,
    plan: PlanInForce,
    watcher: Watcher,
    requests: Requests,
    make_controller: Callable[[ControllerConfig, str], ControllerThread] = ControllerThread,
    *,
    lease: Lease | None = None,
    recovery: Recoverer | None = None,
    taken: Sequence[Done] = (),
) -> Outcome:
    """Begin where the newest checkpoint ends, train, evaluate, save. Metrics are written whatever happens.

    Args:
        make_controller: called with ``plan.retune`` and the state that an earlier submission left, where that is
            wanted.
        lease: on the run's folder; None where nobody else can know of it.
        recovery: brings the stages back after a failure; None where they cannot fail by themselves, as threads.
        taken: what stages have done for an earlier driver, from which they were taken over where they stand.

    Raises:
        LeaseError: another process has taken the run over; nothing more is written then.
    """
    loop = _Loop(fleet, spec, plan, watcher, requests, make_controller, lease, recovery)
    try:
        outcome = loop.run(taken)
    except BaseException as error:
        reason, when = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", noticed(error)
        if lease is None or not lease.lost:
            loop.notes.event("fail", reason, step=loop.at.step, **when)
            loop.notes.try_to(loop.metrics.write)
        raise
    finally:
        requests.end()
        loop.checkpoints.close()
        loop.control.end()
    loop.metrics.write()
    return outcome


class _Loop:
    """One call of run_loop.

    Attributes:
        at: position after the last step that every stage has finished.
        metrics: records of the steps, those of earlier submissions included.
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
        recovery: Recoverer | None,
    ) -> None:
        self._lease, self._recovery = lease, recovery
        self.fleet, self.spec, self.watcher, self.requests = fleet, spec, watcher, requests
        self.plan = plan
        self.folder = RunFolder(spec.place)
        self.notes = Notes(self.folder, watcher)
        self.control = Control(make_controller, self.folder, watcher, self.notes.try_to)
        self._failures = Failures(spec.max_failures)
        self.metrics = MetricsWriter(spec.place)
        self.at = Position()
        self.checkpoints = Checkpoints(spec.place, fleet, spec.checkpoints, self._manifest, self._tell, lease)
        self._ordering = Ordering(spec, plan, self.checkpoints, self.control, requests, self._evaluates_after)
        self._empty = True  # whether the pipeline runs nothing of the steps to come
        self._skipped = 0  # steps of this submission that were not finite
        self._saved = self._completed = 0  # steps after which a snapshot was taken last, and given a manifest
        self._eval_loss: float | None = None
        self._eval_step, self._copied = -1, False  # of the last evaluation; whether all have a copy of the beginning
        self._began_at, self._fresh = 0, FreshOptions()
        self._marks: dict[int, tuple[Position, int]] = {}  # by step of a copy: where the run stood, steps skipped
        self._end_s: float | None = None

    def run(self, taken: Sequence[Done]) -> Outcome:
        spec, requests = self.spec, self.requests
        if self._lease is not None and self._lease.taken_from:
            self.folder.event("take over", f"{self._lease.taken_from} is dead or did not renew its lease")
        self._take_over(taken) if taken else self._resume()
        began_at = self._began_at = self.at.step
        self._ordering.learn(step=began_at, written=began_at)
        self.control.begin(self.plan.retune, resumed=began_at > 0)
        self._ordering.traced_step = min(spec.num_steps - 1, began_at + max(2, (spec.num_steps - began_at) // 2))
        self.folder.write_plan(self.plan.plan.to_json())
        self.folder.write_config(spec.config_yaml)
        self.folder.event("start", "fit was called", step=began_at, num_steps=spec.num_steps, **self._signature())
        requests.serve(self.fleet)
        while True:
            try:
                self._to_the_end()
                break
            except RaypipeError as error:
                self._survive(error)
        if self.at.step > began_at:
            measured = Timeline(tuple(self.fleet.spans()), "measured", name=spec.name)
            timelines = [found for found in (self.plan.predicted, measured) if found is not None]
            self.notes.try_to(lambda: self.folder.write_timelines(timelines))
        self.control.end()
        stopped = requests.stop_reason if self.at.step < spec.num_steps else ""
        decision, reason = ("stop", stopped) if stopped else ("finish", "all steps done")
        self._tell(decision, reason, step=self.at.step, checkpoint=self.checkpoints.latest)
        return Outcome(self._eval_loss, self.checkpoints.latest, self.at.step, stopped)

    def _to_the_end(self) -> None:
        """All that is left to do of the run, up to its last checkpoint."""
        spec, requests = self.spec, self.requests
        self._keep_copy()
        if self.at.step >= spec.num_steps and self._eval_step != self.at.step and self._evaluates_after(self.at.step):
            self._evaluate()
        while self.at.step < spec.num_steps and not requests.stop_reason:
            while self._empty and requests.wants_change:  # what is asked for during a change halts nobody
                self._change()
            self._keep_copy()
            self._train()
            if self._evaluates_after(self.at.step):
                self._complete(self._evaluate())
        self._drain()
        if self._saved < self.at.step:  # stopped between two checkpoints
            self.fleet.save(self.checkpoints.begin(self.at.step))
        if self._completed < self.at.step:
            self._complete(self._eval_loss if self._eval_step == self.at.step else None)
        self.checkpoints.finish(self.at.step)

    def _survive(self, error: RaypipeError) -> None:
        """Have all stages brought back to one state, and go on from there.

        Raises:
            RaypipeError: the failure, where it is not to be survived.
        """
        while True:
            if self._recovery is None or not self._failures.survivable(error):
                raise error
            why_not = self._failures.counted(error, self.at.step)
            line = (str(error).splitlines() or [""])[0]
            numbers = {"step": self.at.step, "failures": self._failures.count, **noticed(error)}
            if why_not:
                self._tell("give up", f"{line} ({why_not})", **numbers)
                raise type(error)(f"{error}\nThe run ends: {why_not}.")
            self._tell("failure", line, **numbers)
            self.watcher.counted("failures")
            if self._lease is not None:
                self._lease.check()
            self.watcher.tell(message=f"recovering: {line}")
            begin_s, was = time.monotonic(), self.at.step
            try:
                back = self._recovery.recover(self._marks, self._began_at, self._fresh)
                self._go_back(back)
                self._keep_copy()
                break
            except (StageError, LinkError) as another:
                error = another
        took_s, redone = time.monotonic() - begin_s, was - self.at.step
        self._tell_change("recovery", f"from {back.source}", back, took_s, redone_steps=redone)
        self.watcher.counted("recovery_seconds", took_s)
        self.watcher.counted("lost_steps", redone)

    def _go_back(self, back: Recovered) -> None:
        """The stages have the state of this or an earlier step: forget what came after it, and order it again."""
        if back.position is not None:
            self.at, self._skipped = back.position, 0
        else:
            self.at, self._skipped = self._marks[back.step]
        self.notes.try_to(lambda: self.metrics.go_back(self.at.step))
        self._marks = {step: mark for step, mark in self._marks.items() if step <= self.at.step}
        self._empty, self._end_s, self._copied, self._eval_step = True, None, False, -1
        if back.plan is not None:
            self._take_plan(back.plan)
        self._ordering.forget(self.at.step, self._skipped)
        self.checkpoints.forget_after(self.at.step)
        self._saved = self._completed = self.checkpoints.latest_step

    def _take_plan(self, plan: PlanInForce) -> None:
        """The stages run another plan from now on; the controller begins anew, for it knew other stages."""
        self.plan = self._ordering.plan = plan
        self.control.end()
        self.control.begin(plan.retune, resumed=False)
        self.notes.try_to(lambda: self.folder.write_plan(plan.plan.to_json()))
        self.watcher.planned(plan)

    def _tell_change(self, decision: str, reason: str, back: Recovered, seconds: float, **numbers: Any) -> None:
        """Tell what recovery or resizing came to, and how long its parts took."""
        self._tell(decision, reason, step=self.at.step, **numbers, seconds=round(seconds, 3), **back.told())
        self.watcher.tell(step=self.at.step, stages=back.stages, message=self.requests.stop_reason)

    def _change(self) -> None:
        """Between two steps, do what was asked for: another number of stages, or stages away from nodes that go."""
        if (asked := self.requests.take_resize()) is not None:
            count, answer = asked.num_stages, asked.answer
            self._change_to("resize", "asked for", lambda on, at: on.resize(count, at), answer, num_stages=count)
        if nodes := self.requests.take_leaving():
            self._change_to("move", "nodes are about to be taken away", lambda on, at: on.move(nodes, at))

    def _change_to(
        self,
        decision: str,
        reason: str,
        change: Callable[[Recoverer, int], Recovered | None],
        answer: Callable[[RaypipeError | None], None] = lambda error: None,
        **numbers: Any,
    ) -> None:
        begin_s = time.monotonic()
        try:
            if self._recovery is None:
                raise PlanError("Stages in threads of one process stay as they are; start the run with local=False.")
            self._marks[self.at.step] = self.at, self._skipped
            back = change(self._recovery, self.at.step)
        except PlanError as error:
            self._tell(f"{decision} refused", str(error), step=self.at.step, **numbers)
            answer(error)
            return
        except RaypipeError as error:
            answer(PlanError(f"The run failed meanwhile, and recovers where it may: {error}"))
            raise
        if back is not None:
            self._go_back(back)
            self._tell_change(decision, reason, back, time.monotonic() - begin_s)
        answer(None)

    def _keep_copy(self) -> None:
        """Before the first step after a beginning, where nothing is under way: copies of what all have now."""
        if self.spec.copy_interval_steps and self._recovery is not None and self._empty and not self._copied:
            self._recovery.keep_copy(self.at.step)
            self._ordering.copy_times.ordered(self.at.step)
            self._mark()
            self._copied = True

    def _resume(self) -> None:
        """Go back to the newest good checkpoint of this run, if it has one."""
        spec = self.spec
        begins = beginning(spec, self.folder)
        found = begins.checkpoint
        if found is not None:
            self.fleet.restore(found.folder, begins.fresh)
            self._fresh = begins.fresh
            self.at = Position(**found.manifest.position)
            self.checkpoints.latest = str(spec.place / found.folder)
        self._saved = self._completed = self.checkpoints.latest_step = self.at.step
        self.metrics.go_back(self.at.step)
        if found is not None:
            self.watcher.resumed(self.metrics.recent, self.at.step, self.checkpoints.latest)
            self.folder.event("resume", f"from {found.folder}", step=self.at.step)
        begins.keep(spec)

    def _take_over(self, taken: Sequence[Done]) -> None:
        """The stages stand where they were left; what they have done since records were written last is told now."""
        found = left_at(taken)
        self.at, self._ordering.known = found.position, found.known
        self.metrics.go_back(self.at.step)
        self._skipped = found.skipped(self.metrics.recent)
        self._saved = self._completed = self.checkpoints.find()
        self.watcher.resumed(self.metrics.recent, self.at.step, self.checkpoints.latest)
        for done in taken:
            self._ordering.remember(done.order.memo.ordered)
        self._follow(iter([list(map(list, done.reports)) for done in taken]))
        self._write_metrics()
        self.folder.event("take over", "the stages go on where they stand", step=self.at.step)

    def _train(self) -> None:
        """Train to the end, to a stop, or to a checkpoint whose score is an evaluation."""
        self._follow(self.fleet.run(self._ordering.orders(self.at, empty=self._empty), self.plan.rows))
        self._drain()

    def _drain(self) -> None:
        """Where the run was stopped in the middle, complete what is under way."""
        if not self._empty:
            self._follow(self.fleet.run(iter([self._ordering.draining(self.at)]), self.plan.rows, last=True))

    def _follow(self, news: Iterator[list[list[StepReport]]]) -> None:
        for reports in news:
            if self._lease is not None:
                self._lease.check()
            ordered = self._ordering.taken(self.at.step)
            for of_step in zip(*reports, strict=True):
                record = merge_reports(of_step, self._end_s, norm_of)
                if ordered.setting.choice is not None:
                    record = replace(record, schedule=ordered.setting.name)
                self._end_s = max(r.end_s for r in of_step)
                self.metrics.append(record)
                self.watcher.step(record, of_step)
                self._count_skipped(record)
                self.control.told(record.seconds, of_step, ordered.setting, counts=ordered.counts)
                self._ordering.copy_times.heard(record.seconds, of_step)
            self.at = ordered.after
            self._empty = ordered.segment.phase.ends_empty
            if ordered.copies:
                self._mark()
            if ordered.saves:
                self._saved = self.at.step
                if not self._evaluates_after(self.at.step):
                    self._complete(None)
            if self.metrics.due:
                self._write_metrics()
            self._ordering.learn(step=self.at.step, skipped=self._skipped)

    def _write_metrics(self) -> None:
        if self.notes.try_to(self.metrics.write):
            self._ordering.learn(written=self.at.step)

    def _mark(self) -> None:
        """Every stage keeps a copy of its state in memory: what the run is to know when it goes back there."""
        self._marks[self.at.step] = self.at, self._skipped
        for step in sorted(self._marks)[:-MOST_MARKS]:
            del self._marks[step]

    def _count_skipped(self, record: StepRecord) -> None:
        if record.skipped:
            self._skipped += 1
            why = f"the loss is {record.loss:g} and the gradient norm {record.grad_norm:g}"
            self.notes.event("skip", why, step=record.step, skipped=self._skipped)

    def _evaluates_after(self, step: int) -> bool:
        """Whether an evaluation belongs to the checkpoint of ``step``: at the end, and where it is the score."""
        if "eval" not in self.spec.num_samples or self.requests.stop_reason:
            return False
        return step >= self.spec.num_steps or self.spec.checkpoints.score_attribute == "eval_loss"

    def _complete(self, eval_loss: float | None) -> None:
        self._write_metrics()  # first: a run that goes on from this checkpoint finds the steps before it here
        self._completed = self.at.step
        # Schedulers take as many steps again as updates were made, and a skipped one is none.
        end = replace(self.at, updates=self.at.updates - self._skipped)
        self.checkpoints.complete(end, self._metrics(eval_loss))

    def _evaluate(self) -> float | None:
        """Loss over the evaluation samples; None when the run was stopped meanwhile."""
        spec = self.spec
        used, sizes = self._ordering.known.evaluated, (spec.minibatch_size, spec.microbatch_size)
        orders = evaluation_orders(spec.num_samples["eval"], *sizes, used, generation=self.plan.plan.generation)
        self._ordering.learn(evaluated=used + sum(len(order.segment.microbatch_samples) for order in orders))
        found = list(forwards(self.fleet, orders, self.plan.rows))
        self._eval_loss = None if self.requests.stop_reason else mean_loss(found, sums=spec.sums_losses)
        self._eval_step = self.at.step
        return self._eval_loss

    def _metrics(self, eval_loss: float | None) -> dict[str, float]:
        found = {name: getattr(last, name) for last in self.metrics.recent[-1:] for name in ("loss", "grad_norm")}
        return found if eval_loss is None else {**found, "eval_loss": eval_loss}

    def _tell(self, decision: str, reason: str, **numbers: Any) -> None:
        self.notes.event(decision, reason, **numbers)
        self.watcher.tell(checkpoint=self.checkpoints.latest)

    def _signature(self) -> dict[str, Any]:
        return {} if self._lease is None else self._lease.signature()

    def _manifest(self, end: Position, entries: list[dict[str, Any]], metrics: Mapping[str, float]) -> Manifest:
        spec = self.spec
        return make_manifest(
            end.step, entries, position=asdict(end), seed=spec.seed, minibatch_size=spec.minibatch_size,
            microbatch_size=spec.microbatch_size, num_samples=spec.num_samples["train"], aliases=spec.aliases,
            metrics=metrics, **self._signature(),
        )  # fmt: skip
