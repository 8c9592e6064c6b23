"""Status of a run: step, loss, speed, cost, and alerts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from raypipe.engine.io.run_files import read_events
from raypipe.engine.io.storage import Place
from raypipe.ir.report import StepRecord
from raypipe.ir.units import human_price

ALERTS = "alerts"
"""Name of the event in events.jsonl that lists a submission's alerts, written at its end."""


@dataclass(frozen=True, slots=True)
class Alert:
    """All events of one kind in this submission of a run.

    Attributes:
        kind: "checkpoint failed", "callback Name.on_step" and so on.
        count: number of events.
        first_step, last_step: steps done at the first and at the last event.
        message: message of the last event.
        in_a_row: number of consecutive failures at the last event; 0 for events that are not failures.
    """

    kind: str
    count: int
    first_step: int
    last_step: int
    message: str
    in_a_row: int = 0

    def __str__(self) -> str:
        """Format in one line; for several events as "checkpoint failed 2 times, after steps 1 to 68; last: message"."""
        if self.count == 1:
            return f"{self.kind}, after step {self.last_step}: {self.message}"
        return f"{self.kind} {self.times}, after steps {self.first_step} to {self.last_step}; last: {self.message}"

    @property
    def times(self) -> str:
        """Text on how often the event occurred: "3 times", "2 times in a row, 5 in all"."""
        if self.in_a_row < 2:
            return f"{self.count} times"
        return f"{self.in_a_row} times in a row" + f", {self.count} in all" * (self.count > self.in_a_row)

    def since(self, shown: int) -> str:
        """Describe the events that a reader has not seen yet.

        Returns the message alone if only one event is new, and it is not one of several consecutive failures.

        Args:
            shown: number of events that the reader has seen, from the first on.
        """
        return (
            self.message
            if self.count == shown + 1 and self.in_a_row < 2
            else f"{self.kind} {self.times}, last: {self.message}"
        )


def with_alert(known: tuple[Alert, ...], kind: str, message: str, step: int, in_a_row: int = 0) -> tuple[Alert, ...]:
    """Count one more event in the alerts ``known``, which have one alert of each kind; return the new alerts.

    Args:
        step: steps done at the event.
        in_a_row: number of consecutive failures; 0 for events that are not failures.
    """
    for at, alert in enumerate(known):
        if alert.kind == kind:
            more = replace(alert, count=alert.count + 1, last_step=step, message=message, in_a_row=in_a_row)
            return (*known[:at], more, *known[at + 1 :])
    return (*known, Alert(kind, 1, step, step, message, in_a_row))


def in_words(alerts: Iterable[Alert]) -> str:
    """Format kinds and counts: "checkpoint failed (68 times), file not written (once)", for example."""
    return ", ".join(f"{a.kind} ({'once' if a.count == 1 else f'{a.count} times'})" for a in alerts)


def as_event(alerts: Iterable[Alert]) -> list[dict[str, Any]]:
    """Return the alerts as the fields of an event."""
    return [asdict(alert) for alert in alerts]


def alerts_in(run: Place) -> tuple[Alert, ...]:
    """Read the alerts of a run's newest submission from events.jsonl; empty if the submission has not ended.

    Raises:
        CheckpointError: events.jsonl cannot be read.
    """
    alerts: tuple[Alert, ...] = ()
    for event in read_events(run):
        if event["decision"] == "start":
            alerts = ()
        elif event["decision"] == ALERTS:
            alerts = tuple(Alert(**one) for one in event["alerts"])
    return alerts


State = Literal["starting", "running", "stopping", "stopped", "finished", "failed"]
Stages = tuple[dict[str, Any], ...]
"""Host, process id and versions of each worker, by worker; empty for stages in threads."""


