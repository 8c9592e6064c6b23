"""Choice of the stages that recompute activations, if the request leaves it open.

    1. no stage recomputes, if that fits and unlimited memory would not make the step shorter
    2. else the first k stages do, which hold the most micro-batches; k = 1, 2, ... are compared by step time
    3. afterwards, recomputation is dropped on each stage that fits without it, the one with the longest forward first

A stage that holds the activations of one micro-batch only, as the last stage of 1F1B, saves nothing by recomputation,
and runs one more forward for every micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from raypipe.errors import PlanError
from raypipe.planner.cost.memory import MemoryModel
from raypipe.planner.cost.tolerance import EVEN
from raypipe.planner.partition.fit import fits_within, refilled
from raypipe.planner.search.problem import Decision, Problem
from raypipe.planner.search.request import Request

FEW = 8
"""Largest number of stages for which every k is tried; above it, powers of two."""


def is_open(request: Request) -> bool:
    """Return True if recomputation is left open on any stage."""
    return request.recompute is None or (isinstance(request.recompute, tuple) and None in request.recompute)


def settled(problem: Problem, recompute: bool | tuple[bool, ...]) -> Problem:
    """Return the problem with this setting of recomputation, for all stages or by stage."""
    return problem.asking(dataclasses.replace(problem.request, recompute=recompute))


def best_recompute(problem: Problem, num_stages: int | None, decide: Callable[[Problem], Decision]) -> Decision:
    """Find the quickest decision over all permitted settings of recomputation.

    Of equally quick decisions, the one with the fewest recomputing stages is returned.

    Args:
        decide: makes the decision of a problem with given recomputation, or raises PlanError.

    Raises:
        PlanError: nothing fits; the error is that of the setting with the most recomputation.
    """
    if not is_open(problem.request):
        return decide(problem)
    best: Decision | None = None
    refusal: PlanError | None = None
    for recompute in _recompute_options(problem.request, num_stages):
        try:
            decision = decide(settled(problem, recompute))
        except PlanError as error:
            refusal = error
        else:
            if best is None or decision.prediction.step_s * (1 + EVEN) < best.prediction.step_s:
                best = decision
            if not problem.bounded or (not _any(recompute) and _is_free(problem, recompute, decision, decide)):
                break
    if best is None:
        assert refusal is not None
        raise refusal
    return best


def only_where_needed(problem: Problem, decision: Decision) -> Decision:
    """Drop recomputation on stages that fit without it; the returned decision keeps the old prediction."""
    setting, stages = problem.request.recompute, decision.partition.num_stages
    now = decision.request.recomputed(stages)
    if not is_open(problem.request) or not any(now) or decision.request.kind.several_stages:
        return decision
    own = setting if isinstance(setting, tuple) else (None,) * stages
    forward_s = [stage.forward_s for stage in decision.prediction.stages] or [0.0] * stages
    for stage in sorted((s for s in range(stages) if now[s] and own[s] is None), key=lambda s: -forward_s[s]):
        fewer = (*now[:stage], False, *now[stage + 1 :])
        memory = dataclasses.replace(decision.limits.memory, recompute=fewer)
        if fits_within(decision.partition, decision.graph, decision.cluster, decision.limits, memory):
            now = fewer
    return _with(decision, now, dataclasses.replace(decision.limits.memory, recompute=now))


def most_recompute(request: Request) -> bool | tuple[bool, ...]:
    """Return the setting with recomputation on all stages that the request does not exclude."""
    setting = request.recompute
    return tuple(at is not False for at in setting) if isinstance(setting, tuple) else setting is not False


def _any(recompute: bool | tuple[bool, ...]) -> bool:
    """Return True if any stage recomputes."""
    return recompute if isinstance(recompute, bool) else any(recompute)


def _with(decision: Decision, recompute: tuple[bool, ...], memory: MemoryModel) -> Decision:
    return dataclasses.replace(
        decision,
        request=dataclasses.replace(decision.request, recompute=recompute),
        limits=dataclasses.replace(decision.limits, memory=memory),
        partition=refilled(decision.partition, decision.graph, memory),
    )


def _recompute_options(request: Request, num_stages: int | None) -> Iterator[bool | tuple[bool, ...]]:
    """Yield settings, from no open stage recomputing to all of them."""
    setting = request.recompute
    if num_stages is None and not isinstance(setting, tuple):  # the solver chooses the number of stages
        yield from (False, True)
        return
    own = setting if isinstance(setting, tuple) else (None,) * (num_stages or 1)
    count = len(own)
    firsts = range(count + 1) if count <= FEW else [0, *(1 << i for i in range(count.bit_length() - 1)), count]
    options = (tuple(s < k if at is None else at for s, at in enumerate(own)) for k in firsts)
    yield from dict.fromkeys(options)


def _is_free(
    problem: Problem, recompute: bool | tuple[bool, ...], decision: Decision, decide: Callable[[Problem], Decision]
) -> bool:
    """Return True if ``decide`` finds no shorter step with unlimited memory."""
    try:
        unbound = decide(settled(problem.unbound, recompute))
    except PlanError:
        return False
    return decision.prediction.step_s <= unbound.prediction.step_s * (1 + EVEN)
