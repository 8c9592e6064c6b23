"""What changes a run's stages while it goes on: a failure that is survived, a resize, another cut, other workers.

    loop: steps --failure--> survive --+
                 ----wanted--> change --+--> Recoverer --> Recovered --> go back: progress, orders, records
                                                                          take another plan, if there is one

The loop calls between two steps, or after a failure; what it knows of the run and what is changed here is one
``Progress``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from raypipe.engine.metrics import MetricsWriter
from raypipe.engine.rundir import RunFolder
from raypipe.errors import LinkError, PlanError, RaypipeError, StageError, StageLostError
from raypipe.ir.report import StepRecord, StepReport
from raypipe.runtime.run.calls import Calls
from raypipe.runtime.run.checkpoints import Checkpoints
from raypipe.runtime.run.control import Control
from raypipe.runtime.run.controller_thread import ActiveSettings
from raypipe.runtime.run.lease import Lease
from raypipe.runtime.run.notes import Notes
from raypipe.runtime.run.ordering import Ordering
from raypipe.runtime.run.progress import Progress
from raypipe.runtime.run.recovery import Failures, Recovered, Recoverer, noticed
from raypipe.runtime.run.requests import Requests
from raypipe.runtime.run.spec import PlanInForce, RunSpec, Watcher

__all__ = ["IN_THREADS", "Changing", "Parts"]

IN_THREADS = "Stages in threads of one process stay as they are; start the run with local=False."

Follow = Callable[[Iterator[list[list[StepReport]]]], None]


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop is made of, as far as a change of the stages needs it too."""

    spec: RunSpec
    folder: RunFolder
    notes: Notes
    watcher: Watcher
    requests: Requests
    control: Control
    metrics: MetricsWriter
    checkpoints: Checkpoints
    ordering: Ordering
    lease: Lease | None
    calls: Calls

    def tell(self, decision: str, reason: str, **numbers: Any) -> None:
        """Whoever reads events.jsonl, whoever looks at the status, and callbacks."""
        self.notes.event(decision, reason, **numbers)
        self.watcher.tell(checkpoint=self.checkpoints.latest)
        failures = self.checkpoints.failures
        if decision == "checkpoint failed" and failures:
            why = f"The checkpoint after {numbers['step']} steps was not saved: {reason}"
            self.watcher.tell(checkpoint_error=why)
            if failures == 1:  # what follows is likely to be the same
                self.watcher.alert(f"{why} Training goes on.")
        if decision == "checkpoint":
            self.watcher.tell(checkpoint_error="")
            if failures:
                self.watcher.alert(f"Checkpoints are saved again, after {failures} that were not.")
            self.calls.checkpoint(numbers["step"], self.checkpoints.latest)
        else:
            self.calls.event(decision, reason, numbers)


