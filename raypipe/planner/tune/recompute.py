"""Which stages run their forwards again, where that is left to memory.

    none           where that fits and more room would not make the step shorter
    the first k    which hold the most micro-batches: k = 1, 2, ... up to all of them, compared by the seconds of a step
    fewer          of these the ones that fit without, the longest forward first

A stage gains nothing by it where it holds the activations of one micro-batch only, as the last one of 1F1B does; it
pays its forward once more for every micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from raypipe.errors import PlanError
from raypipe.planner.memory import MemoryModel
from raypipe.planner.partition.fit import fits_within, refilled
from raypipe.planner.tolerance import EVEN
from raypipe.planner.tune.decision import Decision
from raypipe.planner.tune.problem import Problem
from raypipe.planner.tune.request import Request

__all__ = ["best_recompute", "is_open", "most_recompute", "only_where_needed", "settled"]

FEW = 8
"""Stages up to which every k is tried; beyond it, powers of two."""


def is_open(request: Request) -> bool:
    """Whether anything is left to memory."""
    return request.recompute is None or (isinstance(request.recompute, tuple) and None in request.recompute)


def settled(problem: Problem, recompute: bool | tuple[bool, ...]) -> Problem:
    """The problem with this for an answer."""
    return problem.asking(dataclasses.replace(problem.request, recompute=recompute))


def best_recompute(problem: Problem, num_stages: int | None, decide: Callable[[Problem], Decision]) -> Decision:
    """The quickest decision over what may run its forwards again; of equals the one that does so on fewer stages.

    Args:
        decide: makes the decision of a settled problem, or raises PlanError.

    Raises:
        PlanError: nothing fits; the refusal of what holds least.
    """
    if not is_open(problem.request):
        return decide(problem)
    best: Decision | None = None
    refusal: PlanError | None = None
    for recompute in _answers(problem.request, num_stages):
        try:
            found = decide(settled(problem, recompute))
        except PlanError as error:
            refusal = error
        else:
            if best is None or found.prediction.step_s * (1 + EVEN) < best.prediction.step_s:
                best = found
            if not problem.bounded or (not _any(recompute) and _is_free(problem, recompute, found, decide)):
                break
    if best is None:
        assert refusal is not None
        raise refusal
    return best


def only_where_needed(problem: Problem, found: Decision) -> Decision:
    """The same decision without recomputation on stages that fit without; its prediction is to be made anew."""
    given, stages = problem.request.recompute, found.partition.num_stages
    now = found.request.recomputed(stages)
    if not is_open(problem.request) or not any(now) or found.request.kind.several_stages:
        return found
    own = given if isinstance(given, tuple) else (None,) * stages
    forward_s = [stage.forward_s for stage in found.prediction.stages] or [0.0] * stages
    for stage in sorted((s for s in range(stages) if now[s] and own[s] is None), key=lambda s: -forward_s[s]):
        fewer = (*now[:stage], False, *now[stage + 1 :])
        memory = dataclasses.replace(found.limits.memory, recompute=fewer)
        if fits_within(found.partition, found.graph, found.cluster, found.limits, memory):
            now = fewer
    return _with(found, now, dataclasses.replace(found.limits.memory, recompute=now))


def most_recompute(request: Request) -> bool | tuple[bool, ...]:
    """All of what is open."""
    given = request.recompute
    return tuple(at is not False for at in given) if isinstance(given, tuple) else given is not False


def _any(recompute: bool | tuple[bool, ...]) -> bool:
    """Whether any stage runs its forwards again."""
    return recompute if isinstance(recompute, bool) else any(recompute)


def _with(found: Decision, recompute: tuple[bool, ...], memory: MemoryModel) -> Decision:
    return dataclasses.replace(
        found,
        request=dataclasses.replace(found.request, recompute=recompute),
        limits=dataclasses.replace(found.limits, memory=memory),
        partition=refilled(found.partition, found.graph, memory),
    )


def _answers(request: Request, num_stages: int | None) -> Iterator[bool | tuple[bool, ...]]:
    """From none to all of what is open."""
    given = request.recompute
    if num_stages is None and not isinstance(given, tuple):  # the solver chooses their number
        yield from (False, True)
        return
    own = given if isinstance(given, tuple) else (None,) * (num_stages or 1)
    count = len(own)
    firsts = range(count + 1) if count <= FEW else [0, *(1 << i for i in range(count.bit_length() - 1)), count]
    answers = (tuple(s < k if at is None else at for s, at in enumerate(own)) for k in firsts)
    yield from dict.fromkeys(answers)


def _is_free(
    problem: Problem, recompute: bool | tuple[bool, ...], found: Decision, decide: Callable[[Problem], Decision]
) -> bool:
    """Whether a step would not be shorter if there were any amount of memory."""
    try:
        unbound = decide(settled(problem.unbound, recompute))
    except PlanError:
        return False
    return found.prediction.step_s <= unbound.prediction.step_s * (1 + EVEN)
