"""Which choice is the quickest that fits: a short list of candidates, each run on the measured messages.

    1f1b         where "auto" was asked for
    k of kfkb    1, 2, 3, ... as far as memory goes; where kfkb was asked for
    r of slack   grown hop by hop where the formula below gains most, then improved by trying neighbours
    zb-h1        the same, where split backwards were timed
    codecs       only where they beat the best lossless choice by min_gain; then taken away where they do not matter
    M            where it may change: all of the above for every M near the one that is measured

The period of slack 1F1B, per micro-batch, over runs of consecutive stages and the hops inside them:

    P = max(max T_s, max over runs (sum T_s + sum of round trips) / (1 + sum r_h))

Choices within half a percent of the best count as equal: then the lossless one is taken, then the one that holds the
fewest micro-batches. Left out: the processor time that a codec takes from a stage on the same core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from raypipe.ir.schedule_spec import kinds_to_search
from raypipe.planner.control.choice import NO_CODEC, Choice, CodecCost
from raypipe.planner.control.config import ControllerConfig
from raypipe.planner.control.measured import Measured, busiest_hops, predicted_s, squeezed
from raypipe.planner.control.memory_budget import fits, why_not
from raypipe.planner.tolerance import EVEN

__all__ = ["Found", "Scored", "search"]

MOST_SINGLE = 12
"""Groups up to this size are tried one by one, larger ones in growing steps."""
SLOW_TRIP = 0.9
"""Quantile of a hop's round trips that slack is grown for: the slow messages are those to hide."""
MOST_MOVES = 48
"""Moves of slack that are tried in one search."""
FARTHEST = 4
"""Times as many or as few micro-batches as those measured are tried; what is farther away comes after a step there."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A choice and the seconds of its step."""

    choice: Choice
    seconds: float


@dataclass(frozen=True, slots=True)
class Found:
    """The answer of one search.

    Attributes:
        best: the quickest, ties broken.
        lossless: the quickest without codecs.
        current: what runs.
        tried: candidates that were run.
        limit: why no larger k or r was tried, where memory is the reason.
    """

    best: Scored
    lossless: Scored
    current: Scored
    tried: int
    limit: str


def search(config: ControllerConfig, measured: Measured, current: Choice) -> Found:
    """The quickest choice that the configuration allows; ``current`` is among the candidates where it fits."""
    scores: dict[Choice, float] = {}
    codecs = {(c.name, True): c for c in config.forward_codecs} | {(c.name, False): c for c in config.backward_codecs}
    at = {measured.num_microbatches: measured}
    own_s = dict(config.microbatch_seconds).get(measured.num_microbatches)
    for count, seconds in config.microbatch_seconds:
        near = measured.num_microbatches <= FARTHEST * count and count <= FARTHEST * measured.num_microbatches
        if own_s and near and count != measured.num_microbatches:
            at[count] = measured.scaled(count, seconds / own_s)

    def score(choice: Choice) -> float:
        if choice not in scores:
            here = at[choice.num_microbatches]
            scores[choice] = predicted_s(here, choice, codecs)
        return scores[choice]

    now = Scored(current, score(current))
    plain = replace(current, forward_codecs=(), backward_codecs=())
    orders = [plain] if fits(plain, config.budgets) else []
    for here in at.values():
        orders.extend(_orders(config, here, plain, score))
    if not orders:  # nothing fits: what holds least is what comes nearest
        orders.append(_thriftiest(config, _with_count(plain, _nearest_count(config, current, at))))
    lossless = _pick(config, orders, score)
    here = at[lossless.choice.num_microbatches]
    compressed = _compressed(config, here, lossless.choice, codecs, score)
    best = lossless
    if compressed is not None and compressed.seconds * (1 + config.min_gain) < lossless.seconds:
        best = compressed
    return Found(best, lossless, now, len(scores), _limit(config, best.choice))


def _orders(
    config: ControllerConfig, measured: Measured, plain: Choice, score: Callable[[Choice], float]
) -> Iterator[Choice]:
    """Lossless candidates that fit."""
    count = measured.num_microbatches
    kinds, spec = kinds_to_search(config.mode), plain.spec.with_microbatches(count)
    if not kinds:
        same = replace(plain, spec=spec)
        if max(plain.spec.group_size, *spec.slack, 1) <= count and fits(same, config.budgets):
            yield same
        return
    one = Choice(spec.as_kind("1f1b"))
    if "1f1b" in kinds and fits(one, config.budgets):
        yield one
    if "kfkb" in kinds:
        for k in _group_sizes(count):
            choice = Choice(spec.as_kind("kfkb", group_size=k))
            if not fits(choice, config.budgets):
                break
            yield choice
    for kind in ("slack", "zb-h1") if len(config.budgets) > 1 else ():
        if kind in kinds and (kind == config.mode or kind == "slack" or measured.split_backward_s):
            yield from _slacks(kind, config, measured, plain, score)


