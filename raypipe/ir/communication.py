"""Communication: samples of messages taken while a run trains, link estimates, codec costs, all-reduce chunks.

A sample describes one message of training; none is sent only to measure. The header of every frame carries the time on
the sender's clock, and the receiver adds the time on its own clock; the two clocks need not agree. A LinkProbe is the
result of the command `raypipe probe`, which sends messages of its own.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from raypipe.errors import PlanError
from raypipe.ir.schedule import Op
from raypipe.ir.timeline import Span


class LinkProbe(NamedTuple):
    """Result of `raypipe probe` for one direction between two nodes, or from a node to itself.

    Attributes:
        source, target: Ray addresses of the nodes.
        latency_s: one-way latency.
        bandwidth_bytes_s: payload bytes per second.
    """

    source: str
    target: str
    latency_s: float
    bandwidth_bytes_s: float


class LinkSample(NamedTuple):
    """Measured message over one hop (pair of neighbouring stages).

    Attributes:
        hop: number of the hop, which joins stage ``hop`` to stage ``hop + 1``.
        forward: True from the lower stage to the higher; False for a gradient.
        step: optimizer step.
        microbatch: number of its micro-batch within the step, from 0; messages of a direction are sent in this order.
        wire_bytes: bytes on the wire, after any codec.
        sent_at_s: time on the sender's clock when the message was handed to the link, after any encoding.
        arrived_at_s: time on the receiver's clock when its last byte arrived, before any decoding.
        raw_bytes: bytes before any codec; 0 if they equal wire_bytes.
        queued: number of earlier messages of this direction that were still in the sender's queue.
    """

    hop: int
    forward: bool
    step: int
    microbatch: int
    wire_bytes: int
    sent_at_s: float
    arrived_at_s: float
    raw_bytes: int = 0
    queued: int = 0


@dataclass(frozen=True, slots=True)
class MessageTimes:
    """Messages that one worker received over one hop (pair of neighbouring stages) in one step, as columns of a report.

    Attributes:
        hop, forward: see LinkSample.
        wire_bytes, raw_bytes, sent_at_s, arrived_at_s: see LinkSample; one item for each micro-batch of the worker.
    """

    hop: int
    forward: bool
    wire_bytes: array[int] = field(default_factory=lambda: array("I"))
    raw_bytes: array[int] = field(default_factory=lambda: array("I"))
    sent_at_s: array[float] = field(default_factory=lambda: array("d"))
    arrived_at_s: array[float] = field(default_factory=lambda: array("d"))

    def add(self, wire_bytes: int, raw_bytes: int, sent_at_s: float, arrived_at_s: float) -> None:
        """Append the message of the next micro-batch."""
        self.wire_bytes.append(wire_bytes)
        self.raw_bytes.append(raw_bytes)
        self.sent_at_s.append(sent_at_s)
        self.arrived_at_s.append(arrived_at_s)

    def samples(self, step: int, microbatches: Iterable[int]) -> Iterator[LinkSample]:
        """Yield one LinkSample per message.

        Args:
            microbatches: numbers of the worker's micro-batches in this step, counted from 0, ascending.
        """
        columns = zip(self.wire_bytes, self.sent_at_s, self.arrived_at_s, self.raw_bytes, strict=True)
        for microbatch, (wire_bytes, sent_s, arrived_s, raw_bytes) in zip(microbatches, columns, strict=False):
            yield LinkSample(self.hop, self.forward, step, microbatch, wire_bytes, sent_s, arrived_s, raw_bytes)


class StageSample(NamedTuple):
    """Measured seconds of one stage in one step, as medians over its micro-batches.

    A split backward computes the gradients of the inputs (I) and of the weights (W) in two parts.

    Attributes:
        forward_s, backward_s: seconds of one micro-batch; backward_s is 0 if all backwards were split.
        input_s, weight_s: seconds of I and W of a split backward, which together may take longer than a whole backward;
            None if no backward was split.
        step_s: seconds of the optimizer step.
        peak_bytes: peak memory of the stage; None if not measured.
        replica: index of the replica within its stage.
    """

    stage: int
    step: int
    forward_s: float
    backward_s: float
    step_s: float = 0.0
    peak_bytes: int | None = None
    input_s: float | None = None
    weight_s: float | None = None
    replica: int = 0


def stage_sample(
    stage: int, step: int, spans: Iterable[Span], split_backward_s: tuple[float, float] | None = None
) -> StageSample:
    """Compute the sample of one stage in one step; 0 s for operations that did not occur.

    Args:
        spans: timed actions of the stage's executor in this step.
        split_backward_s: seconds of I and W if the executor measured a split backward as one span; ignored if I and W
            have spans of their own.
    """
    seconds: dict[Op, list[float]] = {}
    for span in spans:
        if span.action.stage == stage:
            seconds.setdefault(span.action.op, []).append(span.end_s - span.start_s)
    forward_s, backward_s, input_s, later_s, step_s = (
        median(seconds[op]) if seconds.get(op) else 0.0 for op in (Op.F, Op.B, Op.I, Op.W, Op.STEP)
    )
    if Op.W in seconds:
        split_backward_s = input_s, later_s
    return StageSample(stage, step, forward_s, backward_s, step_s, None, *(split_backward_s or (None, None)))


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """Estimate of one link in one direction, over a window of recent steps.

    Without a codec, a message of ``raw_bytes`` keeps an idle link busy for ``occupancy_s``, and arrives ``latency_s``
    later. A message that finds the link busy waits until the link is free.

    Attributes:
        hop, forward: see LinkSample.
        latency_s: half of the part of the round trip that is not occupancy; the two directions cannot be separated.
        occupancy_s: median over the window.
        p90_s: 90th percentile of latency plus occupancy, over messages.
        seconds_per_byte: occupancy per byte.
        draws_s: occupancy of each message of the window, oldest first. The link keeps order, so any variation delays
            later messages and counts as occupancy.
        split: True if latency and occupancy could be separated, by messages that queued or by their sizes. If False,
            occupancy_s is an upper bound.
        reason: explanation of ``split``, for reports.
    """

    hop: int
    forward: bool
    raw_bytes: int
    latency_s: float
    occupancy_s: float
    p90_s: float
    seconds_per_byte: float
    draws_s: tuple[float, ...]
    split: bool
    reason: str

    @property
    def transfer_s(self) -> float:
        """Seconds from send to arrival on an idle link."""
        return self.latency_s + self.occupancy_s

    @property
    def bandwidth_bytes_s(self) -> float:
        return 1.0 / self.seconds_per_byte if self.seconds_per_byte > 0 else math.inf


@dataclass(frozen=True, slots=True)
class CodecCost:
    """Measured cost of compressing one direction of a link, and the bytes that it saves.

    Attributes:
        name: name of the codec, as in codec_forward and codec_backward.
        ratio: bytes before the codec / bytes on the wire.
        encode_s_per_byte, decode_s_per_byte: seconds per byte before the codec, in the link's own thread.
    """

    name: str
    ratio: float = 1.0
    encode_s_per_byte: float = 0.0
    decode_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if not (self.ratio > 0 and self.encode_s_per_byte >= 0 and self.decode_s_per_byte >= 0):
            raise PlanError(f"{self}: give a ratio above 0 and seconds per byte from 0 up.")

    def taken_s(self, raw_bytes: float, sending_s: float) -> tuple[float, float]:
        """Return (extra latency, occupancy) of one message, in seconds.

        Encoding, sending and decoding form a pipeline of three threads. The slowest of them is the occupancy; the sum
        of the other two is additional latency.

        Args:
            raw_bytes: size of the message before the codec.
            sending_s: seconds for which its compressed bytes keep the wire busy.
        """
        parts = self.encode_s_per_byte * raw_bytes, sending_s, self.decode_s_per_byte * raw_bytes
        return sum(parts) - max(parts), max(parts)


NO_CODEC = CodecCost("none")


CHUNK_BYTES = 8 << 20
"""Bytes of gradient sums that replicas exchange at a time, over all lanes of a replica. A chunk costs the latency of
two messages, and several chunks are in memory at once."""
CLOSED_AT = 1 / 8
"""Fill level from which on a chunk is sent without waiting for gradients of an earlier layer."""


def chunk_bytes(lanes: int, replicas: int) -> int:
    """Return the bytes that replicas exchange at a time in one of the lanes (partial gradient sums) of a stage."""
    return max(64, CHUNK_BYTES // -(-lanes // replicas) // 64 * 64)


def exchange_bytes(gradient_bytes: int, lanes: int, replicas: int) -> int:
    """Return the peak bytes that a replica holds for an exchange, in addition to its gradient sums.

    In each of its lanes (partial gradient sums) the replica holds a copy of a chunk (``chunk_bytes``), the chunks
    received, and their transfer buffers. In addition it holds the sum over its own lanes, and the sum over all lanes.

    Args:
        gradient_bytes: gradients of the stage in one lane.
    """
    if replicas < 2:
        return 0
    own = -(-lanes // replicas)
    return (3 * own + 2) * min(gradient_bytes, chunk_bytes(lanes, replicas))
