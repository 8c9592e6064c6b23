"""Candidate schedules for a number of micro-batches, given times of stages and links; and the choice of the best.

    1f1b         if the requested schedule is "auto"
    k of kfkb    1, 2, 3, ... as far as memory allows, if kfkb is requested
    r of slack   grown on the hop that shortens the period P most, then improved by trying neighbours
    zb-h1        r as with slack, if split backwards were timed; where a stage lacks memory, it defers fewer W

Hop h joins the stages h and h + 1. Its slack r_h is the number of forwards that stage h runs ahead of stage h + 1; 1 is
1F1B. The lag of a stage is the number of micro-batches by which it defers W, the gradients of its weights.

P is the period of slack 1F1B per micro-batch: T_s are the seconds of F and B on stage s, and a run is a range of
consecutive stages with the hops between them:

    P = max(max T_s, max over runs (sum T_s + sum of round trips) / (1 + sum r_h))

With R_s replicas of stage s, T_s becomes T_s / R_s, and the denominator R_first + sum r_h R_(h + 1), the micro-batches
that all replicas of the run have in flight.

Of choices within half a percent of the best, the one that holds the fewest micro-batches is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from raypipe.ir.schedule_spec import ScheduleSpec, kinds_to_search, takes
from raypipe.planner.cost.memory import MemoryModel
from raypipe.planner.cost.tolerance import EVEN, as_quick
from raypipe.planner.schedule.zero_bubble import full_lags

MOST_SINGLE = 12
"""Largest k up to which every value is tried; above it, values in growing steps."""
UNIFORM = (2, 3, 4)
"""Values of r that are tried on all hops at once."""
MOST_MOVES = 48
"""Most neighbours that are tried in one search."""

T = TypeVar("T")


class ScheduleQuery(NamedTuple):
    """Input of a search for a schedule.

    Attributes:
        schedule: requested schedule: "auto", or a kind.
        now: schedule to start from, with the number of micro-batches that all candidates get.
        busy_s: by stage, seconds of F plus B of one micro-batch.
        round_trip_s: by hop, seconds of a slow message forward plus a slow message backward, which slack has to hide.
        fits: returns True if memory allows a schedule.
        score: returns the predicted seconds of a step with a schedule.
        split_backward: True if the seconds of split backwards are known.
        least_slack: least slack on every hop.
    """

    schedule: str
    now: ScheduleSpec
    busy_s: Sequence[float]
    round_trip_s: Sequence[float]
    fits: Callable[[ScheduleSpec], bool]
    score: Callable[[ScheduleSpec], float]
    split_backward: bool = True
    least_slack: int = 1


def candidates(query: ScheduleQuery) -> Iterator[ScheduleSpec]:
    """Yield candidate schedules that fit into memory."""
    kinds, spec = kinds_to_search(query.schedule), query.now
    if not kinds:
        if query.fits(spec):
            yield spec
        return
    if "1f1b" in kinds and query.fits(one := spec.as_kind("1f1b")):
        yield one
    if "kfkb" in kinds:
        for k in _group_sizes(spec.num_microbatches):
            grouped = spec.as_kind("kfkb", group_size=k)
            if not query.fits(grouped):
                break
            yield grouped
    for kind in ("slack", "zb-h1") if query.round_trip_s else ():
        if kind in kinds and (kind == query.schedule or kind == "slack" or query.split_backward):
            yield from _slacks(kind, query)


def thriftiest(schedule: str, now: ScheduleSpec, num_hops: int) -> ScheduleSpec:
    """Return the candidate schedule for the same number of micro-batches that keeps the fewest of them in flight.

    Args:
        schedule: requested schedule, as in ``ScheduleQuery``.
        now: current schedule; returned unchanged if ``schedule`` has no candidates (``kinds_to_search``).
        num_hops: number of hops of the pipeline; each gets a slack of 1 if the candidate has slack.
    """
    kinds = kinds_to_search(schedule)
    if not kinds:
        return now
    return _without_lag(now.as_kind(kinds[0], slack=(1,) * num_hops if takes(kinds[0], "slack") else ()))


def next_larger(schedule: str, now: ScheduleSpec, num_hops: int) -> tuple[ScheduleSpec, str] | None:
    """Return the next candidate that holds more micro-batches than ``now``, and a description of the difference.

    Returns None if no candidate holds more. The arguments are those of ``thriftiest``.
    """
    kinds = kinds_to_search(schedule)
    if "kfkb" in kinds:
        k = now.group_size + 1
        return (now.as_kind("kfkb", group_size=k), f"k={k}") if k <= now.num_microbatches else None
    if not kinds or not num_hops:
        return None
    r = tuple(r + 1 for r in now.slack or (1,) * num_hops)
    return _without_lag(now.as_kind(now.kind if now.slack else "slack", slack=r)), "one more of slack on every hop"


def quickest(options: Sequence[T], score: Callable[[T], float], held: Callable[[T], float]) -> T:
    """Return the quickest option; of equally quick options, the one that needs the least memory.

    Args:
        score: returns the seconds of an option.
        held: returns the memory that an option needs, in any unit.
    """
    return min(as_quick(options, score), key=lambda one: (held(one), score(one), str(one)))


def resident(model: MemoryModel, num_stages: int) -> float:
    """Compute a number that is larger the more memory a schedule needs, to compare schedules.

    It is (activation sets of all stages + message slots of one stage) / (micro-batches of a step).
    """
    count = sum(model.activation_sets(depth) for depth in range(1, num_stages + 1)) + model.message_slots
    return count / model.spec.num_microbatches


def fitting(spec: ScheduleSpec, fits: Callable[[ScheduleSpec], bool]) -> ScheduleSpec | None:
    """Return the schedule if it fits, else with its lag lowered on each stage as far as needed; None if that fails.

    Args:
        fits: returns True if memory allows a schedule; the lag of a stage must not change the memory of others.
    """
    if fits(spec):
        return spec
    least = _without_lag(spec)
    if least == spec or not fits(least):
        return None
    lags = full_lags(spec.slack, spec.replicas or (1,) * len(least.lag))
    for stage, full in enumerate(lags):
        low, high = 0, full
        while low < high:
            middle = high if high == full else (low + high + 1) // 2
            more = replace(least, lag=(*least.lag[:stage], middle, *least.lag[stage + 1 :]))
            if fits(more):
                low, least = middle, more
            else:
                high = middle - 1
    return least


def _without_lag(spec: ScheduleSpec) -> ScheduleSpec:
    """Return the schedule with a lag of 0 on all stages; unchanged if it has no lag or one stage."""
    return replace(spec, lag=(0,) * (len(spec.slack) + 1)) if takes(spec.kind, "lag") and spec.slack else spec


def _group_sizes(count: int) -> Iterator[int]:
    k = 1
    while k <= count:
        yield k
        k = k + 1 if k < MOST_SINGLE else max(k + 1, k * 5 // 4)


def _slacks(kind: str, query: ScheduleQuery) -> Iterator[ScheduleSpec]:
    """Yield schedules of this kind that fit: some with start values of slack, then neighbours of the best so far."""
    spec, hops = query.now, len(query.round_trip_s)

    def with_slack(r: tuple[int, ...]) -> ScheduleSpec | None:
        return fitting(spec.as_kind(kind, slack=r), query.fits)

    # If a slack fits with any lag, it fits without.
    grown = _grown_slack(query, lambda r: query.fits(_without_lag(spec.as_kind(kind, slack=r))))
    seeds = {(query.least_slack,) * hops, grown}
    if takes(kind, "lag"):
        seeds.add(_grown_slack(query, lambda r: query.fits(spec.as_kind(kind, slack=r))))
    if spec.slack:
        seeds.add(spec.slack)
    seeds |= {(uniform,) * hops for uniform in UNIFORM if uniform >= query.least_slack}
    specs = {r: one for r in sorted(seeds) if (one := with_slack(r))}
    known = {r: query.score(one) for r, one in specs.items()}
    yield from specs.values()
    moves = MOST_MOVES
    while known and moves > 0:
        centre = min(known, key=lambda r: (known[r], sum(r), r))
        before_s = known[centre]
        for r in _neighbours(centre, query.least_slack, spec.num_microbatches):
            if moves > 0 and r not in known and (one := with_slack(r)):
                moves -= 1
                known[r] = query.score(one)
                yield one
        if min(known.values()) >= before_s * (1 - EVEN):
            return


def _neighbours(centre: tuple[int, ...], least: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield the slacks that differ from ``centre`` by one more or less on a hop, or by one moved to another hop.

    Args:
        least, most: bounds of the slack of a hop.
    """
    places = range(len(centre))
    for up in places:
        if centre[up] < most:
            more = (*centre[:up], centre[up] + 1, *centre[up + 1 :])
            yield more
            for down in places:
                if down != up and centre[down] > least:
                    yield (*more[:down], more[down] - 1, *more[down + 1 :])
    for down in places:
        if centre[down] > least:
            yield (*centre[:down], centre[down] - 1, *centre[down + 1 :])


