"""Timeline of a simulated or measured run, and the messages in it.

worker 0   [F0][SEND_F0]
worker 1   [RECV_F0......][F0]            in transit from the start of SEND_F0 to the end of RECV_F0
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, overload

from raypipe.ir.schedule import COMPUTE, OPS, Action, Op, PackedRow


class Span(NamedTuple):
    """One action on one worker; seconds since the timeline's own zero."""

    worker: int
    action: Action
    start_s: float
    end_s: float


# What _make does, without a Python frame for each of a million tuples.
_new_span = partial(tuple.__new__, Span)


class PackedSpans(Sequence[Span]):
    """Spans of a simulated run as arrays; immutable, and equal to a tuple of the same spans.

    Args:
        worker: worker of each span, an array of type "i".
        actions: action of each span.
        start_s, end_s: seconds of each span, arrays of type "d".
    """

    __slots__ = ("actions", "end_s", "start_s", "worker")

    def __init__(self, worker: array[int], actions: PackedRow, start_s: array[float], end_s: array[float]) -> None:
        self.worker = worker
        self.actions = actions
        self.start_s = start_s
        self.end_s = end_s

    def __len__(self) -> int:
        return len(self.worker)

    def __iter__(self) -> Iterator[Span]:
        return map(_new_span, zip(self.worker, self.actions, self.start_s, self.end_s, strict=True))

    @overload
    def __getitem__(self, index: int) -> Span: ...

    @overload
    def __getitem__(self, index: slice) -> PackedSpans: ...

    def __getitem__(self, index: int | slice) -> Span | PackedSpans:
        if isinstance(index, slice):
            return PackedSpans(self.worker[index], self.actions[index], self.start_s[index], self.end_s[index])
        return Span(self.worker[index], self.actions[index], self.start_s[index], self.end_s[index])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedSpans | tuple):
            return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"<{len(self)} spans>"


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans of all workers.

    Attributes:
        spans: every action that took time, in any order; a tuple, or PackedSpans.
        source: "simulated" or "measured".
        peak_in_flight: most micro-batches whose activations each stage held at once, by stage.
        name: title in viewers.
    """

    spans: Sequence[Span]
    source: str
    peak_in_flight: tuple[int, ...] = ()
    name: str = ""

    @property
    def num_workers(self) -> int:
        if isinstance(self.spans, PackedSpans):
            return 1 + max(self.spans.worker, default=-1)
        return 1 + max((s.worker for s in self.spans), default=-1)

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end."""
        if not self.spans:
            return 0.0
        if isinstance(self.spans, PackedSpans):
            return max(self.spans.end_s) - min(self.spans.start_s)
        return max(s.end_s for s in self.spans) - min(s.start_s for s in self.spans)

    def busy_s(self, worker: int) -> float:
        """Return the seconds that a worker spent in F, B, I and W."""
        return sum(s.end_s - s.start_s for s in self.spans if s.worker == worker and s.action.op in COMPUTE)

    @property
    def bubble_fraction(self) -> float:
        """Share of worker time without a compute action, from 0 (every worker always computes) to 1."""
        busy_s = [array("d") for _ in range(self.num_workers)]
        for worker, computes, start_s, end_s in self._computing():
            if computes:
                busy_s[worker].append(end_s - start_s)
        span = self.makespan_s * self.num_workers
        return 1.0 - sum(map(sum, busy_s)) / span if span else 0.0

    def _computing(self) -> Iterator[tuple[int, bool, float, float]]:
        """Yield (worker, True if it computes, start, end) of every span, without creating the Spans of PackedSpans."""
        spans = self.spans
        if isinstance(spans, PackedSpans):
            by_code = [op in COMPUTE for op in OPS]
            yield from zip(
                spans.worker, map(by_code.__getitem__, spans.actions.op), spans.start_s, spans.end_s, strict=True
            )
        else:
            for span in spans:
                yield span.worker, span.action.op in COMPUTE, span.start_s, span.end_s

    def _repr_html_(self) -> str:
        from raypipe.viz.timeline_svg import timeline_svg

        return timeline_svg([self])


class MessageSpan(NamedTuple):
    """Message between two workers.

    Attributes:
        action: its SEND, even if the timeline lacks it.
        source: span of the SEND, or of the F, B or I that made it.
        target: span of the RECV, or of the F, B, I or W that uses it.
        start_s, sent_s, taken_s: times at which it leaves, has been sent, and is received.
    """

    action: Action
    source: Span
    target: Span
    start_s: float
    sent_s: float
    taken_s: float


def messages_of(spans: Sequence[Span]) -> Iterator[MessageSpan]:
    """Yield the messages whose sender and receiver are in the timeline, in the order of their source spans."""
    by_action = {span.action: span for span in spans if span.end_s - span.start_s >= 2e-9}
    for source in spans:
        stage, op, microbatch = source.action
        if op is Op.F:
            onward, sends, receives = 1, Op.SEND_F, Op.RECV_F
        elif op in (Op.B, Op.I):
            onward, sends, receives = -1, Op.SEND_B, Op.RECV_B
        else:
            continue
        uses = (Op.I, Op.W) if op is Op.I else (op,)
        user = next(filter(None, (by_action.get(Action(stage + onward, use, microbatch)) for use in uses)), None)
        if user is None or user.worker == source.worker:
            continue
        action = Action(stage, sends, microbatch)
        sent, taken = by_action.get(action), by_action.get(Action(stage + onward, receives, microbatch))
        start_s, sent_s = (source.end_s, source.end_s) if sent is None else (sent.start_s, sent.end_s)
        taken_s = max(sent_s, user.start_s if taken is None else taken.end_s)
        yield MessageSpan(action, sent or source, taken or user, start_s, sent_s, taken_s)
