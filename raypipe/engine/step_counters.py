"""Counters of one stage in one mini-batch: times, bytes, micro-batches in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

from raypipe.engine.messages.channel import Message
from raypipe.ir.communication import MessageTimes
from raypipe.ir.schedule import Op


@dataclass(slots=True)
class StepCounters:
    """Counters of one stage in one mini-batch.

    Attributes:
        peak_in_flight: maximum number of micro-batches whose activations were held at once.
        times: times of received messages, by operation (RECV_F or RECV_B); empty if messages are not timed.
        busy_s: seconds in actions that compute.
        wait_s: seconds of waiting for messages of other stages and of replicas.
        sent_bytes: bytes of sent messages, encoded: [to workers with later stages, to workers with earlier stages].
        uncompressed_bytes: bytes of these messages before encoding.
        exchanged_bytes: bytes sent to replicas of the stage.
    """

    peak_in_flight: int = 0
    times: dict[Op, MessageTimes] = field(default_factory=dict)
    busy_s: float = 0.0
    wait_s: float = 0.0
    sent_bytes: list[int] = field(default_factory=lambda: [0, 0])
    uncompressed_bytes: list[int] = field(default_factory=lambda: [0, 0])
    exchanged_bytes: int = 0

    @classmethod
    def of(cls, stage: int, in_flight: int, *, measure: bool) -> StepCounters:
        """Create a mini-batch's counters, with ``in_flight`` micro-batches at its begin; ``measure`` times messages."""
        if not measure:
            return cls(in_flight)
        ahead, back = MessageTimes(stage - 1, forward=True), MessageTimes(stage, forward=False)
        return cls(in_flight, {Op.RECV_F: ahead, Op.RECV_B: back})

    def sent(self, uncompressed_bytes: int, wire_bytes: int, *, ahead: bool) -> None:
        """Count the bytes of a message sent to a later stage (``ahead``) or to an earlier one."""
        direction = 0 if ahead else 1
        self.uncompressed_bytes[direction] += uncompressed_bytes
        self.sent_bytes[direction] += wire_bytes

    def received(self, op: Op, message: Message, *, crossed: bool) -> None:
        """Add the times of a received message to ``times``; only if it came from another worker (``crossed``)."""
        stamp = message.stamp
        if self.times and crossed:
            raw_bytes = sum(x.nbytes for x in message if x is not None)
            self.times[op].add(stamp.wire_bytes, raw_bytes, stamp.sent_at_s, stamp.arrived_at_s)