def _grown_slack(query: ScheduleQuery, fits: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...]:
    """Grow the slack greedily: in each round, add one on the hop where this shortens the period most.

    The rounds end when nothing shortens the period, or no larger slack fits into memory.

    This start value gains 0.7 to 1.6 % on uneven hops without a memory limit, because a search from uniform slack ends
    in a local optimum there.

    Args:
        fits: returns True if a slack (one number per hop) fits into memory.
    """
    busy_s, trips_s = query.busy_s, query.round_trip_s
    replicas = query.now.replicas or (1,) * len(busy_s)
    least_s = max(seconds / count for seconds, count in zip(busy_s, replicas, strict=True))
    r = (query.least_slack,) * len(trips_s)
    period_s = _period_s(busy_s, trips_s, r, replicas)
    while max(r) < query.now.num_microbatches:
        options = []
        for hop in range(len(r)):
            more = (*r[:hop], r[hop] + 1, *r[hop + 1 :])
            if fits(more):
                # Ties (no single hop shortens the period, as two are equally slow) go to the slowest hop.
                options.append((_period_s(busy_s, trips_s, more, replicas), -trips_s[hop] / r[hop], more))
        if not options or period_s <= least_s * (1 + 1e-9):
            break
        period_s, _, r = min(options)
    return r


def _period_s(busy_s: Sequence[float], trips_s: Sequence[float], r: Sequence[int], replicas: Sequence[int]) -> float:
    longest_s = 0.0
    for first in range(len(busy_s)):
        time_s, depth = busy_s[first], replicas[first]
        longest_s = max(longest_s, time_s / depth)
        for last in range(first + 1, len(busy_s)):
            time_s += busy_s[last] + trips_s[last - 1]
            depth += r[last - 1] * replicas[last]
            longest_s = max(longest_s, time_s / depth)
    return longest_s
