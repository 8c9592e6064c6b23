"""Journal: what one run tells everybody who watches it, from its first step to how it ended.

The loop writes, any number of watchers read from where they stand. The driver actor has one and answers for it
over Ray; a run in threads of this process is watched directly. It keeps the last records; those before are in the
run's folder, see ``engine/metrics.py``.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from raypipe.errors import RaypipeError, StageError
from raypipe.ir.kept_records import KeptRecords
from raypipe.ir.links import LinkEstimate
from raypipe.ir.report import StepRecord, StepReport
from raypipe.planner.control import ControllerDecision
from raypipe.runtime.run.spec import Outcome, PlanInForce
from raypipe.runtime.run.status import RunStatus

__all__ = ["KEPT_RECORDS", "Journal", "News"]

GATHER_S = 0.25
KEPT_RECORDS = 4096
"""More than may be missing in the run's folder."""


class News(NamedTuple):
    """What is new.

    Attributes:
        records: a step comes again when a run goes back, and then counts instead of the one told before, with all
            steps after it.
        status: where the run stands.
        outcome, error: how it ended; one of them once it has.
        end: records that were ever told, these included: what to ask for next.
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
    """Written by the thread of the run, read by others.

    Args:
        name, path: of the run and its folder.
    """

    def __init__(self, name: str, path: str) -> None:
        self._changed = threading.Condition()
        self._records = KeptRecords(most=KEPT_RECORDS)
        self._status = RunStatus(name=name, path=path, state="starting")
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._alerts, self._alert = 0, ""

    @property
    def status(self) -> RunStatus:
        """Where the run stands now."""
        with self._changed:
            return self._status

    def resumed(self, records: Sequence[StepRecord], step: int, checkpoint: str, source: str) -> None:
        """The run goes on after ``step`` steps; these are the records of the last ones.

        Args:
            checkpoint: the newest one.
            source: what it goes on from, in words: "from .../step_0000100".
        """
        with self._changed:
            self._records.extend(records)
            self._status = dataclasses.replace(
                self._status, step=step, first_step=step, checkpoint=checkpoint, source=source
            )
            self._changed.notify_all()

    def step(self, record: StepRecord, reports: Sequence[StepReport]) -> None:
        """One more step, or one that was done again after a failure; ``reports`` are those of its stages."""
        with self._changed:
            self._records.append(record)
            self._status = self._status.after(record)
            if self._alert and self._status.message == self._alert:
                self._status = dataclasses.replace(self._status, message="")
            self._changed.notify_all()

    def evaluated(self, record: StepRecord) -> None:
        """The record of the last step again, with an evaluation."""
        with self._changed:
            self._records.append(record)
            self._changed.notify_all()

    def decided(self, decision: ControllerDecision) -> None:
        """The controller has said something; what it turned counts."""
        if decision.choice is not None:
            with self._changed:
                self._status = dataclasses.replace(self._status, retunes=self._status.retunes + 1)

    def estimated(self, links: Sequence[LinkEstimate]) -> None:
        """What the controller knows of the links."""

    def planned(self, plan: PlanInForce) -> None:
        """The run has another plan."""

    def counted(self, metric: str, value: float = 1.0) -> None:
        """Something that metrics count has happened; see raypipe.metrics."""

    def begins(self, doing: str = "", **changes: Any) -> None:
        """What it does before its first step, "" once the stages are ready. A wish to stop is not covered up."""
        with self._changed:
            if self._status.state == "starting":
                changes |= {"state": "starting" if doing else "running", "message": doing}
            self._status = dataclasses.replace(self._status, **changes)
            self._changed.notify_all()

    def tell(self, **changes: Any) -> None:
        """Change fields of the status."""
        with self._changed:
            self._status = dataclasses.replace(self._status, **changes)
            self._changed.notify_all()

    def alert(self, message: str) -> None:
        """Something has happened that everybody hears at once, also those who wait; the next step takes it back."""
        with self._changed:
            self._alerts += 1
            self._alert = message
            self._status = dataclasses.replace(self._status, message=message)
            self._changed.notify_all()

    def stopping(self, reason: str) -> None:
        """Somebody asked the run to stop."""
        with self._changed:
            if self._outcome is None and self._error is None:
                self._status = dataclasses.replace(self._status, state="stopping", message=reason)

    def end(self, outcome: Outcome | None, error: BaseException | None) -> None:
        """The run is over. An error that is not raypipe's own is told with its name."""
        changes: dict[str, Any]
        if outcome is not None:
            state = "stopped" if outcome.stopped else "finished"
            changes = {"state": state, "message": outcome.stopped, "step": outcome.step}
            changes["checkpoint"] = outcome.checkpoint or self._status.checkpoint
        else:
            if isinstance(error, Exception) and not isinstance(error, RaypipeError):
                error = StageError(f"The run {self._status.name!r} failed: {type(error).__name__}: {error}")
            changes = {"state": "failed", "message": str(error)}
        with self._changed:
            self._outcome, self._error = outcome, error
            self._status = dataclasses.replace(self._status, **changes)
            self._changed.notify_all()

    def news(self, since: int, wait_s: float) -> News:
        """Records number ``since`` and later; waits up to ``wait_s`` for the first of them, an alert, or the end.

        Who asks so late that the first of them is not kept any more gets those that are: ``end`` tells the difference.
        What comes shortly after the first is told with it: an answer per step would cost a driver of quick steps more
        than the steps do. With ``wait_s`` 0 the answer is what is known now.
        """
        with self._changed:
            alerts = self._alerts
            self._changed.wait_for(
                lambda: self._records.end != since or self._over or self._alerts != alerts, timeout=wait_s
            )
            if self._records.end != since or self._over:
                self._changed.wait_for(lambda: self._over, timeout=min(wait_s, GATHER_S))
            # A number that was never reached is of a driver before this one: all that is known is new then.
            found = self._records.since(since if since <= self._records.end else 0)
            return News(found, self._status, self._outcome, self._error, self._records.end)

    @property
    def _over(self) -> bool:
        return self._outcome is not None or self._error is not None
