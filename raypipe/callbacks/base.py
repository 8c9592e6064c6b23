"""What a callback is, and what it is told."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from raypipe.errors import ConfigError
from raypipe.ir.report import StepRecord

__all__ = [
    "METHODS", "Callback", "Event", "Newest", "RunEnd", "RunStart", "absolute", "changes_the_run", "check_every",
    "needed", "scalars",
]  # fmt: skip


class RunStart(NamedTuple):
    """A run begins, or goes on.

    Attributes:
        name, path: of the run and its folder.
        step, num_steps: optimizer steps done by earlier submissions, and wanted; a driver that takes a run over in the
            middle begins with more steps, too.
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
    """A line of events.jsonl.

    Attributes:
        step: optimizer steps done.
        decision: its first word: "recovery", "resize", "switch" and so on.
        reason: a sentence.
        numbers: what else the line says.
    """

    step: int
    decision: str
    reason: str
    numbers: Mapping[str, Any]


class RunEnd(NamedTuple):
    """A run is over.

    Attributes:
        step: optimizer steps done.
        checkpoint: the newest one; empty where there is none.
        stopped: why it ended before its last step; empty when it did not.
        error: why it failed, in a line; empty when it did not.
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
    Training does not wait for them. What they raise is told once, with the callback's name, and changes nothing.
    """

    def on_start(self, run: RunStart) -> None:
        """Before the first step of this submission; again where a new driver takes the run over."""

    def on_step(self, record: StepRecord) -> None:
        """A step is over. After a recovery, steps that are repeated are reported again, with the same loss.

        A new driver reports those again that the one before had not written to the run's folder.
        """

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """``eval_data`` was evaluated after ``step`` steps; again where a recovery goes back behind them."""

    def on_checkpoint(self, step: int, path: str) -> None:
        """The checkpoint of ``step`` steps is complete; ``raypipe.load_state_dict(path)`` reads it."""

    def on_recovery(self, event: Event) -> None:
        """A stage failed ("failure"), and the run goes on after that ("recovery", or "regroup" without replicas that it
        lost), or does not ("give up"; ``on_end`` follows)."""

    def on_decision(self, event: Event) -> None:
        """Anything else that was decided: a switch of the schedule, a resize, another cut, a step that was skipped."""

    def on_end(self, end: RunEnd) -> None:
        """After the last step, a stop or a failure. It has a minute; a driver that was killed does not call it."""


METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Newest:
    """The newest step that a logger has logged: those that a recovery repeats are not logged again."""

    def __init__(self) -> None:
        self.step = -1

    def passed_by(self, step: int) -> bool:
        """Whether this step is newer; it is the newest then."""
        newer = step > self.step
        self.step = max(step, self.step)
        return newer


def scalars(record: StepRecord) -> dict[str, float]:
    """The numbers of a step by name, without those that are not known or not finite."""
    found = {field.name: getattr(record, field.name) for field in fields(record) if field.name != "step"}
    found |= {"samples_per_s": record.samples_per_s, "tokens_per_s": record.tokens_per_s}
    return {
        name: float(value)
        for name, value in found.items()
        if name not in record.unknown and isinstance(value, int | float) and math.isfinite(value)
    }


_STAYS = ("drift", "keep", "wait", "paid", "open", "delete checkpoint")
"""Decisions after which a run goes on as it was; a controller that looks often makes many of them."""


def changes_the_run(event: Event) -> bool:
    """Whether somebody who compares runs wants to know of it: a switch, a resize, an end, not that all stays."""
    return event.decision not in _STAYS


def absolute(folder: str | None) -> str | None:
    """The same folder for a process with another working directory; URIs as they are."""
    return folder if folder is None or "://" in folder else str(Path(folder).expanduser().absolute())


def check_every(user: str, every_steps: Any) -> None:
    """Refuse what is no number of steps.

    Args:
        user: whose field it is.

    Raises:
        ConfigError: names it.
    """
    if type(every_steps) is not int or every_steps < 1:
        raise ConfigError(f"{user}(every_steps={every_steps!r}): give an integer of at least 1.")


def needed(module: str, install: str, user: str) -> Any:
    """A module that not everybody has.

    Args:
        install: what pip is to install.
        user: whose need it is.

    Raises:
        ConfigError: with the line to type.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{user} needs {module} ({error}): pip install '{install}'.") from None
