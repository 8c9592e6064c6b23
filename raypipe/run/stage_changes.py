"""Changes of a run's stages during training: recovery from a failure, resize, re-partition, move to other workers.

    loop: steps --failure--> Failures: survived? --no--> raised again
                             | yes
          request  --------> Transitions (runtime/fleet/recovery.py) --> Recovered --> roll back: progress, orders,
                                                                         records; adopt the new plan, if there is one

The loop calls ``Changing`` between two steps or after a failure; both share one ``Progress``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from raypipe.engine.io.run_files import MetricsWriter
from raypipe.errors import LinkError, PlanError, RaypipeError, StageError, StageLostError
from raypipe.ir.report import StepRecord, StepReport
from raypipe.run.checkpoints import Checkpoints
from raypipe.run.controller_thread import Control
from raypipe.run.lease import Lease
from raypipe.run.ordering import Ordering
from raypipe.run.position import Progress
from raypipe.run.reporting import Reporter
from raypipe.run.requests import Requests
from raypipe.run.spec import RunSpec
from raypipe.run.transitions import Change, Join, Move, Recovered, Transitions

IN_THREADS = "Stages in threads of one process stay as they are; start the run with local=False."
UNLIMITED = -1
MOST_LOST = 5
"""Maximum number of times that one loss of a process or link may recur while the run makes no progress."""
MOST_LIGHTER = 5
"""Maximum recurrences of one out-of-memory failure without progress; each retry puts less on that worker."""
MOST_HERE = 20
"""Maximum number of failures of any kind while the run makes no progress."""

Follow = Callable[[Iterator[list[list[StepReport]]]], None]


def detection_delay(error: BaseException) -> dict[str, float]:
    """Return {"seconds": seconds since the error was raised on a stage} for an event; {} if the time is unknown."""
    at_s = getattr(error, "raised_at_s", None)
    return {} if at_s is None else {"seconds": round(max(0.0, time.time() - at_s), 3)}


class Failures:
    """Counter of failures, limited by ``FailureConfig(max_failures)``: -1 is no limit, 0 survives none.

    A deterministic failure, such as an exception in user code or a non-finite loss, is retried once. A loss of a
    process or link is retried a few times if the run makes no progress. An out-of-memory failure is retried equally
    often, each time with a plan that needs less memory.

    Args:
        most: ``max_failures``.
        count: number of failures that earlier drivers survived.

    Attributes:
        count: number of failures so far, including failures of earlier drivers.
    """

    def __init__(self, most: int, count: int = 0) -> None:
        self._most = most
        self.count = count
        self._last, self._furthest = (-1, ""), -1
        self._again = self._here = 0

    def survivable(self, error: RaypipeError) -> bool:
        """Return True if a run may recover from this type of error; ``counted`` checks the number of failures."""
        return self._most != 0 and isinstance(error, StageError | LinkError)

    def counted(self, error: RaypipeError, step: int) -> str:
        """Count a failure after ``step`` steps; return the reason why the run must end, or "" if it may recover."""
        self.count += 1
        if self._most != UNLIMITED and self.count > self._most:
            return f"it is failure {self.count} of this run, and FailureConfig(max_failures={self._most}) ends it"
        # Numbers differ from one try to the next: processes, times, addresses.
        kind = re.sub(r"0x[0-9a-fA-F]+|\d+", "#", (str(error).splitlines() or [""])[0])
        lost = isinstance(error, StageLostError | LinkError)
        at, before = self._last
        # A deterministic failure recurs at the same step, or is reported a step earlier after a rollback. A process
        # may be lost at any step on the way there.
        stuck = step == at if lost else step <= self._furthest
        self._here = self._here + 1 if stuck else 0
        self._again = self._again + 1 if stuck and kind == before else 0
        self._last, self._furthest = (step, kind), max(step, self._furthest)
        tries = MOST_LOST if lost else 0
        tries = MOST_LIGHTER if error.ran_out is not None else tries
        if self._again <= tries:
            more = f"{self._here + 1} failures came after {step} steps, and the run got no further between them"
            return "" if self._here < MOST_HERE else more
        times = "again" if self._again == 1 else f"{self._again + 1} times in a row"
        return f"the same failure came {times} after {step} steps, so trying once more would not help"


@dataclass
class Changing:
    """Manager of one run's recoveries, resizes, moves and re-partitions; it updates the components of the loop.

    Attributes:
        lease: lease on the run's folder; None if no other process can access the folder.
        recovery: makes the transitions; None if stages cannot fail separately, as in threads.
    """

    spec: RunSpec
    requests: Requests
    lease: Lease | None
    recovery: Transitions | None
    reporter: Reporter
    control: Control
    metrics: MetricsWriter
    checkpoints: Checkpoints
    ordering: Ordering
    progress: Progress

    def __post_init__(self) -> None:
        self._watcher = self.reporter.watcher
        self._failures = Failures(self.spec.max_failures, 0 if self.recovery is None else self.recovery.failures)
        self._step_s = 0.0  # duration of the last measured step
        self._torn = False  # True while stages may be inconsistent with progress: a transition failed half-way

    def survives(self, error: RaypipeError) -> bool:
        """Return True if ``recover`` may recover from this type of error."""
        return self.recovery is not None and self._failures.survivable(error)

    def recover(self, error: RaypipeError, follow: Follow, *, torn: bool = False, counts: bool = True) -> None:
        """Recover from a failure: bring all stages to the state of the same step, and resume from it.

        Args:
            follow: called with reports of steps that were completed before the failure but not yet processed.
            torn: True if stages may have different states, so that all of them must roll back.
            counts: False to leave this failure out of the number that max_failures limits.

        Raises:
            RaypipeError: the failure, if it cannot be survived.
        """
        progress, lease = self.progress, self.lease
        was, self._torn = progress.at.step, torn
        while True:
            if self.recovery is None or (counts and not self.survives(error)):
                raise error
            if counts:
                self._count(error)
            counts, self.recovery.failures = True, self._failures.count
            self._use_less_memory(error, self.recovery)
            if lease is not None:
                lease.check()
            self._watcher.update(message=f"recovering: {_first_line(error)}")
            begin_s = time.monotonic()
            try:
                # Processes or links failed, and not the computation.
                in_place = not self._torn and isinstance(error, StageLostError | LinkError)
                if in_place and self._recover_in_place(self.recovery, follow, begin_s):
                    return
                was, self._torn = max(was, progress.at.step), True
                back = self.recovery.roll_back(progress.copies.steps)
                self._roll_back(back)
                if back.stopped:
                    progress.copied = True  # no workers are left to copy
                    reason = self.requests.stop_reason
                    self._watcher.update(step=progress.at.step, stages=back.stages, message=reason)
                    return
                self.keep_copy()
                break
            except (StageError, LinkError) as another:
                error = another
        redone = was - progress.at.step
        numbers = {"kind": "roll back", "redone_steps": redone, "redone_seconds": round(redone * self._step_s, 3)}
        self._publish_recovery("recovery", f"from {back.source}", back, begin_s, **numbers)
        self._watcher.counted("lost_steps", redone)

    def _recover_in_place(self, recovery: Transitions, follow: Follow, begin_s: float) -> bool:
        """Try to recover without a rollback, by continuing with the replicas that are left; return True on success.

        Args:
            follow: as in ``recover``.
            begin_s: start of the recovery, as of ``time.monotonic()``.
        """
        steps = recovery.catch_up(self.progress.at.step)
        if steps is None:
            return False
        self.ordering.cancel_pending_saves()
        follow(iter(steps))
        back = recovery.regroup(self.progress.at.step)
        self._stay(back)
        replicas = "-".join(map(str, self.ordering.plan.plan.partition.replicas))
        reason = f"the run goes on with {replicas} workers"
        self._publish_recovery("regroup", reason, back, begin_s, completed=len(steps))
        return True

    def _publish_recovery(self, decision: str, reason: str, back: Recovered, begin_s: float, **numbers: Any) -> None:
        """Publish a recovery that began at ``begin_s``; ``decision`` is "recovery" (by a rollback) or "regroup"."""
        took_s = time.monotonic() - begin_s
        self._publish_change(decision, reason, back, took_s, **numbers)
        self._watcher.update(recovery=numbers.get("kind", decision))
        self._watcher.counted("recovery_seconds", took_s)

    def change(self) -> None:
        """Make the requested changes between two steps: resize, move, join, re-partition."""
        requests = self.requests
        if (resize := requests.take_resize()) is not None:
            self._make("resize", resize.reason, resize, resize.answer, num_stages=resize.num_stages)
        if nodes := requests.take_leaving():
            try:
                self._make("move", "nodes are about to be taken away", Move(nodes))
            except (StageError, LinkError):
                requests.leave(nodes)  # they still leave: move again once the run has recovered
                raise
        if requests.take_joining():
            self._make("join", "replicas are there again", Join())
        if (offer := requests.take_offer()) is not None:
            self._watcher.alert("cutting again", f"cutting the stages again: {offer.why}")
            took_s = self._make("replan", offer.why, offer, **offer.numbers)
            if took_s is not None:
                self.control.cut_taken(offer, self.ordering.plan.plan, took_s, self.progress.at.step)
                less = f"steps should take {offer.gain.share:.0%} less"
                self._watcher.alert("cut again", f"the stages were cut again within {took_s:.1f} s: {less}")

    def _make(
        self,
        decision: str,
        reason: str,
        change: Change,
        answer: Callable[[RaypipeError | None], None] = lambda error: None,
        **numbers: Any,
    ) -> float | None:
        """Make a change; return the seconds without training, or None if nothing was changed.

        Args:
            decision, reason: for events.
            answer: called with the PlanError if the change was refused or failed, else with None.

        Raises:
            Exception: the change failed half-way; a recovery must follow.
        """
        begin_s, progress = time.monotonic(), self.progress
        step = progress.at.step
        try:
            if self.recovery is None:
                raise PlanError(IN_THREADS)
            progress.mark()
            back = self.recovery.carry_out(change, step)
        except PlanError as error:
            self.reporter.event(f"{decision} refused", str(error), step=step, **numbers)
            answer(error)
            return None
        except Exception as error:
            self._torn = not isinstance(change, Join)  # a failed join leaves the training stages unchanged
            message = f"The run failed meanwhile, and recovers where it may: {_first_line(error)} Try again later."
            answer(PlanError(message))
            raise
        took_s = None
        if back is not None:
            if isinstance(change, Join):
                self._stay(back)
            else:
                self._roll_back(back)
            took_s = time.monotonic() - begin_s
            self._publish_change(decision, reason, back, took_s, **numbers)
        answer(None)
        return took_s

    def on_step(self, record: StepRecord, of_step: Sequence[StepReport]) -> None:
        """Record a step's duration."""
        if not any(report.copying for report in of_step):
            self._step_s = record.seconds

    def keep_copy(self) -> None:
        """Have all stages copy their state to memory, if the pipeline is empty and they have not copied it yet."""
        progress = self.progress
        if self.recovery is None or not self.spec.copy_interval_steps:
            return
        if progress.empty and not progress.copied:
            self.recovery.keep_copy(progress.at.step)
            self.ordering.copy_times.ordered(progress.at.step)
            self.copied()
            progress.copied = True

    def copied(self) -> None:
        """Record the data position of the in-memory copy that all stages have made, also in the run's folder."""
        progress = self.progress
        progress.mark()
        if self.reporter.try_to(self.metrics.write):  # first: a later driver reads the steps before the copy there
            self.reporter.try_to(progress.copies.write)

    def _count(self, error: RaypipeError) -> None:
        """Count and publish a failure.

        Raises:
            RaypipeError: the failure, with the reason why it ends the run.
        """
        step = self.progress.at.step
        why_not = self._failures.counted(error, step)
        numbers = {"step": step, "failures": self._failures.count, **detection_delay(error)}
        if why_not:
            self.reporter.event("give up", f"{_first_line(error)} ({why_not})", **numbers)
            raise type(error)(f"{error}\nThe run ends: {why_not}.")
        self.reporter.event("failure", _first_line(error), **numbers)
        self._watcher.counted("failures")

    def _use_less_memory(self, error: RaypipeError, recovery: Transitions) -> None:
        """Plan less memory for the worker that ran out of it; no effect after other failures.

        If no plan needs less, a worker whose process was killed is replaced with the same plan, because other
        processes may have used the memory.

        Raises:
            RaypipeError: the failure, if no plan needs less and the worker's process is alive.
        """
        if error.ran_out is None:
            return
        try:
            recovery.lighten(error.ran_out)
        except PlanError as impossible:
            step = self.progress.at.step
            if isinstance(error, StageLostError):
                self.reporter.event("warning", str(impossible), step=step)
                return
            self.reporter.event("give up", f"{_first_line(error)} ({impossible})", step=step)
            raise type(error)(f"{error}\nThe run ends: {impossible}") from None

    def _roll_back(self, back: Recovered) -> None:
        """Set the loop back to the step whose state the stages have loaded, and drop records and orders after it."""
        progress = self.progress
        self._torn = False
        progress.roll_back(back.step, back.position)
        self.reporter.try_to(lambda: self.metrics.go_back(progress.at.step))
        self._take_plan_of(back)
        self.ordering.forget(progress.at.step)
        self._save_dropped()
        if back.position is not None:  # that checkpoint may have been committed a moment ago, unknown here so far
            self.checkpoints.find()
        # A checkpoint of a later step may have been committed meanwhile. That step, and what follows it, is repeated.
        progress.saved = progress.completed = min(self.checkpoints.latest_step, progress.at.step)

    def _stay(self, back: Recovered) -> None:
        """Resume at the current step on other workers; orders that were not completed are issued again."""
        progress = self.progress
        progress.empty, progress.end_s, progress.copied = True, None, True
        self._take_plan_of(back)
        self.ordering.forget(progress.at.step)
        self.ordering.copy_times.soon()
        self._save_dropped()
        progress.saved = progress.completed = self.checkpoints.latest_step

    def _save_dropped(self) -> None:
        """Request a new checkpoint if the change dropped an unfinished one that the interval would not save again."""
        progress, checkpoints = self.progress, self.checkpoints
        # The manifest waits for the evaluation, which may be what failed.
        step = progress.saved
        dropped = progress.completed < step < self.spec.num_steps and not checkpoints.due_at(step)
        if checkpoints.forget_after(progress.at.step) or dropped:
            self.ordering.save_soon()

    def _take_plan_of(self, back: Recovered) -> None:
        """Adopt the new plan of a transition, if it has one, and restart the controller.

        If workers were replaced under the same plan, only the stages are measured anew, because their measurements are
        of the lost workers; links and schedule are the same.
        """
        plan = back.plan
        if plan is None:
            if back.replaced:  # measurements of the replaced worker do not apply
                self.requests.take_offer()
                self.control.workers_replaced(self.ordering.plan.plan)
            return
        self.ordering.plan = plan
        self.control.end()
        self.control.begin(plan, resumed=False)
        self.reporter.try_to(lambda: self.reporter.folder.write_plan(plan.plan.to_json()))
        self._watcher.planned(plan)

    def _publish_change(self, decision: str, reason: str, back: Recovered, seconds: float, **numbers: Any) -> None:
        """Publish the result of a change, with the duration of its phases."""
        step, checkpoint = self.progress.at.step, self.checkpoints.latest
        # Before the event, whose readers query the status.
        self._watcher.update(step=step, stages=back.stages, checkpoint=checkpoint)
        self.reporter.event(decision, reason, step=step, seconds=round(seconds, 3), **{**numbers, **back.to_event()})
        self._watcher.update(message=self.requests.stop_reason)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
