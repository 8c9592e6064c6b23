"""The run as a loop over orders: the same for actors and for threads, so it imports no Ray.

newest checkpoint --> where to begin
orders --> fleet --> reports of all stages --> one StepRecord per step --> progress, metrics, run folder
   ^                        |
   +------- controller <-------+                  now and then, and at the end: a checkpoint
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from raypipe.callbacks.base import RunEnd
from raypipe.engine.checkpoint import find_checkpoint
from raypipe.engine.metrics import MetricsWriter
from raypipe.engine.norms import norm_of
from raypipe.engine.rundir import RunFolder
from raypipe.errors import RaypipeError, StageLostError
from raypipe.ir.report import Numbers, StepRecord, StepReport, merge_reports
from raypipe.ir.timeline import Timeline
from raypipe.planner.control import ControllerConfig, ControllerDecision
from raypipe.planner.segments import Position
from raypipe.runtime.run.calls import Calls, start_of
from raypipe.runtime.run.changing import Changing, Parts
from raypipe.runtime.run.checkpoints import Checkpoints
from raypipe.runtime.run.control import Control
from raypipe.runtime.run.controller_thread import ControllerThread
from raypipe.runtime.run.evaluations import Evaluations, numbers_of, remark_on
from raypipe.runtime.run.forwards import evaluation_orders, forwards
from raypipe.runtime.run.lease import Lease
from raypipe.runtime.run.manifests import manifests
from raypipe.runtime.run.notes import Notes
from raypipe.runtime.run.ordering import Ordering
from raypipe.runtime.run.progress import Progress
from raypipe.runtime.run.recovery import Recoverer, noticed
from raypipe.runtime.run.requests import Requests
from raypipe.runtime.run.resuming import beginning, left_at
from raypipe.runtime.run.spec import AnyFleet, Outcome, PlanInForce, RunSpec, Watcher
from raypipe.runtime.run.takeover import Done

__all__ = ["run_loop"]


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
    lost: StageLostError | None = None,
) -> Outcome:
    """Begin where the newest checkpoint ends, train, evaluate, save. Metrics are written whatever happens.

    Args:
        make_controller: called with ``plan.retune`` and the state that an earlier submission left, where that is
            wanted.
        lease: on the run's folder; None where nobody else can know of it.
        recovery: brings the stages back after a failure; None where they cannot fail by themselves, as threads.
        taken: what stages have done for an earlier driver, from which they were taken over where they stand.
        lost: some stages were lost with that driver, so that the run begins with a recovery.

    Raises:
        LeaseError: another process has taken the run over; nothing more is written then.
    """
    loop = _Loop(fleet, spec, plan, watcher, requests, make_controller, lease, recovery)
    how: RunEnd | None = None  # of a run that another process has taken over, that one tells
    try:
        outcome = loop.run(taken, lost)
        how = RunEnd(outcome.step, outcome.checkpoint, outcome.stopped)
    except BaseException as error:
        reason, when = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", noticed(error)
        if lease is None or not lease.lost:
            loop.notes.event("fail", reason, step=loop.progress.at.step, **when)
            loop.notes.try_to(loop.metrics.write)
            if isinstance(error, Exception):  # nobody who presses Ctrl-C wants to wait
                if loop.progress.completed < loop.progress.saved == loop.progress.at.step:
                    loop.notes.try_to(loop._complete)  # it waits for an evaluation, which has failed
                loop.checkpoints.settle(error)
            how = RunEnd(loop.progress.at.step, loop.checkpoints.latest, error=reason)
        raise
    finally:
        with ExitStack() as last:  # each of them, whatever another one raises; callbacks hear of the end last
            last.callback(lambda: loop.calls.end(how))
            last.callback(loop.control.end)
            last.callback(loop.checkpoints.close)
            last.callback(requests.end)
    loop.metrics.write()
    return outcome


class _Loop:
    """One call of run_loop.

    Attributes:
        progress: where the run stands.
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
        self._lease = lease
        self.fleet, self.spec, self.watcher, self.requests = fleet, spec, watcher, requests
        self.folder = RunFolder(spec.place)
        self.notes = Notes(self.folder, watcher)
        self.calls = Calls(spec.callbacks, self._complain, lambda message: watcher.tell(message=message))
        self.control = Control(make_controller, self.folder, watcher, self._decided, self.notes.try_to)
        names = spec.evaluations.names if "eval" in spec.num_samples else ()
        self.metrics = MetricsWriter(spec.place, evaluations=names)
        self.evaluations = Evaluations(
            spec.evaluations, spec.checkpoints, spec.num_steps, spec.num_samples, self.metrics
        )
        self.progress = Progress(spec.place)
        self.checkpoints = Checkpoints(spec.place, fleet, spec.checkpoints, manifests(spec, lease), self._tell, lease)
        self._ordering = Ordering(spec, plan, self.checkpoints, self.control, requests, self._evaluates_after)
        self._parts = Parts(
            spec, self.folder, self.notes, watcher, requests, self.control, self.metrics, self.checkpoints,
            self._ordering, lease, self.calls,
        )  # fmt: skip
        self._changing = Changing(self._parts, self.progress, recovery)
        self._evaluation: Numbers = ()  # the last one
        self._early = ""  # why the run ends where it stands, before its last step

    @property
    def plan(self) -> PlanInForce:
        """In force."""
        return self._ordering.plan

    def run(self, taken: Sequence[Done], lost: StageLostError | None) -> Outcome:
        spec, requests, progress = self.spec, self.requests, self.progress
        if self._lease is not None and self._lease.taken_from:
            self.folder.event("take over", f"{self._lease.taken_from} is dead or did not renew its lease")
        if lost is not None:
            self._stand_at_copies()
        elif taken:
            self._take_over(taken)
        else:
            self._resume()
        began_at = progress.at.step
        progress.goodput.begin(began_at)
        self._ordering.learn(step=began_at, written=began_at)
        self.control.begin(self.plan.retune, resumed=began_at > 0)
        self._ordering.trace(began_at)
        self.folder.write_plan(self.plan.plan.to_json())
        self.folder.write_config(spec.config_yaml)
        signature = {} if self._lease is None else self._lease.signature()
        self.folder.event("start", "fit was called", step=began_at, num_steps=spec.num_steps, **signature)
        self.calls.start(start_of(spec, began_at))
        requests.serve(self.fleet, self._ordering.patience_s)
        if lost is not None:
            self._changing.survive(lost, self._follow)
        while True:
            try:
                self._to_the_end()
                break
            except RaypipeError as error:
                self._changing.survive(error, self._follow)
        if progress.at.step > began_at:
            spans = tuple(self.fleet.spans()) if self._ordering.traced else ()
            measured = Timeline(spans, "measured", name=spec.name)
            timelines = [found for found in (self.plan.predicted, measured) if found is not None]
            self.notes.try_to(lambda: self.folder.write_timelines(timelines))
        self.control.end()
        done = progress.at.step == spec.num_steps and not self.evaluations.lacking(progress.at, progress.saved)
        stopped = "" if done else requests.stop_reason or self._early
        decision, reason = ("stop", stopped) if stopped else ("finish", "all steps done")
        self._tell(decision, reason, step=progress.at.step, checkpoint=self.checkpoints.latest)
        return Outcome(self._evaluation, self.checkpoints.latest, progress.at.step, stopped)

    def _to_the_end(self) -> None:
        """All that is left to do of the run, up to its last checkpoint."""
        spec, requests, progress = self.spec, self.requests, self.progress
        self._changing.keep_copy()
        self._end_step()
        while not (requests.stop_reason or self._early) and (
            progress.at.step < spec.num_steps or self._evaluates_again()
        ):
            while progress.empty and requests.wants_change:  # what is asked for during a change halts nobody
                self._changing.change()
            if requests.stop_reason:  # it halted a fleet that has been configured anew since
                break
            self._changing.keep_copy()
            self._end_step()
            if progress.at.step < spec.num_steps:
                self._train()
                self._end_step()
        self._drain()
        if progress.saved < progress.at.step:  # stopped between two checkpoints
            self.fleet.save(self.checkpoints.begin(progress.at.step))
        if progress.completed < progress.at.step:
            self._complete()
        self.checkpoints.finish(progress.at.step)

    def _resume(self) -> None:
        """Go back to the newest good checkpoint of this run, if it has one."""
        spec, progress = self.spec, self.progress
        begins = beginning(spec, self.folder)
        found = begins.checkpoint
        if found is not None:
            self.fleet.restore(found.folder, begins.fresh)
            progress.at = Position(**found.manifest.position)
            self.checkpoints.latest = str(spec.place / found.folder)
        progress.saved = progress.completed = self.checkpoints.latest_step = progress.at.step
        self.metrics.go_back(progress.at.step)
        if found is not None:
            self._tell_resumed(f"from {self.checkpoints.latest}")
            self.folder.event("resume", f"from {found.folder}", step=progress.at.step)
        begins.keep(spec)

    def _take_over(self, taken: Sequence[Done]) -> None:
        """The stages stand where they were left; what they have done since records were written last is told now."""
        progress = self.progress
        found = left_at(taken)
        progress.at, self._ordering.known = found.position, found.known
        progress.marks.read()  # of copies that the stages still have
        progress.marks.forget_after(progress.at.step)
        self.metrics.take_over(progress.at.step)
        progress.skipped = found.skipped(self.metrics.recent)
        self._find_saved()
        self._tell_resumed("where its stages stand")
        # The driver before may have ended before its callbacks heard of these steps.
        self.calls.start(start_of(self.spec, progress.at.step))
        for done in taken:
            self._ordering.remember(done.order.memo.ordered)
        self._follow(iter([list(map(list, done.reports)) for done in taken]))
        self._write_metrics()
        self.folder.event("take over", "the stages go on where they stand", step=progress.at.step)

    def _tell_resumed(self, source: str) -> None:
        self.watcher.resumed(self.metrics.recent, self.progress.at.step, self.checkpoints.latest, source)

    def _find_saved(self) -> None:
        """What an earlier driver saved; where that is nothing, a checkpoint is taken soon.

        Until then there may be no way back but copies in memory: what the run began with was in that driver's memory.
        """
        self.progress.saved = self.progress.completed = self.checkpoints.find()
        if not self.progress.saved:
            self._ordering.save_soon()

    def _stand_at_copies(self) -> None:
        """Stages were lost together with their driver: a recovery follows, and goes back to where it can from here."""
        progress, spec = self.progress, self.spec
        progress.marks.read()
        checkpoint = find_checkpoint(spec.place)[0]
        if checkpoint is not None:
            progress.at = Position(**checkpoint.manifest.position)
        newest = max(progress.marks.steps, default=0)
        if newest > progress.at.step:
            progress.at, progress.skipped = progress.marks[newest]
        self.metrics.go_back(progress.at.step)
        self._find_saved()
        self._tell_resumed("with those of its stages that are left")
        self.folder.event("take over", "stages were lost together with their driver", step=progress.at.step)

    def _train(self) -> None:
        """Train to the end, to a stop, or to an evaluation."""
        orders = self._ordering.orders(self.progress.at, empty=self.progress.empty)
        self._follow(self.fleet.run(orders, self.plan.rows), departs=True)
        self._drain()

    def _drain(self) -> None:
        """Where the run was stopped in the middle, complete what is under way."""
        if not self.progress.empty:
            self._follow(self.fleet.run(iter([self._ordering.draining(self.progress.at)]), self.plan.rows, last=True))

    def _follow(self, news: Iterator[list[list[StepReport]]], *, departs: bool = False) -> None:
        """Tell what stages have done.

        Args:
            departs: this driver may go to another node meanwhile, because nobody is changing the stages.
        """
        progress = self.progress
        for reports in news:
            if self._lease is not None:
                self._lease.check()
            ordered = self._ordering.taken(progress.at.step)
            for of_step in zip(*reports, strict=True):
                record = merge_reports(of_step, progress.end_s, norm_of)
                if ordered.setting.choice is not None:
                    record = replace(record, schedule=ordered.setting.name)
                progress.end_s = max(r.end_s for r in of_step)
                record = self.metrics.append(replace(record, goodput=progress.goodput.done(record)))
                self.watcher.step(record, of_step)
                self.calls.step(record)
                self._count_skipped(record)
                self.control.told(record.seconds, of_step, ordered.setting, counts=ordered.counts)
                self._changing.heard(record, of_step, ordered.setting)
                self._ordering.copy_times.heard(record.seconds, of_step)
            progress.at = ordered.after
            progress.empty = ordered.segment.phase.ends_empty
            if ordered.copies:
                self._changing.copied()
            if ordered.saves:
                progress.saved = progress.at.step
                if not self._evaluates_after(progress.at.step, saves=True):
                    self._complete()
            if self.metrics.due:
                self._write_metrics()
            self._ordering.learn(step=progress.at.step, skipped=progress.skipped)
            if departs and not self.checkpoints.busy and (go := self.requests.take_hand_over()) is not None:
                self._write_metrics()
                go()

    def _write_metrics(self) -> None:
        if self.notes.try_to(self.metrics.write):
            self._ordering.learn(written=self.progress.at.step)

    def _count_skipped(self, record: StepRecord) -> None:
        if record.skipped:
            self.progress.skipped += 1
            why = f"the loss is {record.loss:g} and the gradient norm {record.grad_norm:g}"
            numbers = {"step": record.step, "skipped": self.progress.skipped}
            self.notes.event("skip", why, **numbers)
            self.calls.event("skip", why, numbers)

    def _evaluates_after(self, step: int, *, saves: bool) -> bool:
        return not self.requests.stop_reason and self.evaluations.after(step, saves=saves)

    def _complete(self) -> None:
        progress = self.progress
        self._write_metrics()  # first: a run that goes on from this checkpoint finds the steps before it here
        progress.completed = progress.at.step
        # Schedulers take as many steps again as updates were made, and a skipped one is none.
        end = replace(progress.at, updates=progress.at.updates - progress.skipped)
        found = {name: getattr(x, name) for x in self.metrics.recent[-1:] for name in ("loss", "grad_norm")}
        scores = dict(self.evaluations.at(progress.at))
        self.checkpoints.complete(end, {**found, **scores}, scored=bool(scores))

    def _end_step(self) -> None:
        """What belongs behind the step at which the run stands, as far as it has not been done.

        A checkpoint that a failure or a change of the stages kept from its manifest is taken anew, for this step is not
        done once more. Whether the run ends with the evaluation is decided each time: it may have gone back since.
        """
        progress, step = self.progress, self.progress.at.step
        if progress.empty and progress.saved < step and self.checkpoints.due_at(step):
            self.fleet.save(self.checkpoints.begin(step))
            progress.saved = step
        waits = progress.completed < progress.saved == step
        if progress.empty and not self.requests.stop_reason and self.evaluations.lacking(progress.at, progress.saved):
            self._evaluate()
        found = self.evaluations.at(progress.at)
        self._evaluation = found or self._evaluation
        self._early = self.evaluations.verdict() if found and step < self.spec.num_steps else ""
        if waits and not self._evaluates_again():
            self._complete()
        elif found and progress.saved == step:
            self.checkpoints.score(step, dict(found))

    def _evaluates_again(self) -> bool:
        """Whether a change of the stages has halted the evaluation here, which follows it then."""
        return self.requests.wants_change and self.evaluations.lacking(self.progress.at, self.progress.saved)

    def _evaluate(self) -> None:
        """Loss and metrics over the evaluation samples; nothing where the run was stopped meanwhile."""
        spec = self.spec
        used, sizes = self._ordering.known.evaluated, (spec.minibatch_size, spec.microbatch_size)
        orders = evaluation_orders(spec.num_samples["eval"], *sizes, used, generation=self.plan.plan.generation)
        self._ordering.learn(evaluated=used + sum(len(order.segment.microbatch_samples) for order in orders))
        found = list(forwards(self.fleet, orders, self.plan.rows))
        if self.requests.stop_reason or len(found) < len(orders):
            return
        self._evaluation = numbers_of(found, sums=spec.sums_losses)
        self.progress.end_s = None  # the next step is not measured from the end of the one before
        step = self.progress.at.step
        self.notes.event("evaluate", f"{step} steps", step=step, **dict(self._evaluation))
        self.calls.evaluated(step, dict(self._evaluation))
        if remark := remark_on(found):
            self._complain(f"The evaluation after {step} steps has a loss that is no number. {remark}")
        if record := self.metrics.evaluated(self.progress.at.step, self._evaluation):
            self.watcher.evaluated(record)
        self._write_metrics()  # stages remember no evaluation for a driver that takes over

    def _tell(self, decision: str, reason: str, **numbers: Any) -> None:
        self._parts.tell(decision, reason, **numbers)

    def _decided(self, found: ControllerDecision) -> None:
        self.watcher.decided(found)
        self.calls.decided(found)

    def _complain(self, message: str) -> None:
        self.notes.event("warning", message, step=self.progress.at.step)
        self.watcher.alert(message)
