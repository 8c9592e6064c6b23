"""Training loop of a run: sends orders to the stages and processes their reports, for actors and for threads.

An order is a request to run one training step or a few.

newest checkpoint --> first position
orders --> fleet --> reports of all stages --> one StepRecord per step --> progress, metrics, run folder
   ^                        |
   +----- controller <------+

At intervals, and at the end, the loop saves a checkpoint. This module does not import Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice

from raypipe import __version__
from raypipe.callbacks.base import RunEnd
from raypipe.engine.io.checkpoint.find_checkpoint import find_checkpoint
from raypipe.engine.io.run_files import MetricsWriter
from raypipe.engine.optim.norms import norm_of
from raypipe.errors import DataError, LinkError, RaypipeError, StageError, StageLostError
from raypipe.ir.report import Numbers, StepReport, merge_reports
from raypipe.ir.timeline import Span, Timeline
from raypipe.planner.controller import ControllerConfig
from raypipe.planner.segments import Position
from raypipe.run.checkpoints import Checkpoints
from raypipe.run.controller_thread import Control, ControllerThread
from raypipe.run.evaluations import Evaluations
from raypipe.run.lease import Lease
from raypipe.run.ordering import Ordered, Ordering
from raypipe.run.position import Progress
from raypipe.run.reporting import Reporter, start_of
from raypipe.run.requests import Requests
from raypipe.run.same_run import beginning
from raypipe.run.spec import AnyFleet, Outcome, PlanInForce, RunSpec, Watcher
from raypipe.run.stage_changes import Changing, detection_delay
from raypipe.run.status import ALERTS, as_event, in_words
from raypipe.run.texts import Texts
from raypipe.run.transitions import Transitions


@dataclass(frozen=True, slots=True)
class LoopSetup:
    """Input of ``run_loop``.

    Attributes:
        fleet: stages, configured for ``plan``.
        watcher: object that records steps, status and alerts.
        requests: requests of clients, such as a stop.
        make_controller: (``plan.retune``, state) -> controller thread; called if ``plan.retune`` is not None. The state
            was saved by an earlier submission, or is "".
        lease: lease on the run's folder; None if no other process can access it.
        recovery: makes transitions of the stages; None if stages cannot fail separately, as in threads.
        lost: error that describes the loss, if this driver has taken over the stages of a lost driver; None otherwise.
            With an error the run begins with a recovery; a StageLostError counts as a failure.
    """

    fleet: AnyFleet
    spec: RunSpec
    plan: PlanInForce
    watcher: Watcher
    requests: Requests
    make_controller: Callable[[ControllerConfig, str], ControllerThread] = ControllerThread
    lease: Lease | None = None
    recovery: Transitions | None = None
    lost: StageError | None = None


def run_loop(setup: LoopSetup) -> Outcome:
    """Run one submission (call of fit or start): resume from the newest checkpoint, train, evaluate, save.

    Metrics are written on failure too.

    Raises:
        LeaseError: another process has taken the run over; nothing more is written then.
        RaypipeError: the failure that ends the run.
    """
    loop = _Loop(setup)
    end: RunEnd | None = None  # None if another process took the run over: that process reports its end
    try:
        outcome = loop.run()
        end = RunEnd(outcome.step, outcome.checkpoint, outcome.stopped)
    except BaseException as error:
        end = loop.fail(error)
        raise
    finally:
        loop.close(end)
    loop.metrics.write()
    return outcome


class _Loop:
    """State of one call of run_loop.

    Attributes:
        metrics: records of the steps, including steps of earlier submissions.
    """

    def __init__(self, setup: LoopSetup) -> None:
        spec = self._spec = setup.spec
        self._fleet, self._watcher, self._requests = setup.fleet, setup.watcher, setup.requests
        self._lease, self._lost = setup.lease, setup.lost
        self._reporter = Reporter(spec, setup.watcher)
        replanning = None if setup.recovery is None else setup.recovery.replanning
        if replanning is not None:
            replanning.serve(setup.requests.offer)
        self._control = Control(setup.make_controller, self._reporter, replanning)
        self.metrics = MetricsWriter(
            spec.place, evaluations=spec.evaluations.names if "eval" in spec.num_samples else ()
        )
        self._evaluations = Evaluations(spec, self.metrics)
        self._texts = Texts(spec, setup.fleet, setup.requests, self._reporter)
        self._progress = Progress(spec.place)
        self._checkpoints = Checkpoints(spec, setup.fleet, self._reporter, setup.lease)
        self._ordering = Ordering(
            spec, setup.plan, self._checkpoints, self._control, setup.requests, self._evaluates_after
        )
        self._changing = Changing(
            spec, setup.requests, setup.lease, setup.recovery, self._reporter, self._control, self.metrics,
            self._checkpoints, self._ordering, self._progress,
        )  # fmt: skip
        self._evaluation: Numbers = ()  # of the last evaluation
        self._early = ""  # why the run ends at the current step, before its last one
        # Taken over before its first checkpoint: a rollback depends on copies until one exists, for the parameters that
        # the run began with were in the memory of the lost driver.
        self._unsaved = False

    @property
    def _plan(self) -> PlanInForce:
        return self._ordering.plan

    def run(self) -> Outcome:
        """Train to the end, and recover from failures.

        Training starts from the newest checkpoint, or from the copies on stages taken over from a lost driver.
        """
        lost: StageError | LinkError | None = None
        counts = True
        if self._lost is None:
            lost = self._resume()
        else:
            lost, counts = self._lost, isinstance(self._lost, StageLostError)
            self._resume_from_copies(self._lost)
        began_at = self._progress.at.step
        self._start(began_at)
        if lost is not None:
            self._changing.recover(lost, self._follow, torn=True, counts=counts)
        while True:
            try:
                self._train_to_end()
                break
            except RaypipeError as error:
                self._changing.recover(error, self._follow)
        return self._finish(began_at)

    def _start(self, began_at: int) -> None:
        """Start the controller and the callbacks, write the files of this submission, and accept requests.

        Args:
            began_at: number of optimizer steps done before this submission; 0 for a new run.
        """
        spec, lease, folder = self._spec, self._lease, self._reporter.folder
        self._progress.goodput.begin(began_at)
        self._control.begin(self._plan, resumed=began_at > 0)
        self._ordering.trace(began_at)
        folder.write_plan(self._plan.plan.to_json())
        folder.write_config(spec.config_yaml)
        signature = {"raypipe": __version__, **({} if lease is None else lease.signature())}
        folder.event("start", "fit was called", step=began_at, num_steps=spec.num_steps, **signature)
        self._reporter.callbacks.start(start_of(spec, began_at))
        self._requests.serve(self._fleet, self._ordering.patience_s)

    def _train_to_end(self) -> None:
        """Train the rest of the run, with evaluations and changes of the stages; wait for its last checkpoint."""
        spec, requests, progress = self._spec, self._requests, self._progress
        self._changing.keep_copy()
        self._end_step()
        while not (requests.stop_reason or self._early) and (
            progress.at.step < spec.num_steps or self._evaluates_again()
        ):
            while progress.empty and requests.wants_change:  # a request that came during a change is still waiting
                self._changing.change()
            if requests.stop_reason:  # the fleet that it halted has been reconfigured since
                break
            self._changing.keep_copy()
            self._end_step()
            if progress.at.step < spec.num_steps:
                self._train()
                self._end_step()
        self._drain()
        if progress.saved < progress.at.step:  # stopped between two checkpoints
            self._fleet.save(self._checkpoints.begin(progress.at.step))
        if progress.completed < progress.at.step:
            self._complete()
        self._checkpoints.finish(progress.at.step)

    def _finish(self, began_at: int) -> Outcome:
        """Write the measured timeline, publish why the run ends at this step, and return the outcome.

        Args:
            began_at: number of optimizer steps done before this submission.
        """
        progress, latest = self._progress, self._checkpoints.latest
        if progress.at.step > began_at:
            measured = Timeline(self._measured_spans(), "measured", name=self._spec.name)
            timelines = [timeline for timeline in (self._plan.predicted, measured) if timeline is not None]
            self._reporter.try_to(lambda: self._reporter.folder.write_timelines(timelines))
        self._control.end()
        done = progress.at.step == self._spec.num_steps
        done = done and not self._evaluations.lacking(progress.at, progress.saved)
        stopped = "" if done else self._requests.stop_reason or self._early
        decision, reason = ("stop", stopped) if stopped else ("finish", "all steps done")
        self._reporter.event(decision, reason, step=progress.at.step, checkpoint=latest)
        return Outcome(self._evaluation, latest, progress.at.step, stopped)

    def _measured_spans(self) -> Sequence[Span]:
        """Return the timed actions of the traced step; empty if no step was traced, or, with an alert, on a failure."""
        if not self._ordering.traced:
            return ()
        try:
            return tuple(self._fleet.spans())
        except StageError as error:  # the steps and their checkpoint are complete: only a picture is missing
            message = f"The run's timeline lacks what was measured: {error}"
            self._reporter.complain("timeline", message, self._progress.at.step)
            return ()

    def fail(self, error: BaseException) -> RunEnd | None:
        """Record an error that ends the run, and save the last completed step if its stages still hold it.

        Returns:
            Argument of the callbacks' ``on_end``. None, and nothing is written, if another process has taken the run
            over.
        """
        if self._lease is not None and self._lease.lost:
            return None
        reporter, progress = self._reporter, self._progress
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        reporter.log("fail", reason, step=progress.at.step, **detection_delay(error))
        reporter.try_to(self.metrics.write)
        if isinstance(error, Exception):  # Ctrl-C must end it at once
            if progress.completed < progress.saved == progress.at.step:
                reporter.try_to(self._complete)  # it waited for an evaluation, which has failed
            elif progress.saved < progress.at.step and isinstance(error, StageError | DataError):
                self._save_before_failure(error)
            self._checkpoints.settle(error)
        return RunEnd(progress.at.step, self._checkpoints.latest, error=reason)

    def _save_before_failure(self, error: Exception) -> None:
        """Save the state after the last completed step, if all stages live and the failed step has not changed it.

        For example, a sample that cannot be read then costs no completed step, even without copies in memory.

        Args:
            error: error of the run. A failure to save is an alert and does not replace this error.
        """
        progress, step = self._progress, self._progress.at.step
        changing = any(program.train.changing_buffers for program in self._plan.setup.programs)
        if self._plan.flow is not None or changing or isinstance(error, StageLostError):
            return
        try:
            if self._fleet.holds(step):
                self._fleet.save(self._checkpoints.begin(step))
                progress.saved = step
                self._complete()
        except Exception as another:  # noqa: BLE001  (a device that has failed, storage, a worker that does not answer)
            self._reporter.complain(
                "last step not saved", f"The state after {step} steps was not saved: {another}", step
            )

    def close(self, end: RunEnd | None) -> None:
        """Close all components, even if one raises; ``end`` is the argument of ``on_end``, and None omits that call."""
        with ExitStack() as last:  # called in reverse order
            last.callback(self._log_alerts)
            last.callback(lambda: self._reporter.callbacks.end(end))
            last.callback(self._control.end)
            last.callback(self._checkpoints.close)
            last.callback(self._requests.end)

    def _log_alerts(self) -> None:
        if (self._lease is None or not self._lease.lost) and (alerts := self._watcher.alerts):
            step = self._progress.at.step
            self._reporter.log(ALERTS, in_words(alerts), step=step, alerts=as_event(alerts))

    def _resume(self) -> StageLostError | LinkError | None:
        """Restore the newest intact checkpoint of this run, if it has one, and write settings.json.

        Returns:
            Loss of a worker or link meanwhile, from which a recovery must follow; None if all stages are restored.
        """
        spec, progress, folder = self._spec, self._progress, self._reporter.folder
        self._note_taken_lease()
        begins = beginning(spec, folder)
        checkpoint, lost = begins.checkpoint, None
        if checkpoint is not None:
            try:
                self._fleet.restore(checkpoint.folder, begins.fresh)
            except (StageLostError, LinkError) as error:
                if not self._changing.survives(error):
                    raise
                lost = error
            progress.at = Position(**checkpoint.manifest.position)
            self._checkpoints.latest = str(spec.place / checkpoint.folder)
        progress.saved = progress.completed = self._checkpoints.latest_step = progress.at.step
        self.metrics.go_back(progress.at.step)
        if checkpoint is not None:
            self._publish_resumption(f"from {self._checkpoints.latest}")
            folder.event("resume", f"from {checkpoint.folder}", step=progress.at.step)
        begins.keep(spec)  # also before a recovery, which reads there which options are fresh
        return lost

    def _resume_from_copies(self, lost: StageError) -> None:
        """Set the position to the step of the newest in-memory copies that the lost driver recorded.

        The recovery that follows rolls back to the newest copies that still exist.

        Args:
            lost: error that describes the loss, for the run's log.
        """
        progress = self._progress
        self._note_taken_lease()
        progress.copies.read()
        checkpoint = find_checkpoint(self._spec.place)[0]
        if checkpoint is not None:
            progress.at = Position(**checkpoint.manifest.position)
        newest = max(progress.copies.steps, default=0)
        if newest > progress.at.step:
            progress.at, progress.skipped = progress.copies[newest]
        self.metrics.go_back(progress.at.step)
        progress.saved = progress.completed = self._checkpoints.find()
        self._unsaved = not progress.saved
        self._publish_resumption("with those of its stages that are left")
        self._reporter.folder.event("take over", str(lost), step=progress.at.step)

    def _note_taken_lease(self) -> None:
        if self._lease is not None and self._lease.taken_from:
            reason = f"{self._lease.taken_from} is dead or did not renew its lease"
            self._reporter.folder.event("take over", reason)

    def _publish_resumption(self, source: str) -> None:
        step, checkpoint = self._progress.at.step, self._checkpoints.latest
        self._watcher.resumed(self.metrics.recent, step, checkpoint, source, self._fleet.makers(()))

    def _train(self) -> None:
        """Train up to the end of the run, or until a stop, a change of the stages or an evaluation is due."""
        orders = self._ordering.orders(self._progress.at, empty=self._progress.empty)
        if self._control.opens:
            # Alone: later steps would be ordered before the controller has seen a message.
            self._follow(self._fleet.run(islice(orders, 1), self._plan.rows), may_hand_over=True)
            self._control.open()
            self._progress.end_s = None  # the next step did not begin when this one ended
        self._follow(self._fleet.run(orders, self._plan.rows), may_hand_over=True)
        self._drain()

    def _drain(self) -> None:
        """Complete the mini-batches that are still in the pipeline, so that it is empty."""
        if not self._progress.empty:
            orders = iter([self._ordering.draining(self._progress.at)])
            self._follow(self._fleet.run(orders, self._plan.rows, last=True))

    def _follow(self, news: Iterator[list[list[StepReport]]], *, may_hand_over: bool = False) -> None:
        """Process the reports of completed orders: records, metrics, watchers, checkpoints.

        Args:
            news: reports of each order, by worker and by step of the order, as ``AnyFleet.run`` yields them.
            may_hand_over: True if a request to hand the run over to another driver may be granted; False while the
                pipeline drains or stages recover.
        """
        progress = self._progress
        for reports in news:
            if self._lease is not None:
                self._lease.check()
            ordered = self._ordering.take(progress.at.step)
            for of_step in zip(*reports, strict=True):
                self._record(of_step, ordered)
            progress.at, progress.empty = ordered.after, ordered.segment.phase.ends_empty
            if ordered.copies:
                self._changing.copied()
            if ordered.saves:
                progress.saved = progress.at.step
                if not self._evaluates_after(progress.at.step, saves=True):
                    self._complete()
            if self.metrics.due:
                self._write_metrics()
            if may_hand_over and not self._checkpoints.busy and (go := self._requests.take_hand_over()) is not None:
                self._write_metrics()
                go()

    def _record(self, of_step: tuple[StepReport, ...], ordered: Ordered) -> None:
        """Merge the workers' reports on a step into a record, and pass it to all components that process steps."""
        progress, setting = self._progress, ordered.setting
        record = merge_reports(of_step, progress.end_s, norm_of)
        if setting.choice is not None:
            record = replace(record, schedule=setting.name)
        progress.end_s = max(r.end_s for r in of_step)
        record = self.metrics.append(replace(record, goodput=progress.goodput.done(record)))
        self._watcher.step(record, of_step, self._fleet.makers(of_step))
        self._reporter.callbacks.step(record)
        if record.skipped:
            progress.skipped += 1
            reason = f"the loss is {record.loss:g} and the gradient norm {record.grad_norm:g}"
            self._reporter.event("skip", reason, step=record.step, skipped=progress.skipped)
        self._control.on_step(record, of_step, setting, counts=ordered.counts)
        self._changing.on_step(record, of_step)
        self._ordering.copy_times.on_step(record.seconds, of_step)

    def _write_metrics(self) -> None:
        self._reporter.try_to(self.metrics.write)

    def _complete(self) -> None:
        """Complete the checkpoint of the current step in the background."""
        progress = self._progress
        self._write_metrics()  # first: a run that resumes from this checkpoint reads the steps before it here
        progress.completed = progress.at.step
        # On resume, LR schedulers repeat as many steps as there were updates, and a skipped step made none.
        end = replace(progress.at, updates=progress.at.updates - progress.skipped)
        last = {name: getattr(x, name) for x in self.metrics.recent[-1:] for name in ("loss", "grad_norm")}
        scores = dict(self._evaluations.at(progress.at))
        self._checkpoints.complete(end, {**last, **scores}, scored=bool(scores))

    def _end_step(self) -> None:
        """Do what is due after the current step and was not done yet: checkpoint, evaluation, early stopping, texts.

        A checkpoint that has no manifest yet, because it waits for an evaluation, is completed afterwards. A checkpoint
        that was dropped by a failure or a change of the stages is saved again. Early stopping is decided at each call,
        because the run may have rolled back.
        """
        progress, step = self._progress, self._progress.at.step
        if progress.empty and progress.saved < step and (self._checkpoints.due_at(step) or self._unsaved):
            self._fleet.save(self._checkpoints.begin(step))
            progress.saved = step
        elif self._unsaved:  # at step 0, which has no checkpoint
            self._ordering.save_soon()
        self._unsaved = False
        no_manifest = progress.completed < progress.saved == step
        if progress.empty and not self._requests.stop_reason and self._evaluations.lacking(progress.at, progress.saved):
            self._evaluate()
        scores = self._evaluations.at(progress.at)
        self._evaluation = scores or self._evaluation
        self._early = self._evaluations.verdict() if scores and step < self._spec.num_steps else ""
        if no_manifest and not self._evaluates_again():
            self._complete()
        elif scores and progress.saved == step:
            self._checkpoints.score(step, dict(scores))
        if progress.empty and self._requests.wants_text and not self._requests.stop_reason:
            progress.end_s = None  # the next step is not measured from the end of the previous one
            self._texts.answer(self._plan, step)

    def _evaluates_after(self, step: int, *, saves: bool) -> bool:
        return not self._requests.stop_reason and self._evaluations.after(step, saves=saves)

    def _evaluates_again(self) -> bool:
        """Return True if a request to change the stages has halted the evaluation, so that it has to be repeated."""
        return self._requests.wants_change and self._evaluations.lacking(self._progress.at, self._progress.saved)

    def _evaluate(self) -> None:
        """Compute and publish loss and metrics over the evaluation samples, unless it or its texts are halted."""
        reporter, step = self._reporter, self._progress.at.step
        made = self._evaluations.make(self._fleet, self._plan, lambda: bool(self._requests.stop_reason))
        if made is None:
            return
        # Before the record, without which an evaluation is repeated if stages are lost.
        texts = self._texts.of_callbacks(self._plan, step)
        if texts is None:
            return
        self._evaluation, remark = made
        self._progress.end_s = None  # the next step is not measured from the end of the previous one
        reporter.log("evaluate", f"{step} steps", step=step, **dict(self._evaluation))
        reporter.callbacks.evaluated(step, dict(self._evaluation))
        for number, tokens in texts:
            reporter.callbacks.text(step, number, tokens)
        if remark:
            message = f"The loss of the evaluation after {step} steps is NaN or infinite. {remark}"
            reporter.complain("evaluation", message, step)
        if record := self.metrics.evaluated(step, self._evaluation):
            self._watcher.evaluated(record)
        self._write_metrics()
