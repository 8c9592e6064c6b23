"""Estimation of a link in both directions: seconds per byte, latency and clock offset, from time stamps of messages.

A link carries one message per direction at a time, in order. The clocks of its two ends differ:

    arrived_i = clock + latency + left_i        left_i = max(sent_i, left_(i-1)) + occupancy_i

``clock`` is the lead of the receiver's clock over the sender's, and left_i the time at which message i has left the
link. Three equations do not contain ``clock``:

1. A message that is sent while another is on the wire arrives one occupancy after it:
   arrived_i - arrived_(i-1) = occupancy_i, on the receiver's clock alone.
2. Of two messages that each found the link idle, the larger takes longer by the seconds of its additional bytes.
3. In (arrived - sent) forward plus (arrived - sent) backward, the offsets of the two directions cancel.

The shares of the two directions in the latency cannot be known; each gets half. Nothing depends on it, because every
delay forward is followed by one backward, and the period of a pipeline contains only their sum.

    samples --by step--> occupancy per byte --> latency and clock of each step --> occupancy of each message
                                                        |
                                                     Drift: SUSPECT --> only the newest step is used
                                                            CHANGED --> only the newest two steps are kept

Every step has a clock offset of its own, so clocks may drift, or be set between steps. A step during which a clock was
set is ignored. Samples may be missing, or come in any order.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from operator import is_
from statistics import fmean, median
from typing import NamedTuple

from raypipe.ir.communication import LinkEstimate, LinkSample
from raypipe.planner.controller.change_detection import Drift, DriftState

LEAST_GAPS = 3
"""Fewest messages that met another on the link for which the gaps between arrivals are used."""
SIZE_RATIO = 1.25
"""Ratio of largest to smallest message from which on sizes separate occupancy from latency."""
MOST_PAIRS = 400
STAMPS_S = 1e-3
"""Error of time stamps. If the quickest messages both ways together took less than minus this, a clock was set."""


class Way(NamedTuple):
    """Occupancy of a link in one direction.

    Attributes:
        seconds_per_byte: seconds per byte on the wire; an upper bound if ``split`` is False.
        split: True if occupancy could be separated from latency.
        reason: explanation of ``split``.
    """

    seconds_per_byte: float
    split: bool
    reason: str


def seconds_per_byte(steps: Sequence[Sequence[LinkSample]], most_s: float = 0.0) -> Way:
    """Estimate the occupancy per byte of one direction, independently of clock offsets.

    Args:
        steps: messages of each step, in sending order.
        most_s: round trip of the quickest messages, which is an upper bound of the occupancy; 0 if unknown.
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
    """Estimate latency and clock offset from the messages of one step.

    Args:
        forward, backward: messages in each direction.
        ways: occupancy forward and backward.

    Returns:
        the one-way latency (below 0 if noise is large) and the offset of the forward receiver's clock, in seconds;
        None if a clock was set during the step, so that messages seem to arrive before they were sent.
    """
    both = [
        min((m.arrived_at_s - m.sent_at_s - way.seconds_per_byte * m.wire_bytes for m in messages), default=None)
        for messages, way in zip((forward, backward), ways, strict=True)
    ]
    least = [min((m.arrived_at_s - m.sent_at_s for m in messages), default=None) for messages in (forward, backward)]
    if both[0] is None or both[1] is None or least[0] is None or least[1] is None:
        # Messages in one direction only: latency and clock offset cannot be separated, so the latency counts as 0.
        return (0.0, both[0] if both[0] is not None else -(both[1] or 0.0))
    if least[0] + least[1] < -STAMPS_S:
        return None
    return (both[0] + both[1]) / 2, (both[0] - both[1]) / 2


