"""Choice of the stages that recompute activations, if the request leaves it open.

    1. recompute on the first k stages, which hold the most micro-batches; compare k = 0, 1, 2, ... by step time
    2. without memory limits, recompute on no stage
    3. then drop recomputation on each stage that fits without it, the stage with the longest forward first

A stage that holds the activations of one micro-batch only, as the last stage of 1F1B, saves nothing by recomputation,
and runs one more forward for every micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from raypipe.planner.cost.memory import MemoryModel
from raypipe.planner.cost.tolerance import EVEN
from raypipe.planner.partition.fit import fits_within, refilled
from raypipe.planner.search.cut_costs import Shape
from raypipe.planner.search.cut_search import ShapeError, ShapeSearch
from raypipe.planner.search.problem import Decision, Problem
from raypipe.planner.search.request import Request

FEW = 8
"""Largest number of stages for which every k is tried; above it, powers of two."""


def is_open(request: Request) -> bool:
    """Return True if recomputation is left open on any stage."""
    return request.recompute is None or (isinstance(request.recompute, tuple) and None in request.recompute)


Setting = bool | tuple[bool, ...]
"""Stages that recompute activations: all or none, or one value per stage."""


def best_recompute(
    problem: Problem, shape: Shape, search_of: Callable[[Setting], ShapeSearch], below_s: float
) -> Decision | None:
    """Find the quickest decision of a shape over all permitted settings of recomputation.

    Of equally quick decisions, the one with the fewest recomputing stages is returned.

    Args:
        search_of: returns the ShapeSearch for a setting.
        below_s: only steps shorter than these seconds count; None is returned if there is no such step.

    Raises:
        ShapeError: nothing fits; the error is that of the setting with the most recomputation.
    """
    if not is_open(problem.request):
        return search_of(problem.request.recomputes).best(shape, below_s)
    best: Decision | None = None
    refusal: ShapeError | None = None
    fits, options = False, list(_recompute_options(problem.request, len(shape)))
    for recompute in options:
        try:
            found = search_of(recompute).best(shape, below_s)
        except ShapeError as error:
            if refusal is None and problem.bounded:
                # Nothing is simulated: this raises ShapeError at once if the setting with the least memory never fits.
                search_of(options[-1]).best(shape, 0.0)
            refusal = error
        else:
            fits = True
            if found is not None:
                best, below_s = found, found.prediction.step_s / (1 + EVEN)
        if not problem.bounded:
            break
    if not fits and refusal is not None:
        raise refusal
    return best


def only_where_needed(problem: Problem, decision: Decision) -> Decision:
    """Drop recomputation on each stage that fits without it; the prediction of the returned decision is not updated."""
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
    """Return the setting with recomputation on all stages for which the request does not forbid it."""
    setting = request.recompute
    return tuple(at is not False for at in setting) if isinstance(setting, tuple) else setting is not False


def _with(decision: Decision, recompute: tuple[bool, ...], memory: MemoryModel) -> Decision:
    return dataclasses.replace(
        decision,
        request=dataclasses.replace(decision.request, recompute=recompute),
        limits=dataclasses.replace(decision.limits, memory=memory),
        partition=refilled(decision.partition, decision.graph, memory),
    )


def _recompute_options(request: Request, num_stages: int) -> Iterator[Setting]:
    """Yield the settings to try: recomputation on the first k stages, k = 0, 1, ..., as far as they are open."""
    own = request.recompute if isinstance(request.recompute, tuple) else (None,) * num_stages
    firsts = list(range(num_stages + 1))
    if num_stages > FEW:
        firsts = [0, *(1 << i for i in range(num_stages.bit_length() - 1)), num_stages]
    options = (tuple(s < k if at is None else at for s, at in enumerate(own)) for k in firsts)
    yield from dict.fromkeys(options)
