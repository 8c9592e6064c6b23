"""What a run measures of itself while it trains, as plain data: messages, stages, and what was made of them.

A sample is one real message. Nothing is sent to measure: the header of every frame carries the sender's clock, the
receiver notes its own, and the two clocks need not agree. `raypipe probe`, which sends messages of its own, is another
matter: a LinkProbe is what it found.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from raypipe.ir.action import Op
from raypipe.ir.timeline import Span

__all__ = ["LinkEstimate", "LinkProbe", "LinkSample", "MessageTimes", "StageSample", "stage_sample"]


class LinkProbe(NamedTuple):
    """One way between two nodes, or from a node to itself, as `raypipe probe` measures it.

    Attributes:
        source, target: Ray's addresses of the nodes.
        latency_s: one way.
        bandwidth_bytes_s: of payloads.
    """

    source: str
    target: str
    latency_s: float
    bandwidth_bytes_s: float


class LinkSample(NamedTuple):
    """One message over one hop, one way.

    Attributes:
        hop: joins stage hop to stage hop + 1.
        forward: from the lower stage to the higher; False for a gradient on its way back.
        step: optimizer step.
        microbatch: its number within the step, from 0; messages of a direction are sent in this order.
        wire_bytes: that travelled, after any codec.
        sent_at_s: on the sender's clock, when it was handed to the link, after any encoding.
        arrived_at_s: on the receiver's clock, when its last byte was there, before any decoding.
        raw_bytes: before any codec; 0 for the same as wire_bytes.
        queued: messages of this direction that the sender knows to be ahead of it, unsent.
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
    """The messages that one worker received over one hop in one step, as columns: what a report carries.

    Attributes:
        hop, forward: as in LinkSample.
        wire_bytes, raw_bytes, sent_at_s, arrived_at_s: as in LinkSample, by micro-batch of the worker.
    """

    hop: int
    forward: bool
    wire_bytes: array[int] = field(default_factory=lambda: array("I"))
    raw_bytes: array[int] = field(default_factory=lambda: array("I"))
    sent_at_s: array[float] = field(default_factory=lambda: array("d"))
    arrived_at_s: array[float] = field(default_factory=lambda: array("d"))

    def add(self, wire_bytes: int, raw_bytes: int, sent_at_s: float, arrived_at_s: float) -> None:
        """The message of the next micro-batch."""
        self.wire_bytes.append(wire_bytes)
        self.raw_bytes.append(raw_bytes)
        self.sent_at_s.append(sent_at_s)
        self.arrived_at_s.append(arrived_at_s)

    def samples(self, step: int, microbatches: Iterable[int]) -> Iterator[LinkSample]:
        """One by one.

        Args:
            microbatches: of the worker in this step, counted from 0, in their order.
        """
        columns = zip(self.wire_bytes, self.sent_at_s, self.arrived_at_s, self.raw_bytes, strict=True)
        for microbatch, (wire_bytes, sent_s, arrived_s, raw_bytes) in zip(microbatches, columns, strict=False):
            yield LinkSample(self.hop, self.forward, step, microbatch, wire_bytes, sent_s, arrived_s, raw_bytes)


class StageSample(NamedTuple):
    """One stage in one step: medians over its micro-batches.

    Attributes:
        forward_s, backward_s: of one micro-batch; backward_s is 0 where all backwards were split.
        input_s, weight_s: of the input and weight parts (I and W) of a split one, which together may take longer than a
            whole one; None where none was split.
        step_s: of the optimizer.
        peak_bytes: most memory that the stage has used, None where nobody measured.
        replica: of the stage, by its place among them.
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
    """The sample of one stage from its executor's spans of one step; 0 s for what it did not do.

    Args:
        split_backward_s: of the parts of a split backward that has one span for both; where the parts have spans of
            their own, those count.
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
    """One hop, one way, over a window of recent steps.

    A message of ``raw_bytes`` without codec leaves an idle link ``occupancy_s`` after it was handed over, and arrives
    ``latency_s`` after that; one that finds the link busy waits until it is free.

    Attributes:
        latency_s: half of the round trip that is not occupancy; the two ways cannot be told apart.
        occupancy_s: median.
        ewma_s: running mean over the steps of the run of half of what a message and its answer take.
        p90_s: of latency and occupancy together, by message.
        seconds_per_byte: of occupancy.
        draws_s: occupancy of each message of the window, oldest first. The link keeps order, so whatever varies holds
            up those behind it, which is what occupancy means.
        split: latency and occupancy were told apart by messages that met, or by their sizes. If not, occupancy_s is an
            upper bound.
        reason: how, in words.
    """

    hop: int
    forward: bool
    raw_bytes: int
    latency_s: float
    occupancy_s: float
    ewma_s: float
    p90_s: float
    seconds_per_byte: float
    draws_s: tuple[float, ...]
    split: bool
    reason: str

    @property
    def transfer_s(self) -> float:
        """From handing over to arrival on an idle link."""
        return self.latency_s + self.occupancy_s

    @property
    def bandwidth_bytes_s(self) -> float:
        return 1.0 / self.seconds_per_byte if self.seconds_per_byte > 0 else math.inf
