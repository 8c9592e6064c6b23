"""Callback and the arguments of its methods."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from raypipe.config.paths import absolute_path
from raypipe.ir.report import StepRecord


class RunStart(NamedTuple):
    """Beginning of a run, or of its continuation.

    Attributes:
        name, path: of the run and its folder.
        step, num_steps: optimizer steps done by earlier submissions, and in all; a driver that takes a run over
            begins with more steps, too.
        settings: learning rate, seed, schedule and so on, by the labels of settings.json.
        config: config.yaml of the run's folder, as text.
    """

    name: str
    path: str
    step: int
    num_steps: int
    settings: Mapping[str, str | int | float | bool | None]
    config: str


class Event(NamedTuple):
    """Line of events.jsonl.

    Attributes:
        step: optimizer steps done.
        decision: its first word: "recovery", "resize", "switch" and so on.
        reason: a sentence.
        numbers: other fields of the line.
    """

    step: int
    decision: str
    reason: str
    numbers: Mapping[str, Any]


class RunEnd(NamedTuple):
    """End of a run.

    Attributes:
        step: optimizer steps done.
        checkpoint: the newest one, or empty.
        stopped: reason of an end before the last step, or empty.
        error: reason of a failure, in a line, or empty.
    """

    step: int
    checkpoint: str
    stopped: str = ""
    error: str = ""


class Callback:
    """Methods that a run calls; override those that you need.

        class Watch(raypipe.Callback):
            def on_step(self, record):
                if record.loss > 10:
                    print("step", record.step, "has a loss of", record.loss)

        PipelineTrainer(..., callbacks=[Watch()])

    All are called in one thread, one after the other, in the process that runs the loop: the driver actor of a run on
    Ray, which gets a copy of the object as it was when the run was started, and this process with ``local=True``.
    Training does not wait for them. What they raise changes nothing; it is an alert with the callback's name, see
    ``Result.alerts``.
    """

    def on_start(self, run: RunStart) -> None:
        """Before the first step of this submission; again where a new driver takes the run over."""

    def on_step(self, record: StepRecord) -> None:
        """A step is over. After a recovery, steps that are repeated are reported again, with the same loss.

        A new driver reports those again that the one before had not written to the run's folder.
        """

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """``eval_data`` was evaluated after ``step`` steps; again if a recovery rolls back before them."""

    def on_checkpoint(self, step: int, path: str) -> None:
        """The checkpoint of ``step`` steps is complete; ``raypipe.load_state_dict(path)`` reads it."""

    def on_recovery(self, event: Event) -> None:
        """A stage failed ("failure"), and the run recovered ("recovery"; "regroup" without the lost replicas) or ended
        ("give up"; ``on_end`` follows)."""

    def on_decision(self, event: Event) -> None:
        """Any other decision: a switch of the schedule, a resize, another cut, a skipped step."""

    def on_end(self, end: RunEnd) -> None:
        """After the last step, a stop or a failure. It has a minute; a driver that was killed does not call it."""


METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def scalars(record: StepRecord) -> dict[str, float]:
    """Return the numbers of a step by name, without unknown and infinite ones and NaN."""
    numbers = {field.name: getattr(record, field.name) for field in fields(record) if field.name != "step"}
    numbers |= {"samples_per_s": record.samples_per_s, "tokens_per_s": record.tokens_per_s}
    return {
        name: float(value)
        for name, value in numbers.items()
        if name not in record.unknown and isinstance(value, int | float) and math.isfinite(value)
    }


_STAYS = ("drift", "keep", "wait", "paid", "open", "delete checkpoint")
"""Decisions that leave a run as it is; a controller makes many of them."""


def changes_the_run(event: Event) -> bool:
    """Return True for an event that matters when runs are compared: a switch, a resize, an end."""
    return event.decision not in _STAYS


def absolute(folder: str | None) -> str | None:
    """Return the same folder for a process with another working directory; addresses and None as they are."""
    return folder and absolute_path(folder, written=True)