def steps_done(step: int, num_steps: int) -> str:
    """Format "step 3/10"; "" before the number of steps is known."""
    return f"step {step}/{num_steps}" if num_steps else ""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Status of a run.

    Attributes:
        name: name of the run.
        path: the run's folder.
        step, num_steps: optimizer steps done, and steps of the whole run (0 before the number is known).
        first_step: steps that the run had done when this submission began.
        source: checkpoint or stages from which the run resumed, as text.
        loss, bubble_fraction, lr, goodput: numbers of the last step, as in StepRecord; goodput is 0 if unknown.
        step_s: seconds per step, a moving average; seconds_left is derived from it.
        samples_per_s, tokens_per_s: samples and tokens of the last step, divided by step_s; 0 if unknown.
        checkpoint: path of the newest complete checkpoint.
        checkpoint_error: reason why the last checkpoint could not be saved; "" if it was saved.
        schedule: schedule of the last step, if the controller may change it; else "".
        retunes: number of changes by the controller in this submission.
        recovery: kind of the last recovery: "roll back" of all stages, or "regroup" without the lost replicas; ""
            before the first.
        message: what the run waits for, or why it stopped or failed.
        cost: cost so far, in the currency of PipelineConfig(worker_price_per_hour); None if that is not set.
        stages: host, process id and versions of each worker that made the last step, or, after a recovery, a resize or
            a move, of each worker that has the state of this step.
        alerts: alerts of this submission, one of each kind: checkpoints that failed, callbacks that raised, files that
            could not be written, stages that were lost.
    """

    name: str
    path: str
    state: State
    step: int = 0
    num_steps: int = 0
    first_step: int = 0
    source: str = ""
    loss: float | None = None
    samples_per_s: float = 0.0
    tokens_per_s: float = 0.0
    bubble_fraction: float = 0.0
    lr: float | None = 0.0
    goodput: float = 0.0
    step_s: float = 0.0
    checkpoint: str = ""
    checkpoint_error: str = ""
    schedule: str = ""
    retunes: int = 0
    recovery: str = ""
    message: str = ""
    cost: float | None = None
    stages: Stages = ()
    alerts: tuple[Alert, ...] = ()

    @property
    def seconds_left(self) -> float:
        return max(self.num_steps - self.step, 0) * self.step_s

    def after(self, record: StepRecord, stages: Stages) -> RunStatus:
        """Return the status after one more step, made by these workers."""
        step_s = 0.9 * self.step_s + 0.1 * record.seconds if self.step_s else record.seconds
        return replace(
            self,
            step=record.step + 1,
            loss=record.loss,
            samples_per_s=record.samples / step_s if step_s else 0.0,
            tokens_per_s=record.tokens / step_s if step_s else 0.0,
            bubble_fraction=record.bubble_fraction,
            lr=record.lr,
            goodput=record.goodput,
            step_s=step_s,
            schedule=record.schedule,
            stages=stages,
        )

    def __str__(self) -> str:
        parts = [", ".join(filter(None, (f"{self.name}: {self.state}", steps_done(self.step, self.num_steps))))]
        if self.loss is not None:
            tokens = f"{self.tokens_per_s:.0f} tokens/s, " if self.tokens_per_s else ""
            goodput = f", goodput {self.goodput:.0%}" if self.goodput else ""
            idle = f"idle {self.bubble_fraction:.0%}"
            parts.append(f"loss {self.loss:.4f}, {self.samples_per_s:.0f} samples/s, {tokens}{idle}{goodput}")
        if self.state == "running" and self.step_s:
            minutes, seconds = divmod(round(self.seconds_left), 60)
            parts.append(f"left {minutes}:{seconds:02d}")
        if self.schedule:
            parts.append(f"{self.schedule}, retuned {self.retunes} times")
        if self.cost is not None:
            parts.append(f"cost {human_price(self.cost)}")
        if self.checkpoint:
            parts.append(f"checkpoint {self.checkpoint}")
        if self.alerts:
            parts.append(f"alerts: {in_words(self.alerts)}")
        if self.message:
            parts.append(self.message.splitlines()[0])
        return "; ".join(parts)
