"""Which samples come next: a run as a sequence of segments, resumable wherever the pipeline is empty.

synchronous     one segment per mini-batch
asynchronous    fill, steady, steady, ..., drain: empty at the end of an epoch, before a checkpoint, at the end
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from raypipe.ir.action import EVALUATION
from raypipe.ir.segment import Phase, Segment

__all__ = [
    "Flow",
    "Position",
    "draining_segment",
    "evaluation_segments",
    "flowing_segments",
    "next_segment",
    "num_steps_of",
    "train_segments",
]


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run stands between two steps.

    Attributes:
        step: optimizer steps done, of an asynchronous schedule: mini-batches.
        microbatch: micro-batches done.
        epoch, offset: the next sample is number ``offset`` of this epoch's order.
        updates: of the parameters, put-off ones included.
    """

    step: int = 0
    microbatch: int = 0
    epoch: int = 0
    offset: int = 0
    updates: int = 0

    def after(self, segment: Segment, num_samples: int) -> Position:
        """Where the run stands when ``segment``, which begins here, is complete."""
        count, microbatches = segment.num_minibatches, len(segment.microbatch_samples)
        end = self.offset + count * segment.minibatch_samples
        wrapped = end >= num_samples
        return Position(
            self.step + count,
            self.microbatch + count * microbatches,
            self.epoch + wrapped,
            0 if wrapped else end,
            self.updates + count * microbatches // segment.interval,
        )


@dataclass(frozen=True, slots=True)
class Flow:
    """How an asynchronous schedule runs on from one mini-batch to the next.

    Attributes:
        interval: micro-batches per update.
        num_to_drain: mini-batches that are under way, and completed, when it is drained; at least 1.
    """

    interval: int
    num_to_drain: int


def num_steps_of(num_epochs: int, num_samples: int, minibatch_size: int) -> int:
    """Optimizer steps of so many epochs; an epoch's last mini-batch may be smaller."""
    return num_epochs * math.ceil(num_samples / minibatch_size)


def _sizes(samples: int, microbatch_size: int) -> tuple[int, ...]:
    full, rest = divmod(samples, microbatch_size)
    return (microbatch_size,) * full + ((rest,) if rest else ())


def next_segment(num_samples: int, minibatch_size: int, microbatch_size: int, at: Position) -> tuple[Segment, Position]:
    """The synchronous step that begins at ``at``, and the position after it; mini-batches do not span epochs.

    The short mini-batch at the end of an epoch runs the same kind of schedule with fewer micro-batches.

    Args:
        num_samples: of one epoch.
    """
    sizes = _sizes(min(minibatch_size, num_samples - at.offset), microbatch_size)
    segment = Segment(at.step, at.microbatch, at.epoch, at.offset, sizes)
    return segment, at.after(segment, num_samples)


def train_segments(
    num_samples: int, minibatch_size: int, microbatch_size: int, num_steps: int, start: Position | None = None
) -> Iterator[tuple[Segment, Position]]:
    """Synchronous steps, one segment each, with the position after it; see ``next_segment``.

    Args:
        num_steps: of the whole run, those before ``start`` included.
    """
    at = start or Position()
    while at.step < num_steps:
        segment, at = next_segment(num_samples, minibatch_size, microbatch_size, at)
        yield segment, at


def flowing_segments(
    flow: Flow,
    num_samples: int,
    minibatch_size: int,
    microbatch_size: int,
    num_steps: int,
    start: Position,
    *,
    flowing: bool = False,
    empty_after: Callable[[int], bool],
    empty_soon: Callable[[], bool],
) -> Iterator[tuple[Segment, Position]]:
    """Like ``train_segments``, for a schedule that does not run empty between mini-batches.

    A mini-batch that is smaller than the others runs by itself, with one update.

    Args:
        flowing: whether mini-batches are under way at the start.
        empty_after: whether the pipeline must be empty after so many steps.
        empty_soon: asked before each segment whether it shall be empty as soon as that is possible.
    """
    at = start
    sizes = _sizes(minibatch_size, microbatch_size)
    while at.step < num_steps:
        full = min((num_samples - at.offset) // minibatch_size, num_steps - at.step)
        if not full:
            rest = _sizes(num_samples - at.offset, microbatch_size)
            segment = Segment(at.step, at.microbatch, at.epoch, at.offset, rest)
        else:
            until = next((n for n in range(1, full) if empty_after(at.step + n)), full)
            count, phase = _next_phase(flow.num_to_drain, until, flowing, soon=empty_soon())
            segment = _flowing(at, sizes, flow.interval, count, phase)
        flowing = not segment.phase.ends_empty
        at = at.after(segment, num_samples)
        yield segment, at


def draining_segment(flow: Flow, minibatch_size: int, microbatch_size: int, at: Position) -> Segment:
    """What completes the mini-batches under way, after a segment that does not end empty."""
    sizes = _sizes(minibatch_size, microbatch_size)
    return _flowing(at, sizes, flow.interval, flow.num_to_drain, Phase.DRAIN)


def _next_phase(num_to_drain: int, until: int, flowing: bool, *, soon: bool) -> tuple[int, Phase]:
    """(mini-batches, phase) of the next segment, of ``until`` mini-batches before the pipeline must be empty."""
    if flowing:
        return (num_to_drain, Phase.DRAIN) if soon or until <= num_to_drain else (1, Phase.STEADY)
    if until <= num_to_drain:
        return until, Phase.WHOLE
    return (1, Phase.WHOLE) if soon else (1, Phase.FILL)


def _flowing(at: Position, sizes: tuple[int, ...], interval: int, count: int, phase: Phase) -> Segment:
    return Segment(at.step, at.microbatch, at.epoch, at.offset, sizes, count, phase, interval)


def evaluation_segments(
    num_samples: int, minibatch_size: int, microbatch_size: int, first: int = 0
) -> Iterator[Segment]:
    """All samples once, in order, forward only.

    Args:
        first: micro-batches that earlier evaluations of this run used.
    """
    microbatch = EVALUATION + first
    for index, offset in enumerate(range(0, num_samples, minibatch_size)):
        sizes = _sizes(min(minibatch_size, num_samples - offset), microbatch_size)
        yield Segment(index, microbatch, 0, offset, sizes)
        microbatch += len(sizes)
