"""Journal of a run: records of its steps, status and outcome, for any number of readers.

The loop writes the journal. Each reader continues from the index of the last record that it has read. The driver actor
serves its journal over Ray; the journal of a run in threads of this process is read directly. The journal keeps the
newest records; earlier ones are in the run's folder, see ``engine/io/run_files.py``.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from raypipe.errors import RaypipeError, StageError
from raypipe.ir.communication import LinkEstimate
from raypipe.ir.report import KeptRecords, StepRecord, StepReport
from raypipe.ir.timeline import Timeline
from raypipe.planner.controller import ControllerDecision
from raypipe.run.spec import Outcome, PlanInForce
from raypipe.run.status import Alert, RunStatus, Stages, with_alert

GATHER_S = 0.25
KEPT_RECORDS = 4096
"""Maximum number of records in memory: more than the loop collects before it writes them to the run's folder."""


class News(NamedTuple):
    """Answer to a reader of a journal: new records, status, and outcome.

    Attributes:
        records: new records in order. If the run was rolled back, a step occurs again; the reader then drops its
            earlier record of this step and all records of later steps.
        status: current status.
        outcome, error: exactly one is set once the run has ended; both are None before.
        end: number of records ever written, including these; argument ``since`` of the reader's next call.
    """

    records: list[StepRecord]
    status: RunStatus
    outcome: Outcome | None
    error: BaseException | None
    end: int

    @property
    def ended(self) -> bool:
        return self.outcome is not None or self.error is not None


class Journal:
    """Records and status of a run, written by its thread and read by others.

    Args:
        name, path: name of the run, and its folder.

    Attributes:
        predicted: simulated timeline of one step of the current plan; None if that plan has no predicted times.
    """

    def __init__(self, name: str, path: str) -> None:
        self._changed = threading.Condition()
        self._records = KeptRecords(most=KEPT_RECORDS)
        self._status = RunStatus(name=name, path=path, state="starting")
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._interrupts, self._waits = 0, ""
        self.predicted: Timeline | None = None

    @property
    def status(self) -> RunStatus:
        """Current status."""
        with self._changed:
            return self._status

    def resumed(self, records: Sequence[StepRecord], step: int, checkpoint: str, source: str, stages: Stages) -> None:
        """Publish that the run resumes after ``step`` steps.

        Args:
            records: records of the newest of these steps.
            checkpoint: path of the newest checkpoint.
            source: origin of the state as text: "from .../step_0000100".
            stages: facts of the workers that have the state of this step.
        """
        with self._changed:
            self._records.extend(records)
            self.update(step=step, first_step=step, checkpoint=checkpoint, source=source, stages=stages)

    def step(self, record: StepRecord, reports: Sequence[StepReport], stages: Stages) -> None:
        """Publish a completed step; after a rollback it may repeat an earlier step.

        Args:
            stages: facts of the workers that made the step, shown in the status together with it.
        """
        with self._changed:
            self._records.append(record)
            self._status = self._status.after(record, stages)
            if self._waits and self._status.message == self._waits:
                self.update(message="")
            self._changed.notify_all()

    def evaluated(self, record: StepRecord) -> None:
        """Publish the record of the last step again, with its evaluation."""
        with self._changed:
            self._records.append(record)
            self._changed.notify_all()

    def decided(self, decision: ControllerDecision) -> None:
        """Count a decision of the controller in the status, if it changed the settings."""
        if decision.choice is not None:
            with self._changed:
                self.update(retunes=self._status.retunes + 1)

    def estimated(self, links: Sequence[LinkEstimate]) -> None:
        """Ignore the controller's estimates of links, which a journal does not keep."""

    def planned(self, plan: PlanInForce) -> None:
        """Keep the predicted timeline of a plan that is in force from now on."""
        self.predicted = plan.predicted

    def counted(self, metric: str, value: float = 1.0) -> None:
        """Ignore an increment of a metric (see raypipe.metrics), which a journal does not keep."""

    def begins(self, doing: str = "", **changes: Any) -> None:
        """Publish a phase of the start of a run. After a stop request, state and message are not changed.

        Args:
            doing: what the run is doing, as text; "" once the stages are ready, which sets the state to "running".
            changes: further fields of the status.
        """
        with self._changed:
            if self._status.state == "starting":
                changes |= {"state": "starting" if doing else "running", "message": doing}
            self.update(**changes)

    def update(self, **changes: Any) -> None:
        """Change fields of the status."""
        with self._changed:
            self._status = dataclasses.replace(self._status, **changes)
            self._changed.notify_all()

    def waits(self, message: str) -> None:
        """Publish a message in the status, and wake waiting readers; the next step clears it."""
        with self._changed:
            self._interrupts += 1
            self._waits = message
            self.update(message=message)

    def alert(self, kind: str, message: str, step: int | None = None, in_a_row: int = 0) -> None:
        """Add an alert to the status, and wake waiting readers.

        Args:
            kind: kind of the alert; alerts of one kind are counted together.
            step: steps done at the event; None for the current number.
            in_a_row: number of consecutive failures, this one included; 0 for events that are not failures.
        """
        with self._changed:
            self._interrupts += 1
            at = self._status.step if step is None else step
            self.update(alerts=with_alert(self._status.alerts, kind, message, at, in_a_row))

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """All alerts since this run was last submitted, oldest first."""
        return self.status.alerts

    def stopping(self, reason: str) -> None:
        """Publish that a stop was requested, and wake waiting readers."""
        with self._changed:
            if self._outcome is None and self._error is None:
                self._interrupts += 1
                self.update(state="stopping", message=reason)

    def end(self, outcome: Outcome | None, error: BaseException | None) -> None:
        """Publish the outcome, or the error; an Exception that is no RaypipeError is wrapped in a StageError."""
        with self._changed:
            status = self._status
            if outcome is not None:
                changes: dict[str, Any] = {"state": "stopped" if outcome.stopped else "finished", "step": outcome.step}
                changes |= {"message": outcome.stopped, "checkpoint": outcome.checkpoint or status.checkpoint}
            else:
                if isinstance(error, Exception) and not isinstance(error, RaypipeError):
                    error = StageError(f"The run {status.name!r} failed: {type(error).__name__}: {error}")
                changes = {"state": "failed", "message": str(error)}
            self._outcome, self._error = outcome, error
            self.update(**changes)

    def news(self, since: int, wait_s: float) -> News:
        """Wait up to ``wait_s`` seconds for a record, an alert or the end of the run, and return the new records.

        After the first record the call waits GATHER_S seconds for more, because one reply per step would cost more than
        a short step. With ``wait_s`` 0 it returns at once.

        Args:
            since: number of records that the reader has received or skipped: ``end`` of its last call, at first 0.

        Returns:
            Records from number ``since`` on. Records that the journal no longer keeps are missing: then ``end`` is
            greater than ``since`` plus the number of records.
        """
        with self._changed:
            interrupts = self._interrupts
            self._changed.wait_for(
                lambda: self._records.end != since or self._over or self._interrupts != interrupts, timeout=wait_s
            )
            if self._records.end != since or self._over:
                self._changed.wait_for(lambda: self._over, timeout=min(wait_s, GATHER_S))
            # A number above the end is from an earlier driver: then all records are new.
            records = self._records.since(since if since <= self._records.end else 0)
            return News(records, self._status, self._outcome, self._error, self._records.end)

    @property
    def _over(self) -> bool:
        return self._outcome is not None or self._error is not None
