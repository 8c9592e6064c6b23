"""Schedules that are worth a look for so many micro-batches, by what stages and links take; and the best of some.

    1f1b         where "auto" was asked for
    k of kfkb    1, 2, 3, ... as far as memory goes; where kfkb was asked for
    r of slack   grown hop by hop where the formula below gains most, then improved by trying neighbours
    zb-h1        the same, where split backwards were timed

The period of slack 1F1B, per micro-batch, over runs of consecutive stages and the hops inside them:

    P = max(max T_s, max over runs (sum T_s + sum of round trips) / (1 + sum r_h))

With R_s replicas of stage s it is T_s / R_s, and R_first + sum r_h R_(h + 1): what all of them have under way together.

Choices within half a percent of the best count as equal: then the one that holds the fewest micro-batches is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from raypipe.ir.schedule_spec import ScheduleSpec, kinds_to_search, takes
from raypipe.planner.memory import MemoryModel
from raypipe.planner.tolerance import EVEN, as_quick

__all__ = ["Question", "candidates", "next_larger", "quickest", "resident", "thriftiest"]

MOST_SINGLE = 12
"""Groups up to this size are tried one by one, larger ones in growing steps."""
UNIFORM = (2, 3, 4)
"""Slack that is tried on all hops alike."""
MOST_MOVES = 48
"""Moves of slack that are tried in one search."""

T = TypeVar("T")


class Question(NamedTuple):
    """What a search starts from.

    Attributes:
        schedule: what was asked for: "auto", or a kind.
        now: the schedule to start from, with the number of micro-batches to search for.
        busy_s: by stage, F and B of one micro-batch.
        round_trip_s: by hop, of its slow messages, which are those to hide.
        fits: whether memory allows a schedule.
        score: seconds of its step.
        split_backward: whether it is known what split backwards take.
        least_slack: on every hop.
    """

    schedule: str
    now: ScheduleSpec
    busy_s: Sequence[float]
    round_trip_s: Sequence[float]
    fits: Callable[[ScheduleSpec], bool]
    score: Callable[[ScheduleSpec], float]
    split_backward: bool = True
    least_slack: int = 1


def candidates(asked: Question) -> Iterator[ScheduleSpec]:
    """Schedules that fit."""
    kinds, spec = kinds_to_search(asked.schedule), asked.now
    if not kinds:
        if asked.fits(spec):
            yield spec
        return
    if "1f1b" in kinds and asked.fits(one := spec.as_kind("1f1b")):
        yield one
    if "kfkb" in kinds:
        for k in _group_sizes(spec.num_microbatches):
            grouped = spec.as_kind("kfkb", group_size=k)
            if not asked.fits(grouped):
                break
            yield grouped
    for kind in ("slack", "zb-h1") if asked.round_trip_s else ():
        if kind in kinds and (kind == asked.schedule or kind == "slack" or asked.split_backward):
            yield from _slacks(kind, asked)


def thriftiest(schedule: str, now: ScheduleSpec, num_hops: int) -> ScheduleSpec:
    """The candidate for the same micro-batches that holds the fewest of them.

    Args:
        schedule: what was asked for, as in ``Question``.
        now: stays as it is where its numbers were given.
    """
    kinds = kinds_to_search(schedule)
    if not kinds:
        return now
    return now.as_kind(kinds[0], slack=(1,) * num_hops if takes(kinds[0], "slack") else ())


def next_larger(schedule: str, now: ScheduleSpec, num_hops: int) -> tuple[ScheduleSpec, str] | None:
    """The candidate that holds a little more than ``now``, and its name; None where there is no larger one."""
    kinds = kinds_to_search(schedule)
    if "kfkb" in kinds:
        k = now.group_size + 1
        return (now.as_kind("kfkb", group_size=k), f"k={k}") if k <= now.num_microbatches else None
    if not kinds or not num_hops:
        return None
    r = tuple(r + 1 for r in now.slack or (1,) * num_hops)
    return now.as_kind(now.kind if now.slack else "slack", slack=r), "one more of slack on every hop"


def quickest(found: Sequence[T], score: Callable[[T], float], held: Callable[[T], float]) -> T:
    """The best; of equals the one that holds least."""
    return min(as_quick(found, score), key=lambda one: (held(one), score(one), str(one)))


def resident(model: MemoryModel, num_stages: int) -> float:
    """Mini-batches that all stages hold together, messages of one hop among them."""
    count = sum(model.activation_sets(depth) for depth in range(1, num_stages + 1)) + model.message_slots
    return count / model.spec.num_microbatches


def _group_sizes(count: int) -> Iterator[int]:
    k = 1
    while k <= count:
        yield k
        k = k + 1 if k < MOST_SINGLE else max(k + 1, k * 5 // 4)


def _slacks(kind: str, asked: Question) -> Iterator[ScheduleSpec]:
    """Of "slack" or "zb-h1"."""
    spec, hops = asked.now, len(asked.round_trip_s)
    seeds = {(asked.least_slack,) * hops, _grown_slack(kind, asked)}
    if spec.slack:
        seeds.add(spec.slack)
    seeds |= {(uniform,) * hops for uniform in UNIFORM if uniform >= asked.least_slack}
    specs = {r: spec.as_kind(kind, slack=r) for r in sorted(seeds)}
    known = {r: asked.score(one) for r, one in specs.items() if asked.fits(one)}
    yield from (specs[r] for r in known)
    moves = MOST_MOVES
    while known and moves > 0:
        centre = min(known, key=lambda r: (known[r], sum(r), r))
        before_s = known[centre]
        for r in _neighbours(centre, asked.least_slack, spec.num_microbatches):
            one = spec.as_kind(kind, slack=r)
            if moves > 0 and r not in known and asked.fits(one):
                moves -= 1
                known[r] = asked.score(one)
                yield one
        if min(known.values()) >= before_s * (1 - EVEN):
            return


def _neighbours(centre: tuple[int, ...], least: int, most: int) -> Iterator[tuple[int, ...]]:
    """One more or one less on a hop, or one moved from a hop to another."""
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


def _grown_slack(kind: str, asked: Question) -> tuple[int, ...]:
    """Greedy: from the least slack, add one to the hop that shortens the period most, until nothing helps or fits.

    Worth 0.7 to 1.6 % of the time on uneven hops without a memory limit, where the neighbours of uniform slack end in
    a local optimum.
    """
    busy_s, trips_s = asked.busy_s, asked.round_trip_s
    replicas = asked.now.replicas or (1,) * len(busy_s)
    least_s = max(seconds / count for seconds, count in zip(busy_s, replicas, strict=True))
    r = (asked.least_slack,) * len(trips_s)
    period_s = _period_s(busy_s, trips_s, r, replicas)
    while max(r) < asked.now.num_microbatches:
        options = []
        for hop in range(len(r)):
            more = (*r[:hop], r[hop] + 1, *r[hop + 1 :])
            if asked.fits(asked.now.as_kind(kind, slack=more)):
                # Where one more alone changes nothing (two hops are equally slow), the slowest hop gets it.
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