class Changing:
    """Changes of the stages of one run.

    Args:
        recovery: brings the stages back, or gives them another plan; None where they cannot fail by themselves, as
            threads.
    """

    def __init__(self, parts: Parts, progress: Progress, recovery: Recoverer | None) -> None:
        self._parts, self._progress, self._recovery = parts, progress, recovery
        self._failures = Failures(parts.spec.max_failures, 0 if recovery is None else recovery.failures)
        self._replanning = None if recovery is None else recovery.replanning
        self._groups, self._replays = (None, None) if recovery is None else (recovery.groups, recovery.replays)
        self._step_s = 0.0  # of the last one that was measured
        self._torn = False  # some stages may have another state, or another plan, than the run stands at
        if self._replanning is not None:
            self._replanning.serve(parts.requests.offer)
            parts.ordering.measures = self._replanning.measures

    def survive(self, error: RaypipeError, follow: Follow) -> None:
        """Have all stages brought back to one state, and go on from there.

        Args:
            follow: is called with steps that were made before the failure, and of which it learns only afterwards.

        Raises:
            RaypipeError: the failure, where it is not to be survived.
        """
        progress, watcher, lease = self._progress, self._parts.watcher, self._parts.lease
        was = progress.at.step
        while True:
            if self._recovery is None or not self._failures.survivable(error):
                raise error
            self._count(error)
            self._recovery.failures = self._failures.count
            self._lighten(error)
            if lease is not None:
                lease.check()
            watcher.tell(message=f"recovering: {_line(error)}")
            begin_s = time.monotonic()
            try:
                if not self._torn and _was_lost(error) and self._stayed(error, follow, begin_s):
                    return
                was, self._torn = max(was, progress.at.step), True
                back = self._recovery.recover(progress.marks.steps)
                self._go_back(back)
                if back.stopped:
                    progress.copied = True  # there are no workers that could
                    watcher.tell(step=progress.at.step, message=self._parts.requests.stop_reason)
                    return
                self.keep_copy()
                break
            except (StageError, LinkError) as another:
                error = another
        redone = was - progress.at.step
        numbers: dict[str, Any] = {"redone_steps": redone, "redone_seconds": round(redone * self._step_s, 3)}
        if self._replays is not None and _was_lost(error) and error.ran_out is None:
            numbers["not_replayed"] = self._replays.why_not
        self._tell_recovery("roll back", f"from {back.source}", back, begin_s, **numbers)
        watcher.counted("lost_steps", redone)

    def _stayed(self, error: RaypipeError, follow: Follow, begin_s: float) -> bool:
        """Whether the run goes on where it is: without replicas that it lost, or with others in place of lost workers.

        Args:
            error: the failure; one of memory wants another plan.
        """
        progress, parts = self._progress, self._parts
        for way in (self._groups, self._replays if error.ran_out is None else None):
            steps = None if way is None else way.complete(progress.at.step)
            if way is None or steps is None:
                continue
            parts.ordering.save_and_copy_no_more()
            follow(iter(steps))
            # Workers forget what they have done when links are opened anew; a later driver finds it here.
            if parts.notes.try_to(parts.metrics.write):
                parts.ordering.learn(written=progress.at.step)
            back = way.regroup(progress.at.step)
            self._stay(back)
            if way is self._groups:
                replicas = "-".join(map(str, parts.ordering.plan.plan.partition.replicas))
                reason = f"the run goes on with {replicas} workers"
                self._tell_recovery("regroup", reason, back, begin_s, decision="regroup", completed=len(steps))
            else:
                alone = (
                    f"{', '.join(back.replaced)} did {back.replayed_steps} steps again alone" if back.replaced else ""
                )
                reason = alone or "only links are new"
                numbers: dict[str, Any] = {"redone_steps": 0, "redone_seconds": 0.0, "completed": len(steps)}
                self._tell_recovery("replay", reason, back, begin_s, replayed_steps=back.replayed_steps, **numbers)
                parts.watcher.counted("replays")
            return True
        return False

    def _tell_recovery(
        self, kind: str, reason: str, back: Recovered, begin_s: float, decision: str = "recovery", **numbers: Any
    ) -> None:
        """The run goes on after a failure.

        Args:
            kind: how: all went back, one was replayed, or it does without.
            begin_s: when it was noticed.
        """
        took_s = time.monotonic() - begin_s
        told = {"kind": kind} if decision == "recovery" else {}
        self._tell_change(decision, reason, back, took_s, **told, **numbers)
        self._parts.watcher.tell(recovery=kind)
        self._parts.watcher.counted("recovery_seconds", took_s)

    def _stay(self, back: Recovered) -> None:
        """The stages have the state that they had, on other workers: what was ordered is ordered again."""
        parts, progress = self._parts, self._progress
        progress.empty, progress.end_s, progress.copied = True, None, True
        self._take_plan_of(back)
        parts.ordering.forget(progress.at.step, progress.skipped)
        parts.ordering.copy_times.soon()
        self._save_dropped()
        progress.saved = progress.completed = parts.checkpoints.latest_step

    def change(self) -> None:
        """Between two steps, do what is wanted: another number of stages, other workers, another cut."""
        requests = self._parts.requests
        if (asked := requests.take_resize()) is not None:
            count, replicas, planned = asked.num_stages, asked.num_replicas, asked.planned
            self._change_to(
                "resize",
                asked.reason,
                lambda on, at: on.resize(count, at, planned, replicas),
                asked.answer,
                num_stages=count,
            )
        if nodes := requests.take_leaving():
            try:
                self._change_to("move", "nodes are about to be taken away", lambda on, at: on.move(nodes, at))
            except (StageError, LinkError):
                requests.leave(nodes)  # they go all the same: once the run has recovered, it moves
                raise
        if requests.take_joining() and (groups := self._groups) is not None:
            self._change_to("join", "replicas are there again", lambda _, at: groups.join(at), take=self._stay)
        if (offer := requests.take_offer()) is not None:
            self._parts.watcher.alert(f"cutting the stages again: {offer.why}")
            took_s = self._change_to("replan", offer.why, lambda on, at: on.take(offer, at), **offer.numbers)
            if took_s is not None and self._replanning is not None:
                self._replanning.taken(offer, self._parts.ordering.plan.plan, took_s, self._progress.at.step)
                less = f"steps should take {offer.gain.share:.0%} less"
                self._parts.watcher.alert(f"the stages were cut again within {took_s:.1f} s: {less}")

    def heard(self, record: StepRecord, of_step: Sequence[StepReport], setting: ActiveSettings) -> None:
        """A step is over; where a stage has become slower or faster for good, ``change`` will be wanted."""
        if not any(report.copying for report in of_step):
            self._step_s = record.seconds
            if self._replays is not None:
                self._replays.heard(record.seconds, of_step)
        if self._replanning is not None:
            self._replanning.heard(record.step, record.seconds, of_step, setting.spec)

    def keep_copy(self) -> None:
        """Before the first step after a beginning, where nothing is under way: copies of what all have now."""
        progress = self._progress
        if self._recovery is None or not self._parts.spec.copy_interval_steps:
            return
        if progress.empty and not progress.copied:
            self._recovery.keep_copy(progress.at.step)
            self._parts.ordering.copy_times.ordered(progress.at.step)
            self.copied()
            progress.copied = True

    def copied(self) -> None:
        """Every stage keeps a copy of the state that it has now; a later driver may have to go back to it, too."""
        parts, progress = self._parts, self._progress
        progress.mark()
        if parts.notes.try_to(parts.metrics.write):  # first: it finds the steps before there
            parts.ordering.learn(written=progress.at.step)
            parts.notes.try_to(progress.marks.write)

    def _count(self, error: RaypipeError) -> None:
        """One failure more.

        Raises:
            RaypipeError: the failure, with the reason why the run does not go on after it.
        """
        step = self._progress.at.step
        why_not = self._failures.counted(error, step)
        numbers = {"step": step, "failures": self._failures.count, **noticed(error)}
        if why_not:
            self._parts.tell("give up", f"{_line(error)} ({why_not})", **numbers)
            raise type(error)(f"{error}\nThe run ends: {why_not}.")
        self._parts.tell("failure", _line(error), **numbers)
        self._parts.watcher.counted("failures")

    def _lighten(self, error: RaypipeError) -> None:
        """Where memory was not enough, go on with a plan that needs less.

        A process that was ended from outside may have been ended for what others held: without another plan it is
        replaced like any that is lost, as often as Failures allows.

        Raises:
            RaypipeError: the failure; there is no such plan, and the same one would fail again.
        """
        if error.ran_out is None or self._recovery is None:
            return
        try:
            self._recovery.lighten(error.ran_out)
        except PlanError as impossible:
            if isinstance(error, StageLostError):
                self._parts.tell("warning", str(impossible), step=self._progress.at.step)
                return
            self._parts.tell("give up", f"{_line(error)} ({impossible})", step=self._progress.at.step)
            raise type(error)(f"{error}\nThe run ends: {impossible}") from None

    def _change_to(
        self,
        decision: str,
        reason: str,
        change: Callable[[Recoverer, int], Recovered | None],
        answer: Callable[[RaypipeError | None], None] = lambda error: None,
        take: Callable[[Recovered], None] | None = None,
        **numbers: Any,
    ) -> float | None:
        """Seconds for which nothing trained; None where nothing was changed."""
        begin_s, progress = time.monotonic(), self._progress
        step = progress.at.step
        try:
            if self._recovery is None:
                raise PlanError(IN_THREADS)
            progress.mark()
            back = change(self._recovery, step)
        except PlanError as error:
            self._parts.tell(f"{decision} refused", str(error), step=step, **numbers)
            answer(error)
            return None
        except Exception as error:
            self._torn = decision != "join"  # which changes nobody who trains
            answer(PlanError(f"The run failed meanwhile, and recovers where it may: {_line(error)} Ask again later."))
            raise
        took_s = None
        if back is not None:
            (take or self._go_back)(back)
            took_s = time.monotonic() - begin_s
            self._tell_change(decision, reason, back, took_s, **numbers)
        answer(None)
        return took_s

    def _go_back(self, back: Recovered) -> None:
        """The stages have the state of this or an earlier step: forget what came after it, and order it again."""
        parts, progress = self._parts, self._progress
        self._torn = False
        progress.go_back(back)
        parts.notes.try_to(lambda: parts.metrics.go_back(progress.at.step))
        self._take_plan_of(back)
        parts.ordering.forget(progress.at.step, progress.skipped)
        self._save_dropped()
        if back.position is not None:  # the checkpoint may have come to count a moment ago, and not be known here yet
            parts.checkpoints.find()
        # One of a later step may have come to count meanwhile. That step, and what belongs behind it, is done again.
        progress.saved = progress.completed = min(parts.checkpoints.latest_step, progress.at.step)

    def _save_dropped(self) -> None:
        """A checkpoint that was being written is not completed by other workers; somebody may wait for it."""
        progress, checkpoints = self._progress, self._parts.checkpoints
        # An evaluation comes before the manifest, and may be where the failure was.
        step = progress.saved
        asked = progress.completed < step < self._parts.spec.num_steps and not checkpoints.due_at(step)
        if checkpoints.forget_after(progress.at.step) or asked:
            self._parts.ordering.save_soon()

    def _take_plan_of(self, back: Recovered) -> None:
        if back.plan is not None:
            self._take_plan(back.plan)
        elif back.replaced and self._replanning is not None:  # what was measured of the worker before says nothing
            self._parts.requests.take_offer()
            self._replanning.begin(self._parts.ordering.plan.plan)

    def _take_plan(self, plan: PlanInForce) -> None:
        """The stages run another plan from now on; the controller begins anew, for it knew other stages."""
        parts = self._parts
        parts.ordering.plan = plan
        if self._replanning is not None:
            self._replanning.begin(plan.plan)
            parts.ordering.measures = self._replanning.measures
        parts.control.end()
        parts.control.begin(plan.retune, resumed=False)
        parts.notes.try_to(lambda: parts.folder.write_plan(plan.plan.to_json()))
        parts.watcher.planned(plan)

    def _tell_change(self, decision: str, reason: str, back: Recovered, seconds: float, **numbers: Any) -> None:
        """Tell what recovery or resizing came to, and how long its parts took."""
        step = self._progress.at.step
        self._parts.watcher.tell(step=step, stages=back.stages)  # who reads the event may ask for them at once
        self._parts.tell(decision, reason, step=step, seconds=round(seconds, 3), **{**numbers, **back.told()})
        self._parts.watcher.tell(message=self._parts.requests.stop_reason)


def _was_lost(error: RaypipeError) -> bool:
    """Whether processes or links failed, and not what they compute."""
    return isinstance(error, StageLostError | LinkError)


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
