"""Steps of a plan with other numbers of micro-batches, which explain the chosen number."""

from __future__ import annotations

import dataclasses

from raypipe.ir.plan import CurvePoint
from raypipe.planner.cost.columns import columns_of
from raypipe.planner.cost.microbatch import MicrobatchChoice, divisors, explain_number
from raypipe.planner.partition.fit import fits_within
from raypipe.planner.search.predict import seconds_of
from raypipe.planner.search.problem import Decision, Problem, limits_of, step_s_of

MOST_WORK = 8_000
"""Largest product of stages and micro-batches of a step that is added to the curve."""


def choice_of(problem: Problem, decision: Decision) -> MicrobatchChoice | None:
    """Explain the number of micro-batches of a plan by predicted steps of the same cut and schedule with other numbers.

    Returns None if the number was given, the schedule is asynchronous, or only one micro-batch size was measured.
    """
    request, stages, minibatch = decision.request, decision.partition.num_stages, decision.minibatch_size
    if problem.request.num_microbatches is not None or problem.times is None or not request.kind.synchronous:
        return None
    curve = [CurvePoint(decision.num_microbatches, decision.microbatch_size, step_s_of(decision))]
    for count in divisors(minibatch):
        size, most = minibatch // count, max(decision.partition.replicas)
        if count == decision.num_microbatches or count < most or count * stages > MOST_WORK:
            continue
        other = _with_number(problem, decision, count, size)
        refused = "" if request.takes(minibatch, size) else "model"
        if not refused and problem.bounded:
            fits = fits_within(other.partition, other.graph, other.cluster, other.limits, other.limits.memory)
            refused = "" if fits else "memory"
        curve.append(CurvePoint(count, size, seconds_of(other), refused))
    curve.sort(key=lambda point: point.num_microbatches)
    return explain_number(curve, decision.num_microbatches, minibatch, problem.times)


def _with_number(problem: Problem, decision: Decision, count: int, size: int) -> Decision:
    """Return the decision with ``count`` micro-batches of ``size`` samples, and the same cut and schedule."""
    graph, stages = problem.at(size), decision.partition.num_stages
    then_s, now_s = columns_of(decision.graph).busy_s, columns_of(graph).busy_s
    moved = []
    for stage in decision.partition.stages:
        nodes = list(decision.partition.nodes_of(stage))
        grown = float(now_s[nodes].sum()) / (float(then_s[nodes].sum()) or 1.0)
        moved.append(dataclasses.replace(stage, period_s=stage.period_s * grown))
    return dataclasses.replace(
        decision,
        graph=graph,
        limits=limits_of(decision.request, stages, stages, count, size),
        partition=dataclasses.replace(decision.partition, stages=tuple(moved)),
        num_microbatches=count,
        microbatch_size=size,
    )