def _group_sizes(count: int) -> Iterator[int]:
    k = 1
    while k <= count:
        yield k
        k = k + 1 if k < MOST_SINGLE else max(k + 1, k * 5 // 4)


def _slacks(
    kind: str, config: ControllerConfig, measured: Measured, plain: Choice, score: Callable[[Choice], float]
) -> Iterator[Choice]:
    """Of "slack" or "zb-h1"."""
    count, hops = measured.num_microbatches, len(config.budgets) - 1
    seeds = {(1,) * hops, _grown_slack(kind, config, measured, plain)}
    if plain.spec.slack:
        seeds.add(plain.spec.slack)
    for uniform in (2, 3, 4):
        seeds.add((uniform,) * hops)
    spec = plain.spec.with_microbatches(count)
    choices = {r: Choice(spec.as_kind(kind, slack=r)) for r in sorted(seeds)}
    known = {r: score(choice) for r, choice in choices.items() if fits(choice, config.budgets)}
    yield from (choices[r] for r in known)
    moves = MOST_MOVES
    while known and moves > 0:
        centre = min(known, key=lambda r: (known[r], sum(r), r))
        before_s = known[centre]
        for r in _neighbours(centre, count):
            choice = Choice(spec.as_kind(kind, slack=r))
            if moves > 0 and r not in known and fits(choice, config.budgets):
                moves -= 1
                known[r] = score(choice)
                yield choice
        if min(known.values()) >= before_s * (1 - EVEN):
            return


def _neighbours(centre: tuple[int, ...], most: int) -> Iterator[tuple[int, ...]]:
    """One more or one less on a hop, or one moved from a hop to another."""
    places = range(len(centre))
    for up in places:
        if centre[up] < most:
            more = (*centre[:up], centre[up] + 1, *centre[up + 1 :])
            yield more
            for down in places:
                if down != up and centre[down] > 1:
                    yield (*more[:down], more[down] - 1, *more[down + 1 :])
    for down in places:
        if centre[down] > 1:
            yield (*centre[:down], centre[down] - 1, *centre[down + 1 :])


def _grown_slack(kind: str, config: ControllerConfig, measured: Measured, plain: Choice) -> tuple[int, ...]:
    """Slack from 1F1B up, one more at a time on the hop where it shortens the period most, until nothing helps or fits.

    Worth 0.7 to 1.6 % of the time on uneven hops without a memory limit, where the neighbours of uniform slack end in
    a local optimum.
    """
    busy_s = [f + b for f, b in zip(measured.forward_s, measured.backward_s, strict=True)]
    trips_s = [measured.round_trip_s(hop, SLOW_TRIP) for hop in range(len(config.budgets) - 1)]
    r = (1,) * len(trips_s)
    period_s = _period_s(busy_s, trips_s, r)
    while max(r) < measured.num_microbatches:
        options = []
        for hop in range(len(r)):
            more = (*r[:hop], r[hop] + 1, *r[hop + 1 :])
            spec = plain.spec.with_microbatches(measured.num_microbatches).as_kind(kind, slack=more)
            if fits(Choice(spec), config.budgets):
                # Where one more alone changes nothing (two hops are equally slow), the slowest hop gets it.
                options.append((_period_s(busy_s, trips_s, more), -trips_s[hop] / r[hop], more))
        if not options or period_s <= max(busy_s) * (1 + 1e-9):
            break
        period_s, _, r = min(options)
    return r


def _period_s(busy_s: Sequence[float], trips_s: Sequence[float], r: Sequence[int]) -> float:
    longest_s = max(busy_s)
    for first in range(len(busy_s)):
        time_s, depth = busy_s[first], 1
        for last in range(first + 1, len(busy_s)):
            time_s += busy_s[last] + trips_s[last - 1]
            depth += r[last - 1]
            longest_s = max(longest_s, time_s / depth)
    return longest_s


def _compressed(
    config: ControllerConfig,
    measured: Measured,
    order: Choice,
    codecs: Mapping[tuple[str, bool], CodecCost],
    score: Callable[[Choice], float],
) -> Scored | None:
    """The best with codecs: on all hops first, in the order that suits them, then without those that save nothing."""
    hops = len(config.budgets) - 1
    if not hops or not (config.forward_codecs or config.backward_codecs):
        return None
    thrifty = dict.fromkeys((order, _thriftiest(config, order)))
    pairs = [(f.name, b.name) for f in (NO_CODEC, *config.forward_codecs) for b in (NO_CODEC, *config.backward_codecs)]
    everywhere = [
        replace(one, forward_codecs=(f,) * hops, backward_codecs=(b,) * hops) for one in thrifty for f, b in pairs[1:]
    ]
    best_s = min(map(score, everywhere))
    # The first is the mildest; those behind it must be better by more than nothing.
    choice = next(one for one in everywhere if score(one) <= best_s * (1 + EVEN))
    # A link that is far too slow as it is makes all orders alike, and the thriftiest was taken: not so behind a codec.
    coded = partial(replace, forward_codecs=choice.forward_codecs, backward_codecs=choice.backward_codecs)
    orders = _orders(config, squeezed(measured, choice, codecs), order, lambda one: score(coded(one)))
    choice = _pick(config, [choice, *map(coded, orders)], score).choice
    best_s = score(choice)
    for hop in reversed(busiest_hops(measured)):
        for forward in (True, False):
            milder = _without(choice, hop, forward)
            if milder != choice and score(milder) <= best_s * (1 + EVEN):
                choice = milder
    return Scored(choice, score(choice)) if choice.lossy else None


def _nearest_count(config: ControllerConfig, current: Choice, counts: Iterable[int]) -> int:
    """M where nothing fits: the most, if smaller micro-batches can help; what is there anyway does not shrink."""
    hopeless = any(
        budget.limit_bytes is not None and budget.fixed_bytes + budget.extra_bytes >= budget.limit_bytes
        for budget in config.budgets
    )
    return current.num_microbatches if hopeless else max(counts)


def _thriftiest(config: ControllerConfig, plain: Choice) -> Choice:
    """The order of the same micro-batches that holds the fewest of them."""
    match config.mode:
        case "auto":
            return Choice(plain.spec.as_kind("1f1b"))
        case "kfkb":
            return Choice(plain.spec.as_kind("kfkb"))
        case "slack" | "zb-h1":
            return Choice(plain.spec.as_kind(config.mode, slack=(1,) * (len(config.budgets) - 1)))
    return plain


def _with_count(choice: Choice, num_microbatches: int) -> Choice:
    return replace(choice, spec=choice.spec.with_microbatches(num_microbatches))


def _without(choice: Choice, hop: int, forward: bool) -> Choice:
    codecs = list(choice.forward_codecs if forward else choice.backward_codecs)
    codecs[hop] = NO_CODEC.name
    if forward:
        return replace(choice, forward_codecs=tuple(codecs))
    return replace(choice, backward_codecs=tuple(codecs))


def _pick(config: ControllerConfig, candidates: Sequence[Choice], score: Callable[[Choice], float]) -> Scored:
    """The quickest; of equals the one that holds the fewest micro-batches on all stages."""

    def resident(choice: Choice) -> float:
        """In mini-batches."""
        model = choice.memory_model()
        count = sum(model.activation_sets(depth) for depth in range(1, len(config.budgets) + 1)) + model.message_slots
        return count / choice.num_microbatches

    best_s = min(map(score, candidates))
    even = [one for one in candidates if score(one) <= best_s * (1 + EVEN)]
    choice = min(even, key=lambda one: (resident(one), score(one), str(one)))
    return Scored(choice, score(choice))


def _limit(config: ControllerConfig, choice: Choice) -> str:
    """What forbids one more of k, or of r on every hop; "" where memory is not the reason."""
    spec, kinds, hops = choice.spec, kinds_to_search(config.mode), len(config.budgets) - 1
    if "kfkb" in kinds:
        more = spec.as_kind("kfkb", group_size=spec.group_size + 1)
        name = f"k={more.group_size}"
    elif kinds and hops:
        more = spec.as_kind(spec.kind if spec.slack else "slack", slack=tuple(r + 1 for r in spec.slack or (1,) * hops))
        name = "one more of slack on every hop"
    else:
        return ""
    if more.group_size > more.num_microbatches:
        return ""
    reason = why_not(Choice(more), config.budgets)
    return f"memory does not allow {name}: {reason}" if reason else ""
