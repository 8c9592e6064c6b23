"""Search for the quickest choice that fits into memory, by replaying each candidate on the measured messages.

    schedules    those of ``planner.candidates``, as in the planner
    codecs       used only if they beat the best lossless choice by min_gain, and only on hops where they save time
    M            if it may change, schedules are tried for every M near the measured one

A choice (``Choice``) is one schedule together with the codecs of all hops, the links between neighbouring stages. Of
choices within half a percent of the best, the one that holds the fewest micro-batches is taken.
Left out: the processor time that a codec takes from a stage on the same core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from raypipe.ir.communication import NO_CODEC, CodecCost
from raypipe.planner.candidates import ScheduleQuery, candidates, next_larger, quickest, resident, thriftiest
from raypipe.planner.controller.config import ControllerConfig
from raypipe.planner.controller.events import Choice
from raypipe.planner.controller.measured import Measured, busiest_hops, predicted_s, squeezed
from raypipe.planner.controller.memory_budget import fits, why_not
from raypipe.planner.cost.tolerance import EVEN, as_quick

SLOW_TRIP = 0.9
"""Quantile of a hop's round trips for which slack is chosen, because slow messages have to be hidden too."""
FARTHEST = 4
"""Largest factor between a tried number of micro-batches and the measured one; larger changes take several switches."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Choice with the predicted seconds of its step."""

    choice: Choice
    seconds: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of one search.

    Attributes:
        best: the quickest choice that fits.
        lossless: the quickest choice without codecs that fits.
        current: the choice that the run uses now.
        tried: number of scored candidates.
        limit: explains that memory does not allow a larger group size k or slack r; "" if it does.
    """

    best: Scored
    lossless: Scored
    current: Scored
    tried: int
    limit: str


def search(config: ControllerConfig, measured: Measured, current: Choice) -> SearchResult:
    """Find the quickest choice that the configuration allows.

    The schedule of ``current`` is a candidate if it fits into memory. If no candidate fits, the one that holds the
    fewest micro-batches is the best.
    """
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
    if not orders:  # nothing fits: take the candidate that holds least
        plain_spec = plain.spec.with_microbatches(_nearest_count(config, current, at))
        orders.append(Choice(thriftiest(config.mode, plain_spec, len(config.budgets) - 1)))
    lossless = _pick(config, orders, score)
    here = at[lossless.choice.num_microbatches]
    compressed = _compressed(config, here, lossless.choice, codecs, score)
    best = lossless
    if compressed is not None and compressed.seconds * (1 + config.min_gain) < lossless.seconds:
        best = compressed
    return SearchResult(best, lossless, now, len(scores), _limit(config, best.choice))


def agrees(config: ControllerConfig, measured: Measured, result: SearchResult) -> bool:
    """Return True if the gain of a search's best choice does not depend on a few messages only.

    Steps are predicted from every second message, and from the others. The best choice, which must have no codecs, has
    to be quicker than the current one by ``min_gain`` both times.

    Args:
        measured: measurements from which ``result`` was made.
    """
    for half in (slice(None, None, 2), slice(1, None, 2)):
        links = [link and replace(link, draws_s=link.draws_s[half] or link.draws_s) for link in measured.links]
        part = replace(measured, links=tuple(links))
        best_s, current_s = (predicted_s(part, one.choice, {}) for one in (result.best, result.current))
        if best_s * (1 + config.min_gain) > current_s:
            return False
    return True


def _orders(
    config: ControllerConfig, measured: Measured, plain: Choice, score: Callable[[Choice], float]
) -> Iterator[Choice]:
    """Yield the candidates without codecs that fit, for the number of micro-batches of ``measured``.

    Args:
        plain: current choice without codecs.
        score: returns the predicted seconds of a choice's step.
    """
    query = ScheduleQuery(
        schedule=config.mode,
        now=plain.spec.with_microbatches(measured.num_microbatches),
        busy_s=measured.busy_s,
        round_trip_s=[measured.round_trip_s(hop, SLOW_TRIP) for hop in range(len(config.budgets) - 1)],
        fits=lambda spec: fits(Choice(spec), config.budgets),
        score=lambda spec: score(Choice(spec)),
        split_backward=bool(measured.split_backward_s),
    )
    return map(Choice, candidates(query))


def _compressed(
    config: ControllerConfig,
    measured: Measured,
    order: Choice,
    codecs: Mapping[tuple[str, bool], CodecCost],
    score: Callable[[Choice], float],
) -> Scored | None:
    """Find the best choice with codecs; return None if no codec may be used, or no codec saves time.

    The best pair of codecs for all hops is chosen first. Then codecs are dropped on hops that gain nothing by them.

    Args:
        order: best choice without codecs.
        codecs: codecs by (name, True for forward messages).
        score: returns the predicted seconds of a choice's step.
    """
    hops = len(config.budgets) - 1
    if not hops or not (config.forward_codecs or config.backward_codecs):
        return None
    thrifty = dict.fromkeys((order, Choice(thriftiest(config.mode, order.spec, hops))))
    pairs = [(f.name, b.name) for f in (NO_CODEC, *config.forward_codecs) for b in (NO_CODEC, *config.backward_codecs)]
    everywhere = [
        replace(one, forward_codecs=(f,) * hops, backward_codecs=(b,) * hops) for one in thrifty for f, b in pairs[1:]
    ]
    # The first is the mildest; a stronger one must be better by more than the tolerance.
    choice = as_quick(everywhere, score)[0]
    # On a far too slow link all orders are equal, and the thriftiest was taken; with the codec they may differ.
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
    """Choose the number of micro-batches if no candidate fits into memory.

    This is the largest of ``counts``, or the current one if weights and optimizer alone exceed the limit of a stage.
    """
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


def _pick(config: ControllerConfig, choices: Sequence[Choice], score: Callable[[Choice], float]) -> Scored:
    """Return the quickest choice; of equally quick ones, the one whose stages hold the fewest micro-batches in all."""
    choice = quickest(choices, score, lambda one: resident(one.memory_model(), len(config.budgets)))
    return Scored(choice, score(choice))


def _limit(config: ControllerConfig, choice: Choice) -> str:
    """Explain why memory does not allow the group size k, or the slack r of every hop, to grow by one.

    Returns "" if memory allows that, or if neither number may grow.
    """
    larger = next_larger(config.mode, choice.spec, len(config.budgets) - 1)
    if larger is None:
        return ""
    spec, name = larger
    reason = why_not(Choice(spec), config.budgets)
    return f"memory does not allow {name}: {reason}" if reason else ""