def agreed(trips: Sequence[tuple[float, float]]) -> tuple[float, list[float]]:
    """Combine the (latency, clock offset) of several steps into one latency, and one clock offset per step.

    As in NTP, quick exchanges count most: if messages of a step are delayed in one direction, its latency is too long,
    and its clock offset is wrong by as much. The reference is the step at the first quarter of latencies, and not the
    quickest one, because a clock may have been set during that. Its offset is used for each step whose own offset
    differs by no more than the additional latency explains. In other steps the clock was set: they keep their offset.
    """
    latency_s, clock_s = sorted(trips)[len(trips) // 4]
    clocks_s = [
        clock_s if abs(own_s - clock_s) <= max(0.0, slow_s - latency_s) + STAMPS_S else own_s for slow_s, own_s in trips
    ]
    return max(0.0, latency_s), clocks_s


def occupancies_s(messages: Sequence[LinkSample], clock_s: float, latency_s: float) -> list[tuple[LinkSample, float]]:
    """List the messages of one direction in one step with their occupancies in seconds, in sending order.

    A message that may have waited for an unreported message is left out.

    Args:
        clock_s: lead of the receiver's clock over the sender's.
        latency_s: one-way latency.
    """
    occupied = []
    previous: LinkSample | None = None
    for m in messages:
        begin_s = m.sent_at_s + clock_s
        if previous is not None:
            begin_s = max(begin_s, previous.arrived_at_s - latency_s)
        if previous is None or m.microbatch == previous.microbatch + 1 or begin_s == m.sent_at_s + clock_s:
            occupied.append((m, max(0.0, m.arrived_at_s - begin_s - latency_s)))
        previous = m
    return occupied


def _gaps(messages: Sequence[LinkSample], per_byte: float) -> list[float]:
    """List, for each message that met its predecessor on the link, the seconds between both arrivals per byte.

    Args:
        messages: messages of one direction in one step, in sending order.
        per_byte: estimated occupancy in seconds per byte, from which it follows if two messages met.
    """
    quickest_s = min((m.arrived_at_s - m.sent_at_s for m in messages), default=0.0)
    gaps = []
    for a, b in pairwise(messages):
        if b.microbatch != a.microbatch + 1 or b.wire_bytes <= 0:
            continue
        # Had b found an idle link, it would have arrived quickest_s after it was sent at the earliest.
        met = a.arrived_at_s - b.sent_at_s >= quickest_s - 0.5 * per_byte * b.wire_bytes
        if (met or b.queued) and b.arrived_at_s > a.arrived_at_s:
            gaps.append((b.arrived_at_s - a.arrived_at_s) / b.wire_bytes)
    return gaps


def _late_gaps(messages: Sequence[LinkSample], most_s: float) -> list[float]:
    """List, for each message that may have met its predecessor, the seconds between both arrivals per byte.

    A message may have met its predecessor if it took longer than the quickest message.

    Args:
        messages: messages of one direction in one step, in sending order.
        most_s: longer times between two arrivals are left out.
    """
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
    """List seconds per byte between all pairs of a step's messages whose sizes differ (Theil-Sen slopes)."""
    slopes: list[float] = []
    for messages in steps:
        sizes = [m.wire_bytes for m in messages]
        if not sizes or max(sizes) < SIZE_RATIO * max(1, min(sizes)):
            continue  # as in nearly every run: no pair differs enough, and there are many pairs
        for a, b in combinations(messages, 2):
            small, large = (a, b) if a.wire_bytes <= b.wire_bytes else (b, a)
            if large.wire_bytes >= SIZE_RATIO * max(1, small.wire_bytes):
                later_s = (large.arrived_at_s - large.sent_at_s) - (small.arrived_at_s - small.sent_at_s)
                slopes.append(later_s / (large.wire_bytes - small.wire_bytes))
                if len(slopes) == MOST_PAIRS:
                    return slopes
    return slopes


def _upper_bound(steps: Sequence[Sequence[LinkSample]]) -> float:
    """Return an upper bound of the seconds per byte: the least of (time from a send to the next) / (bytes sent)."""
    bounds = [
        (b.sent_at_s - a.sent_at_s) / a.wire_bytes
        for step in steps
        for a, b in pairwise(step)
        if b.microbatch == a.microbatch + 1 and a.wire_bytes > 0 and b.sent_at_s > a.sent_at_s
    ]
    return min(bounds, default=math.inf)


WINDOW_STEPS = 8
"""Steps that an estimate uses."""
CODEC_CHANGED = 0.2
"""Relative change of the compression ratio from which on another codec must be in use."""
FLOOR_S = 1e-3
"""Least transfer time, in seconds, that changes are relative to; a faster link is as good as free."""

Step = tuple[tuple[LinkSample, ...], tuple[LinkSample, ...]]
"""Messages forward and backward, each in the order in which they were sent."""


class LinkEstimator:
    """Estimator of one link in both directions.

    Args:
        hop: number of the hop that the link belongs to, between stages ``hop`` and ``hop + 1``.
        drift_threshold: relative change of the mean transfer time that counts as a change of the link.
    """

    def __init__(self, hop: int, drift_threshold: float = 0.25) -> None:
        self.hop = hop
        self._window: deque[Step] = deque(maxlen=WINDOW_STEPS)
        self._drift = Drift(drift_threshold, FLOOR_S)  # of forward plus backward, which does not depend on the clocks
        self._ratios: list[float] = []  # bytes before and on the wire in the newest step, each way
        self._outliers = 0  # 1 while the newest step disagrees with those before, else 0
        self._last: tuple[list[Step], _Fit | None] = ([], None)  # the steps of the last estimate, and what it found

    def add(self, messages: Iterable[LinkSample]) -> DriftState:
        """Add the messages of one step.

        Returns:
            result of comparing the step with earlier ones; STEADY if its messages do not suffice for an estimate.
        """
        step = _by_way(m for m in messages if m.hop == self.hop)
        if not any(step) or any(way and way[0].microbatch for way in step):
            return DriftState.STEADY  # only the first message of a step is sure to find an idle link
        fit = _measure([step])
        if fit is None:  # a clock was set while the step ran
            return DriftState.STEADY
        ratios = [ratio for ratio in map(_ratio, step) if ratio is not None]
        if any(abs(a - b) > CODEC_CHANGED * b for a, b in zip(ratios, self._ratios, strict=False)):
            # Another codec is in use: seconds of its messages cannot be compared or mixed with earlier ones.
            self._drift = replace(self._drift, mean_s=None, odd_s=None)
            self._window.clear()
            self._outliers = 0
        self._ratios = ratios
        self._drift, news = self._drift.after(sum(_middle_s(costs_s) for costs_s in fit.costs_s if costs_s))
        if self._outliers and news is DriftState.STEADY:
            self._window.pop()  # it was an outlier: this step is like those before it
        self._window.append(step)
        if news is DriftState.CHANGED:
            keep = list(self._window)[-2:]
            self._window.clear()
            self._window.extend(keep)
        self._outliers = 1 if news is DriftState.SUSPECT else 0
        return news

    def estimate(self, forward: bool) -> LinkEstimate | None:
        """Estimate one direction from the newest steps, or from the newest one alone if it disagrees with the others.

        Returns None if no usable message in this direction has been added.
        """
        steps = list(self._window)[-self._outliers :]
        if not (len(steps) == len(self._last[0]) and all(map(is_, steps, self._last[0]))):
            self._last = steps, _measure(steps)  # once for both directions
        fit = self._last[1]
        way = 0 if forward else 1
        if fit is None or not fit.draws_s[way]:
            return None
        draws_s = sorted(fit.draws_s[way])
        return LinkEstimate(
            hop=self.hop,
            forward=forward,
            raw_bytes=fit.raw_bytes[way],
            latency_s=fit.latency_s,
            occupancy_s=median(fit.draws_s[way]),
            p90_s=fit.latency_s + draws_s[min(len(draws_s) - 1, int(0.9 * len(draws_s)))],
            seconds_per_byte=fit.ways[way].seconds_per_byte,
            draws_s=tuple(fit.draws_s[way]),
            split=fit.ways[way].split,
            reason=fit.ways[way].reason,
        )


class _Fit(NamedTuple):
    """Estimate of both directions from some steps; pairs are (forward, backward).

    Attributes:
        ways: occupancies per byte.
        latency_s: one-way latency, equal for both.
        raw_bytes: uncompressed bytes of the largest message.
        draws_s: occupancy of each message, scaled to ``raw_bytes``.
        costs_s: latency plus occupancy of each message, as measured.
    """

    ways: tuple[Way, Way]
    latency_s: float
    raw_bytes: tuple[int, int]
    draws_s: tuple[list[float], list[float]]
    costs_s: tuple[list[float], list[float]]


def _measure(steps: Sequence[Step]) -> _Fit | None:
    """Fit latency and occupancy to the messages of some steps; return None if no step can be used."""
    ways = _ways(steps)
    usable = [(step, trip) for step in steps if (trip := round_trip(*step, ways)) is not None]
    if not usable:
        return None
    latency_s, clocks_s = agreed([trip for _, trip in usable])
    raw = [max((m.raw_bytes or m.wire_bytes for step in steps for m in step[way]), default=0) for way in (0, 1)]
    fit = _Fit(ways, latency_s, (raw[0], raw[1]), ([], []), ([], []))
    for (step, _), clock_s in zip(usable, clocks_s, strict=True):
        for way, ahead_s in ((0, clock_s), (1, -clock_s)):
            for m, occupancy_s in occupancies_s(step[way], ahead_s, latency_s):
                fit.costs_s[way].append(latency_s + occupancy_s)
                fit.draws_s[way].append(occupancy_s * (raw[way] / m.wire_bytes if m.wire_bytes else 1.0))
    return fit


def _ways(steps: Sequence[Step]) -> tuple[Way, Way]:
    """Estimate the occupancy per byte of both directions.

    If the occupancy of one direction cannot be separated from latency, it is limited to the round trip of the quickest
    messages minus the occupancy of the other direction. If neither can be separated, each is limited to half of it.
    """
    trips = [_least_s(step[0]) + _least_s(step[1]) for step in steps if all(step)]
    # With messages in one direction only, the clock offset cannot be separated from transfer times.
    total_s = max(0.0, median(trips)) if trips else 0.0
    forward, backward = (seconds_per_byte([step[way] for step in steps], total_s) for way in (0, 1))
    if forward.split and backward.split:
        return forward, backward
    nbytes = [median(m.wire_bytes for step in steps for m in step[way]) if trips else 0 for way in (0, 1)]
    if not forward.split and not backward.split:
        half_s = total_s / 2
        return _at_most(forward, half_s, nbytes[0]), _at_most(backward, half_s, nbytes[1])
    if forward.split:
        return forward, _at_most(backward, max(0.0, total_s - forward.seconds_per_byte * nbytes[0]), nbytes[1])
    return _at_most(forward, max(0.0, total_s - backward.seconds_per_byte * nbytes[1]), nbytes[0]), backward


def _at_most(way: Way, seconds: float, nbytes: float) -> Way:
    return way._replace(seconds_per_byte=min(way.seconds_per_byte, seconds / nbytes if nbytes else 0.0))


def _ratio(messages: Sequence[LinkSample]) -> float | None:
    """Compute the compression ratio: uncompressed bytes over bytes on the wire; None without messages."""
    wire_bytes = sum(m.wire_bytes for m in messages)
    return sum(m.raw_bytes or m.wire_bytes for m in messages) / wire_bytes if wire_bytes else None


def _middle_s(seconds: Sequence[float]) -> float:
    """Compute the mean of the middle half, which is steadier than the median if there are two kinds of messages."""
    ordered = sorted(seconds)
    cut = len(ordered) // 4
    return fmean(ordered[cut : len(ordered) - cut])


def _least_s(messages: Sequence[LinkSample]) -> float:
    return min(m.arrived_at_s - m.sent_at_s for m in messages)


def _by_way(messages: Iterable[LinkSample]) -> Step:
    """Split messages into forward and backward, without duplicates, sorted by micro-batch, which is sending order."""
    unique = {(m.forward, m.microbatch): m for m in messages}
    ordered = [unique[key] for key in sorted(unique)]
    return tuple(m for m in ordered if m.forward), tuple(m for m in ordered if not m.forward)
