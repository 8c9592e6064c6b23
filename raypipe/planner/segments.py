"""Which samples come next: a run as a sequence of segments, resumable anywhere between two of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from raypipe.ir.plan import Segment

__all__ = ["Position", "evaluation_segments", "num_steps_of", "train_segments"]

EVALUATION = 1 << 40
"""Micro-batch numbers of evaluations start here, so that their messages never meet those of training."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run stands between two steps.

    Attributes:
        step: optimizer steps done.
        microbatch: micro-batches done.
        epoch, offset: the next sample is number ``offset`` of this epoch's order.
    """

    step: int = 0
    microbatch: int = 0
    epoch: int = 0
    offset: int = 0


def num_steps_of(num_epochs: int, num_samples: int, minibatch_size: int) -> int:
    """Optimizer steps of so many epochs; an epoch's last mini-batch may be smaller."""
    return num_epochs * math.ceil(num_samples / minibatch_size)


def _sizes(samples: int, microbatch_size: int) -> tuple[int, ...]:
    full, rest = divmod(samples, microbatch_size)
    return (microbatch_size,) * full + ((rest,) if rest else ())


def train_segments(
    num_samples: int, minibatch_size: int, microbatch_size: int, num_steps: int, start: Position | None = None
) -> Iterator[tuple[Segment, Position]]:
    """Synchronous steps, one segment each, with the position after it; mini-batches do not span epochs.

    A segment's ``schedule_id`` is its number of micro-batches: the short mini-batch at the end of an epoch
    runs the same kind of schedule with fewer of them.

    Args:
        num_samples: of one epoch.
        num_steps: of the whole run, those before ``start`` included.
    """
    at = start or Position()
    while at.step < num_steps:
        samples = min(minibatch_size, num_samples - at.offset)
        sizes = _sizes(samples, microbatch_size)
        segment = Segment(len(sizes), 1, at.step, at.microbatch, at.epoch, at.offset, sizes)
        end = at.offset + samples
        wrapped = end >= num_samples
        at = Position(at.step + 1, at.microbatch + len(sizes), at.epoch + wrapped, 0 if wrapped else end)
        yield segment, at


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
        yield Segment(len(sizes), 1, index, microbatch, 0, offset, sizes)
        microbatch += len(sizes)
