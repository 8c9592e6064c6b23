"""What the controller is told, and what it says.

StepDone ------------> Controller.handle ------------> ControllerDecision, ControllerDecision, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from raypipe.ir.links import LinkSample, StageSample
from raypipe.planner.control.choice import Choice

__all__ = ["ControllerDecision", "StepDone", "Verdict"]


@dataclass(frozen=True, slots=True)
class StepDone:
    """One optimizer step is over on every stage.

    Attributes:
        step: its number.
        seconds: from the end of the step before to its own end.
        choice: what it ran with.
        stages: one per stage that reported.
        messages: of all hops, in any order; lost ones are no harm.
        counts: whether its seconds may be compared: not those of the first step, or with a checkpoint or an evaluation.
    """

    step: int
    seconds: float
    choice: Choice
    stages: tuple[StageSample, ...] = ()
    messages: tuple[LinkSample, ...] = ()
    counts: bool = True


class Verdict(StrEnum):
    """What a decision is."""

    DRIFT = "drift"  # a link or a stage has changed
    KEEP = "keep"  # looked, and nothing is worth a switch
    WAIT = "wait"  # something is, for the first time
    SWITCH = "switch"  # run ``choice`` from the next flush
    PAID = "paid"  # the last switch was worth it
    UNDO = "undo"  # it was not: run ``choice``, what ran before
    OPEN = "open"  # whether it was cannot be told, for the links have changed meanwhile


@dataclass(frozen=True, slots=True)
class ControllerDecision:
    """One line of events.jsonl.

    Attributes:
        step: after which it was taken.
        reason: a sentence with the numbers in it.
        numbers: the same for programs; seconds, ratios and text.
        choice: to be run from the next flush; None where nothing changes.
    """

    step: int
    verdict: Verdict
    reason: str
    numbers: dict[str, Any]
    choice: Choice | None = None
