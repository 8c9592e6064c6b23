"""Which choice is the quickest that fits: the shared candidates, each run on the measured messages.

    schedules    ``planner.search.candidates``, as the planner's
    codecs       only where they beat the best lossless choice by min_gain; then taken away where they do not matter
    M            where it may change: all of the above for every M near the one that is measured

Choices within half a percent of the best count as equal: then the lossless one is taken, then the one that holds the
fewest micro-batches. Left out: the processor time that a codec takes from a stage on the same core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from raypipe.planner.control.choice import NO_CODEC, Choice, CodecCost
from raypipe.planner.control.config import ControllerConfig
from raypipe.planner.control.measured import Measured, busiest_hops, predicted_s, squeezed
from raypipe.planner.control.memory_budget import fits, why_not
from raypipe.planner.search.candidates import Question, candidates, next_larger, quickest, resident, thriftiest
from raypipe.planner.tolerance import EVEN, as_quick

__all__ = ["Found", "Scored", "search"]

SLOW_TRIP = 0.9
"""Quantile of a hop's round trips that slack is grown for: the slow messages are those to hide."""
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
        plain_spec = plain.spec.with_microbatches(_nearest_count(config, current, at))
        orders.append(Choice(thriftiest(config.mode, plain_spec, len(config.budgets) - 1)))
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
    asked = Question(
        schedule=config.mode,
        now=plain.spec.with_microbatches(measured.num_microbatches),
        busy_s=measured.busy_s,
        round_trip_s=[measured.round_trip_s(hop, SLOW_TRIP) for hop in range(len(config.budgets) - 1)],
        fits=lambda spec: fits(Choice(spec), config.budgets),
        score=lambda spec: score(Choice(spec)),
        split_backward=bool(measured.split_backward_s),
    )
    return map(Choice, candidates(asked))


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
    thrifty = dict.fromkeys((order, Choice(thriftiest(config.mode, order.spec, hops))))
    pairs = [(f.name, b.name) for f in (NO_CODEC, *config.forward_codecs) for b in (NO_CODEC, *config.backward_codecs)]
    everywhere = [
        replace(one, forward_codecs=(f,) * hops, backward_codecs=(b,) * hops) for one in thrifty for f, b in pairs[1:]
    ]
    # The first is the mildest; those behind it must be better by more than nothing.
    choice = as_quick(everywhere, score)[0]
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


def _without(choice: Choice, hop: int, forward: bool) -> Choice:
    codecs = list(choice.forward_codecs if forward else choice.backward_codecs)
    codecs[hop] = NO_CODEC.name
    if forward:
        return replace(choice, forward_codecs=tuple(codecs))
    return replace(choice, backward_codecs=tuple(codecs))


def _pick(config: ControllerConfig, found: Sequence[Choice], score: Callable[[Choice], float]) -> Scored:
    """The quickest; of equals the one that holds the fewest micro-batches on all stages."""
    choice = quickest(found, score, lambda one: resident(one.memory_model(), len(config.budgets)))
    return Scored(choice, score(choice))


def _limit(config: ControllerConfig, choice: Choice) -> str:
    """What forbids one more of k, or of r on every hop; "" where memory is not the reason."""
    larger = next_larger(config.mode, choice.spec, len(config.budgets) - 1)
    if larger is None:
        return ""
    spec, name = larger
    reason = why_not(Choice(spec), config.budgets)
    return f"memory does not allow {name}: {reason}" if reason else ""
