"""Occupancy, latency and clock offset of a link, from the time stamps of its messages.

A link carries one message per direction at a time, in order. The clocks of its two ends differ:

    arrived_i = clock + latency + left_i        left_i = max(sent_i, left_(i-1)) + occupancy_i

``clock`` is how far the receiver's clock is ahead. Three things follow without knowing it:

1. A message handed over while another was on the wire arrives one occupancy after it:
   arrived_i - arrived_(i-1) = occupancy_i, on one clock.
2. Of two messages that each found the link idle, the larger takes longer by its additional bytes.
3. (arrived - sent) forward and (arrived - sent) backward, added up, have no clock in them.

What cannot be known is how the latency is shared between the two ways; each gets half. Nothing depends on it: in a
pipeline every delay forward is followed by one backward, and the period contains only their sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, pairwise
from statistics import median
from typing import NamedTuple

from raypipe.ir.links import LinkSample

__all__ = ["Way", "agreed", "occupancies_s", "round_trip", "seconds_per_byte"]

LEAST_GAPS = 3
"""Messages that must have followed another without a pause before the gaps between them are used."""
SIZE_RATIO = 1.25
"""Largest over smallest message from which on sizes tell occupancy from latency."""
MOST_PAIRS = 400
STAMPS_S = 1e-3
"""Error of time stamps. A message that arrived earlier than that before it was sent shows that a clock was set."""


class Way(NamedTuple):
    """Occupancy of one direction.

    Attributes:
        seconds_per_byte: of the wire; an upper bound where ``split`` is False.
        split: see LinkEstimate.
        reason: in words.
    """

    seconds_per_byte: float
    split: bool
    reason: str


def seconds_per_byte(steps: Sequence[Sequence[LinkSample]], most_s: float = 0.0) -> Way:
    """Occupancy per byte of one direction, whatever the clocks say.

    Args:
        steps: messages by step, each in the order in which they were sent.
        most_s: of the quickest messages forward and back together; no occupancy is longer. 0 where nobody knows.
    """
    late = [gap for step in steps for gap in _late_gaps(step, 1.1 * most_s)]
    per_byte, gaps = median(late) if late else 0.0, list[float]()
    for _ in range(4):  # which messages met depends on the occupancy, and it on them: this settles at once
        before = per_byte
        gaps = [gap for step in steps for gap in _gaps(step, per_byte)]
        per_byte = median(gaps) if gaps else 0.0
        if abs(per_byte - before) <= 0.01 * per_byte:
            break
    if len(gaps) >= LEAST_GAPS:
        return Way(per_byte, True, f"{len(gaps)} messages met another")
    slopes = _slopes(steps)
    if slopes:
        return Way(max(0.0, median(slopes)), True, "messages of several sizes")
    return Way(_upper_bound(steps), False, "no two messages met and all are of one size: occupancy is an upper bound")


def round_trip(
    forward: Sequence[LinkSample], backward: Sequence[LinkSample], ways: tuple[Way, Way]
) -> tuple[float, float] | None:
    """(latency one way, clock of the forward receiver ahead of its sender) in seconds, from the messages of one step.

    Noise may put the latency below 0. None where messages arrived before they were sent, for a clock was set while the
    step ran.
    """
    both = [
        min((m.arrived_at_s - m.sent_at_s - way.seconds_per_byte * m.wire_bytes for m in messages), default=None)
        for messages, way in zip((forward, backward), ways, strict=True)
    ]
    least = [min((m.arrived_at_s - m.sent_at_s for m in messages), default=None) for messages in (forward, backward)]
    if both[0] is None or both[1] is None or least[0] is None or least[1] is None:
        # Messages in one direction only: latency and clock cannot be told apart, so the latency counts as 0.
        return (0.0, both[0] if both[0] is not None else -(both[1] or 0.0))
    if least[0] + least[1] < -STAMPS_S:
        return None
    return (both[0] + both[1]) / 2, (both[0] - both[1]) / 2


def agreed(trips: Sequence[tuple[float, float]]) -> tuple[float, list[float]]:
    """One latency, and the clock of each step, from the steps' own (latency, clock).

    As in NTP, quick exchanges count more than slow ones: a delay in one direction makes the latency of a step too long,
    and its clock wrong by as much. The clock of a quick step is used for every step whose own differs by no more than
    its delay explains; in the others the clock was set. The quick step is the one at the first quarter, not the very
    quickest, which a clock set within a step can fake.
    """
    latency_s, clock_s = sorted(trips)[len(trips) // 4]
    clocks_s = [
        clock_s if abs(own_s - clock_s) <= max(0.0, slow_s - latency_s) + STAMPS_S else own_s for slow_s, own_s in trips
    ]
    return max(0.0, latency_s), clocks_s


def occupancies_s(messages: Sequence[LinkSample], clock_s: float, latency_s: float) -> list[tuple[LinkSample, float]]:
    """Each message of one direction in one step with its occupancy, in the order in which they were sent.

    A message that may have waited for one that was not reported is left out.
    """
    found = []
    previous: LinkSample | None = None
    for m in messages:
        begin_s = m.sent_at_s + clock_s
        if previous is not None:
            begin_s = max(begin_s, previous.arrived_at_s - latency_s)
        if previous is None or m.microbatch == previous.microbatch + 1 or begin_s == m.sent_at_s + clock_s:
            found.append((m, max(0.0, m.arrived_at_s - begin_s - latency_s)))
        previous = m
    return found


def _gaps(messages: Sequence[LinkSample], per_byte: float) -> list[float]:
    """Seconds per byte between the arrivals of messages that met, given what is known of the occupancy."""
    quickest_s = min((m.arrived_at_s - m.sent_at_s for m in messages), default=0.0)
    found = []
    for a, b in pairwise(messages):
        if b.microbatch != a.microbatch + 1 or b.wire_bytes <= 0:
            continue
        # Had b found an idle link, it would have arrived quickest_s after it was sent at the earliest.
        met = a.arrived_at_s - b.sent_at_s >= quickest_s - 0.5 * per_byte * b.wire_bytes
        if (met or b.queued) and b.arrived_at_s > a.arrived_at_s:
            found.append((b.arrived_at_s - a.arrived_at_s) / b.wire_bytes)
    return found


def _late_gaps(messages: Sequence[LinkSample], most_s: float) -> list[float]:
    """Like ``_gaps``, for messages that may have met another since they were slower than the quickest."""
    quickest_s = min((m.arrived_at_s - m.sent_at_s for m in messages), default=0.0)
    return [
        (b.arrived_at_s - a.arrived_at_s) / b.wire_bytes
        for a, b in pairwise(messages)
        if b.microbatch == a.microbatch + 1
        and b.wire_bytes > 0
        and b.arrived_at_s - b.sent_at_s > quickest_s + STAMPS_S
        and 0.0 < b.arrived_at_s - a.arrived_at_s <= most_s
    ]


def _slopes(steps: Sequence[Sequence[LinkSample]]) -> list[float]:
    """Seconds per byte of every two messages of a step whose sizes differ (Theil and Sen)."""
    found: list[float] = []
    for messages in steps:
        sizes = [m.wire_bytes for m in messages]
        if not sizes or max(sizes) < SIZE_RATIO * max(1, min(sizes)):
            continue  # as in nearly every run: no pair differs enough, and there are many pairs
        for a, b in combinations(messages, 2):
            small, large = (a, b) if a.wire_bytes <= b.wire_bytes else (b, a)
            if large.wire_bytes >= SIZE_RATIO * max(1, small.wire_bytes):
                later_s = (large.arrived_at_s - large.sent_at_s) - (small.arrived_at_s - small.sent_at_s)
                found.append(later_s / (large.wire_bytes - small.wire_bytes))
                if len(found) == MOST_PAIRS:
                    return found
    return found


def _upper_bound(steps: Sequence[Sequence[LinkSample]]) -> float:
    """The least time between two messages that did not meet, per byte: the first had left when the second came."""
    found = [
        (b.sent_at_s - a.sent_at_s) / a.wire_bytes
        for step in steps
        for a, b in pairwise(step)
        if b.microbatch == a.microbatch + 1 and a.wire_bytes > 0 and b.sent_at_s > a.sent_at_s
    ]
    return min(found, default=math.inf)
