"""Segments and orders. The driver of a training pipeline sends orders only, and receives reports.

    synchronous     | whole | whole | whole |               one mini-batch each, the pipeline runs empty between them
    asynchronous    | fill | steady | steady | drain |      micro-batches of the next mini-batch are in flight between

An order is a command to all workers to run a segment. A segment *completes* the mini-batches whose last backward it
contains; their first forwards may be in the segment before.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from raypipe.ir.schedule_spec import ScheduleSpec


class Phase(Enum):
    """Part of a schedule that a segment runs.

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
    """Key of the rows (lists of actions, one for each worker) that a segment runs.

    Workers receive each set of rows once.

    Attributes:
        num_microbatches: micro-batches per mini-batch.
        num_minibatches: mini-batches completed by the rows.
        training: False for evaluation.
        update_interval: see Segment; in the key, because a smaller last mini-batch may have equally many micro-batches.
        spec: schedule if it differs from the plan's; None for the plan's own.
    """

    num_microbatches: int
    num_minibatches: int = 1
    phase: Phase = Phase.WHOLE
    training: bool = True
    update_interval: int | None = None
    spec: ScheduleSpec | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Mini-batches that all workers complete together, and the part of the schedule that completes them.

    Micro-batch numbers are global to the run, in actions, in message keys and in randomness.

    Attributes:
        first_step: optimizer step of the first mini-batch, counted from 0 over the whole run.
        first_microbatch: number of its first micro-batch over the whole run.
        epoch, offset: its samples are those at positions offset, offset + 1, ... of this epoch's order.
        microbatch_samples: sizes of the micro-batches of ONE mini-batch, in order.
        num_minibatches: mini-batches completed, all with the same micro-batch sizes.
        phase: part of the schedule; unless it ends empty, it also begins the next mini-batch, which has the samples
            that follow and the same micro-batch sizes.
        update_interval: micro-batches per update of the parameters; None for the whole mini-batch.
        generation: number of the plan.
        spec: schedule if it differs from the plan's own; WHOLE segments only.
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
        """Return the key of the rows that execute this segment."""
        count = len(self.microbatch_samples)
        spec = None if self.spec is None else self.spec.with_microbatches(count)
        return RowsKey(count, self.num_minibatches, self.phase, training, self.update_interval, spec)

    def locate(self, microbatch: int) -> tuple[int, int, int]:
        """Return (step, position of the first sample in the epoch's order, samples) of a micro-batch of the run."""
        minibatch, index = divmod(microbatch - self.first_microbatch, len(self.microbatch_samples))
        start = self.offset + minibatch * self.minibatch_samples + sum(self.microbatch_samples[:index])
        return self.first_step + minibatch, start, self.microbatch_samples[index]


class Order(NamedTuple):
    """Command to all workers to run a segment.

    Attributes:
        training: False for evaluation.
        keep_spans: record start and end of every action.
        save_to: checkpoint folder below the run's folder; every stage takes a snapshot after the segment and writes it
            there while training continues. "" for no checkpoint.
        measure: report the seconds of actions and messages.
        codecs: codecs of all messages from this segment on, by hop (pair of neighbouring stages): (forward, backward);
            empty for the configured codecs.
        keep_copy: every stage copies its state after the segment to memory, for a rollback.
    """

    segment: Segment
    training: bool = True
    keep_spans: bool = False
    save_to: str = ""
    measure: bool = False
    codecs: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    keep_copy: bool = False

    @property
    def rows(self) -> RowsKey:
        """Key of the rows that execute the order."""
        return self.segment.rows(training=self.training)
