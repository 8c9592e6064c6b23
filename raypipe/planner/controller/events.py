"""Input event of the controller, the decisions that it returns, and the settings that it changes.

Hop h is the connection of stages h and h + 1.

StepDone ------------> Controller.handle ------------> ControllerDecision, ControllerDecision, ...

Choice: 1f1b          kfkb k=3          slack r=1,3,1          zb-h1 r=2,2          ... + int8/bf16 on hop 1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from raypipe.ir.communication import LinkSample, StageSample
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.cost.memory import MemoryModel, resident_under


@dataclass(frozen=True, slots=True)
class Choice:
    """Values of all settings that the controller can change: the schedule and the codecs.

    Attributes:
        spec: the schedule, of a kind with a memory formula.
        forward_codecs, backward_codecs: names of codecs by hop; empty means "none" on all hops.
    """

    spec: ScheduleSpec
    forward_codecs: tuple[str, ...] = ()
    backward_codecs: tuple[str, ...] = ()

    def __str__(self) -> str:
        pairs = list(zip(self._named(self.forward_codecs), self._named(self.backward_codecs), strict=True))
        coded = [f"{f}/{b} on hop {h}" for h, (f, b) in enumerate(pairs) if (f, b) != ("none", "none")]
        return " + ".join([self.spec.name, *coded])

    def _named(self, codecs: tuple[str, ...]) -> tuple[str, ...]:
        return codecs or ("none",) * max(len(self.forward_codecs), len(self.backward_codecs))

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches of the schedule."""
        return self.spec.num_microbatches

    def codec(self, hop: int, forward: bool) -> str:
        """Return the name of the codec of forward or backward messages on a hop."""
        codecs = self.forward_codecs if forward else self.backward_codecs
        return codecs[hop] if codecs else "none"

    @property
    def lossy(self) -> bool:
        """True if any message is compressed."""
        return any(name != "none" for name in (*self.forward_codecs, *self.backward_codecs))

    def memory_model(self) -> MemoryModel:
        """Build the memory model, which counts micro-batches in flight and waiting messages.

        The model uses a formula if no stage has replicas, and counts in the rows of actions otherwise.
        """
        spec = self.spec
        counted = resident_under(spec, len(spec.replicas), sum(spec.replicas)) if spec.replicas else None
        return MemoryModel(spec, resident=counted)

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Choice:
        """Read what ``to_dict`` wrote, after JSON turned tuples into lists."""
        codecs = (tuple(values[name]) for name in ("forward_codecs", "backward_codecs"))
        return cls(ScheduleSpec.from_dict(values["spec"]), *codecs)


@dataclass(frozen=True, slots=True)
class StepDone:
    """Event of an optimizer step that all stages have completed.

    Attributes:
        step: number of the step.
        seconds: time from the end of the previous step to the end of this one.
        choice: choice with which the step ran.
        stages: one sample per worker that reported.
        messages: messages of all hops, in any order; some may be missing.
        counts: False if ``seconds`` is not comparable: the first step, or one with a checkpoint or an evaluation.
    """

    step: int
    seconds: float
    choice: Choice
    stages: tuple[StageSample, ...] = ()
    messages: tuple[LinkSample, ...] = ()
    counts: bool = True


class Verdict(StrEnum):
    """Kind of a decision."""

    DRIFT = "drift"  # a link or a stage has changed
    KEEP = "keep"  # a search found nothing that is worth a switch
    WAIT = "wait"  # a search found something, to be confirmed after the next step
    SWITCH = "switch"  # run ``choice`` from the next flush
    PAID = "paid"  # the last switch shortened steps
    UNDO = "undo"  # the last switch did not: run ``choice``, the previous one
    OPEN = "open"  # the last switch cannot be judged, because the links changed meanwhile


@dataclass(frozen=True, slots=True)
class ControllerDecision:
    """Decision of the controller, one line of events.jsonl.

    Attributes:
        step: step after which the decision was made.
        reason: sentence for the user, with numbers.
        numbers: the reason in machine-readable form: seconds, ratios and text.
        choice: choice to run from the next flush; None if nothing changes.
    """

    step: int
    verdict: Verdict
    reason: str
    numbers: dict[str, Any]
    choice: Choice | None = None
