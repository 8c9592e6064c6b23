"""Segments: what the driver orders, from one flush of the pipeline to the next or a part of that.

    synchronous     | whole | whole | whole |               one mini-batch each, the pipeline runs empty between them
    asynchronous    | fill | steady | steady | drain |      micro-batches of the next mini-batch are under way between

A segment *completes* mini-batches: their last backward lies in it. Their first forwards may lie in the one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from raypipe.ir.schedule_spec import ScheduleSpec

__all__ = ["Phase", "RowsKey", "Segment"]


class Phase(Enum):
    """Which part of its schedule a segment runs.

    WHOLE begins and ends with an empty pipeline. FILL is prologue and body, STEADY a body, DRAIN the epilogue.
    """

    WHOLE = "whole"
    FILL = "fill"
    STEADY = "steady"
    DRAIN = "drain"

    @property
    def begins_empty(self) -> bool:
        return self in (Phase.WHOLE, Phase.FILL)

    @property
    def ends_empty(self) -> bool:
        return self in (Phase.WHOLE, Phase.DRAIN)


class RowsKey(NamedTuple):
    """Which rows a segment runs; workers learn each set of rows once.

    Attributes:
        num_microbatches: of one mini-batch.
        num_minibatches: that the rows complete.
        training: False evaluates.
        update_interval: as in Segment. A mini-batch that is smaller than the others may have as many micro-batches.
        spec: of these micro-batches where it is not the plan's; None for the plan's own.
    """

    num_microbatches: int
    num_minibatches: int = 1
    phase: Phase = Phase.WHOLE
    training: bool = True
    update_interval: int | None = None
    spec: ScheduleSpec | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """One order to all workers: complete these mini-batches.

    Micro-batch numbers are global to the run, in actions, in message keys and in randomness.

    Attributes:
        first_step: optimizer step of the first mini-batch, counted from 0 over the whole run.
        first_microbatch: number of its first micro-batch over the whole run.
        epoch, offset: its samples are those at positions offset, offset + 1, ... of this epoch's order.
        microbatch_samples: sizes of the micro-batches of ONE mini-batch, in order.
        num_minibatches: mini-batches that are completed, all cut alike.
        phase: which part of the schedule; all but those that end empty begin the next mini-batch too, whose
            samples follow and which is cut alike.
        update_interval: micro-batches per update of the parameters, None for the whole mini-batch.
        generation: of the plan.
        spec: schedule where it is not the plan's own; only of a WHOLE one.
    """

    first_step: int
    first_microbatch: int
    epoch: int
    offset: int
    microbatch_samples: tuple[int, ...]
    num_minibatches: int = 1
    phase: Phase = Phase.WHOLE
    update_interval: int | None = None
    generation: int = 0
    spec: ScheduleSpec | None = None

    @property
    def minibatch_samples(self) -> int:
        return sum(self.microbatch_samples)

    @property
    def interval(self) -> int:
        """Micro-batches per update."""
        return self.update_interval or len(self.microbatch_samples)

    def rows(self, *, training: bool) -> RowsKey:
        """The rows that carry it out."""
        count = len(self.microbatch_samples)
        spec = None if self.spec is None else self.spec.with_microbatches(count)
        return RowsKey(count, self.num_minibatches, self.phase, training, self.update_interval, spec)

    def locate(self, microbatch: int) -> tuple[int, int, int]:
        """(step, position in the epoch's order of the first sample, samples) of a global micro-batch."""
        minibatch, index = divmod(microbatch - self.first_microbatch, len(self.microbatch_samples))
        start = self.offset + minibatch * self.minibatch_samples + sum(self.microbatch_samples[:index])
        return self.first_step + minibatch, start, self.microbatch_samples[index]
