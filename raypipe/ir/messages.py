"""The messages of a timeline: what was sent by one worker and taken by another, from spans alone.

    worker 0   [F0][SEND_F0]
    worker 1   [RECV_F0......][F0]            on its way from the begin of SEND_F0 to the end of RECV_F0

A timeline has the actions that took time. Without a SEND a message leaves when its F (or B, I) has ended; without a
RECV it is taken when the next stage's F (or B, I) begins. What takes less than two nanoseconds takes none here: a stage
whose inputs need no gradient has such an I, and its W uses the message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from raypipe.ir.action import Action, Op

__all__ = ["Box", "Message", "messages_of"]


class Box(Protocol):
    """A span, as far as pictures and traces need it."""

    @property
    def worker(self) -> int: ...
    @property
    def action(self) -> Action: ...
    @property
    def start_s(self) -> float: ...
    @property
    def end_s(self) -> float: ...


class Message(NamedTuple):
    """One message.

    Attributes:
        action: that sends it, whether or not the timeline has it.
        source: its SEND, or the F, B or I that made it.
        target: its RECV, or the F, B, I or W that uses it.
        start_s, sent_s, taken_s: when it leaves, has been handed over, and is taken.
    """

    action: Action
    source: Box
    target: Box
    start_s: float
    sent_s: float
    taken_s: float


def messages_of(spans: Sequence[Box]) -> Iterator[Message]:
    """All messages of which both stages are in the timeline, in the order of the spans that made them."""
    by_action = {span.action: span for span in spans if span.end_s - span.start_s >= 2e-9}
    for made in spans:
        stage, op, microbatch = made.action
        if op is Op.F:
            onward, sends, receives = 1, Op.SEND_F, Op.RECV_F
        elif op in (Op.B, Op.I):
            onward, sends, receives = -1, Op.SEND_B, Op.RECV_B
        else:
            continue
        uses = (Op.I, Op.W) if op is Op.I else (op,)
        user = next(filter(None, (by_action.get(Action(stage + onward, use, microbatch)) for use in uses)), None)
        if user is None or user.worker == made.worker:
            continue
        action = Action(stage, sends, microbatch)
        sent, taken = by_action.get(action), by_action.get(Action(stage + onward, receives, microbatch))
        start_s, sent_s = (made.end_s, made.end_s) if sent is None else (sent.start_s, sent.end_s)
        taken_s = max(sent_s, user.start_s if taken is None else taken.end_s)
        yield Message(action, sent or made, taken or user, start_s, sent_s, taken_s)
