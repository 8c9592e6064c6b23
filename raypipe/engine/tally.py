"""What a stage counts while a mini-batch runs: seconds, bytes, messages."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from raypipe.engine.messages.channel import Message
from raypipe.ir.links import MessageTimes
from raypipe.ir.schedule import Op

__all__ = ["Tally", "Totals"]

Totals = tuple[torch.Tensor | None, torch.Tensor | None]
"""Gradient norm and loss of a mini-batch, where they are known."""


@dataclass(slots=True)
class Tally:
    """Of one stage in one mini-batch.

    Attributes:
        peak_in_flight: most micro-batches whose activations were held at once.
        times: how long messages took, by the action that received them; empty where nobody asked.
        busy_s: of actions that compute.
        wait_s: for messages of other stages and of replicas.
        sent_bytes, uncompressed_bytes: to a worker with later stages, then to one with earlier stages.
        exchanged_bytes: to replicas of the stage.
        damaged: messages that came damaged and were asked for again.
    """

    peak_in_flight: int = 0
    times: dict[Op, MessageTimes] = field(default_factory=dict)
    busy_s: float = 0.0
    wait_s: float = 0.0
    sent_bytes: list[int] = field(default_factory=lambda: [0, 0])
    uncompressed_bytes: list[int] = field(default_factory=lambda: [0, 0])
    exchanged_bytes: int = 0
    damaged: int = 0

    @classmethod
    def of(cls, stage: int, in_flight: int, *, measure: bool) -> Tally:
        """Nothing yet.

        Args:
            in_flight: micro-batches that are held already.
            measure: how long messages take.
        """
        if not measure:
            return cls(in_flight)
        ahead, back = MessageTimes(stage - 1, forward=True), MessageTimes(stage, forward=False)
        return cls(in_flight, {Op.RECV_F: ahead, Op.RECV_B: back})

    def sent(self, uncompressed_bytes: int, wire_bytes: int, *, ahead: bool) -> None:
        """To a worker with later stages, or with earlier ones."""
        direction = 0 if ahead else 1
        self.uncompressed_bytes[direction] += uncompressed_bytes
        self.sent_bytes[direction] += wire_bytes

    def received(self, op: Op, message: Message, *, crossed: bool) -> None:
        """A message of another stage has come.

        Args:
            crossed: a link, as between workers.
        """
        stamp = message.stamp
        self.damaged += stamp.damaged
        if self.times and crossed:
            raw_bytes = sum(x.nbytes for x in message if x is not None)
            self.times[op].add(stamp.wire_bytes, raw_bytes, stamp.sent_at_s, stamp.arrived_at_s)
