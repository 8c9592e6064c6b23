"""The estimate of one hop, both ways, from the messages of the last steps.

    samples --by step--> occupancy per byte --> latency and clock of each step --> occupancy of each message
                                                        |
                                                     Drift: SUSPECT --> the estimate is made of the newest step alone
                                                            CHANGED --> the window is cut to what is new

Every step has a clock offset of its own, so clocks may drift, or be set between steps. A step during which a clock was
set is ignored. Samples may be lost, or come in any order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from operator import is_
from statistics import fmean, median
from typing import Any, NamedTuple

from raypipe.ir.links import LinkEstimate, LinkSample
from raypipe.planner.control.drift import Drift, News
from raypipe.planner.control.fifo import Way, agreed, occupancies_s, round_trip, seconds_per_byte

__all__ = ["WINDOW_STEPS", "LinkEstimator"]

WINDOW_STEPS = 8
"""That an estimate is made of."""
CODEC_CHANGED = 0.2
"""Relative change of the compression ratio from which on another codec must be in use."""
FLOOR_S = 1e-3
"""Changes are relative to at least this much: a faster link is as good as free."""

Step = tuple[tuple[LinkSample, ...], tuple[LinkSample, ...]]
"""Messages forward and backward, each in the order in which they were sent."""


class LinkEstimator:
    """What is known of one hop.

    Args:
        hop: joins stage hop to stage hop + 1.
        drift_threshold: relative change of the mean transfer time that is a change of the link.
    """

    def __init__(self, hop: int, drift_threshold: float = 0.25) -> None:
        self.hop = hop
        self._window: deque[Step] = deque(maxlen=WINDOW_STEPS)
        self._drift = Drift(drift_threshold, FLOOR_S)  # of forward plus backward, which does not depend on the clocks
        self._ratios: list[float] = []  # bytes before and on the wire in the newest step, each way
        self._outliers = 0  # 1 while the newest step disagrees with those before, else 0
        self._last: tuple[list[Step], _Fit | None] = ([], None)  # the steps of the last estimate, and what it found

    def add(self, messages: Iterable[LinkSample]) -> News:
        """Take in the messages of one step, and say whether the link has changed.

        Returns:
            STEADY also where the messages do not tell.
        """
        step = _by_way(m for m in messages if m.hop == self.hop)
        if not any(step) or any(way and way[0].microbatch for way in step):
            return News.STEADY  # only the first message of a step is sure to find an idle link
        fit = _measure([step])
        if fit is None:  # a clock was set while the step ran
            return News.STEADY
        ratios = [ratio for ratio in map(_ratio, step) if ratio is not None]
        if any(abs(a - b) > CODEC_CHANGED * b for a, b in zip(ratios, self._ratios, strict=False)):
            # The link has not changed, but its messages have: what they take is compared with nothing before.
            self._drift = replace(self._drift, mean_s=None, odd_s=None)
        self._ratios = ratios
        self._drift, news = self._drift.after(sum(_middle_s(costs_s) for costs_s in fit.costs_s if costs_s))
        if self._outliers and news is News.STEADY:
            self._window.pop()  # it was an outlier: this step is like those before it
        self._window.append(step)
        if news is News.CHANGED:
            keep = list(self._window)[-2:]
            self._window.clear()
            self._window.extend(keep)
        self._outliers = 1 if news is News.SUSPECT else 0
        return news

    def estimate(self, forward: bool) -> LinkEstimate | None:
        """Of the window, or of the newest step where that disagrees with the window; None before any message."""
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
            ewma_s=(self._drift.mean_s or 0.0) / 2,
            p90_s=fit.latency_s + draws_s[min(len(draws_s) - 1, int(0.9 * len(draws_s)))],
            seconds_per_byte=fit.ways[way].seconds_per_byte,
            draws_s=tuple(fit.draws_s[way]),
            split=fit.ways[way].split,
            reason=fit.ways[way].reason,
        )

    def to_dict(self) -> dict[str, Any]:
        """The state, for JSON."""
        return {
            "hop": self.hop,
            "window": [[list(m) for way in step for m in way] for step in self._window],
            "drift": asdict(self._drift),
            "odd": self._outliers,
            "ratios": self._ratios,
        }

    def load(self, found: dict[str, Any]) -> None:
        """Inverse of ``to_dict``."""
        self._window.clear()
        self._window.extend(_by_way(LinkSample(*m) for m in step) for step in found["window"])
        self._drift = Drift(**found["drift"])
        self._outliers = found["odd"]
        self._ratios = found["ratios"]


class _Fit(NamedTuple):
    """Both ways over some steps; pairs are forward and backward.

    Attributes:
        ways: occupancy per byte.
        latency_s: one way.
        raw_bytes: of the largest message, uncompressed.
        draws_s: by message, the occupancy of such a message.
        costs_s: by message, latency and occupancy as they were.
    """

    ways: tuple[Way, Way]
    latency_s: float
    raw_bytes: tuple[int, int]
    draws_s: tuple[list[float], list[float]]
    costs_s: tuple[list[float], list[float]]


def _measure(steps: Sequence[Step]) -> _Fit | None:
    """None where no step can be used."""
    ways = _ways(steps)
    found = [(step, trip) for step in steps if (trip := round_trip(*step, ways)) is not None]
    if not found:
        return None
    latency_s, clocks_s = agreed([trip for _, trip in found])
    raw = [max((m.raw_bytes or m.wire_bytes for step in steps for m in step[way]), default=0) for way in (0, 1)]
    fit = _Fit(ways, latency_s, (raw[0], raw[1]), ([], []), ([], []))
    for (step, _), clock_s in zip(found, clocks_s, strict=True):
        for way, ahead_s in ((0, clock_s), (1, -clock_s)):
            for m, occupancy_s in occupancies_s(step[way], ahead_s, latency_s):
                fit.costs_s[way].append(latency_s + occupancy_s)
                fit.draws_s[way].append(occupancy_s * (raw[way] / m.wire_bytes if m.wire_bytes else 1.0))
    return fit


def _ways(steps: Sequence[Step]) -> tuple[Way, Way]:
    """Occupancy per byte; where nothing splits it from the latency, no more than the whole round trip allows."""
    trips = [_least_s(step[0]) + _least_s(step[1]) for step in steps if all(step)]
    # With messages in one direction only, the clock offset cannot be told from what a message takes.
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
    """How many times smaller the messages are on the wire."""
    wire_bytes = sum(m.wire_bytes for m in messages)
    return sum(m.raw_bytes or m.wire_bytes for m in messages) / wire_bytes if wire_bytes else None


def _middle_s(seconds: Sequence[float]) -> float:
    """The mean of the middle half: steadier than the median where there are two kinds of messages."""
    ordered = sorted(seconds)
    cut = len(ordered) // 4
    return fmean(ordered[cut : len(ordered) - cut])


def _least_s(messages: Sequence[LinkSample]) -> float:
    return min(m.arrived_at_s - m.sent_at_s for m in messages)


def _by_way(messages: Iterable[LinkSample]) -> Step:
    """Forward and backward, sorted by micro-batch, the order of sending; each message once."""
    unique = {(m.forward, m.microbatch): m for m in messages}
    ordered = [unique[key] for key in sorted(unique)]
    return tuple(m for m in ordered if m.forward), tuple(m for m in ordered if not m.forward)
