"""Why this plan: one sentence for each choice, with the numbers that decided it."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.ir.plan_table import human_s
from raypipe.planner.tune.attempt import Problem
from raypipe.planner.tune.decision import Decision
from raypipe.planner.tune.request import ASYNCHRONOUS, CHUNKED
from raypipe.planner.tune.weights import weight_reason

__all__ = ["reasons_of"]

WORTH_A_WORD = 1.005
"""Times that workers take beside each other."""


def reasons_of(problem: Problem, best: Decision, looked_at: Sequence[Decision]) -> tuple[tuple[str, str], ...]:
    """(what, why) of each choice.

    Args:
        looked_at: the decisions for every number of stages that fits.
    """
    reasons = [("cut", best.partition.reason), ("stages", _stages(problem, best, looked_at))]
    if not problem.described and any(factor >= WORTH_A_WORD for _, factor in problem.profile.crowd):
        reasons.append(("machine", _machine(problem.profile.crowd)))
    reasons.append(("micro-batches", _microbatches(best)))
    reasons.append(("schedule", _schedule(problem, best)))
    weights = weight_reason(best.request, best.partition.num_stages, best.num_microbatches)
    if weights:
        reasons.append(("weights", weights))
    return tuple(reasons)


def _stages(problem: Problem, best: Decision, looked_at: Sequence[Decision]) -> str:
    request, chosen = problem.request, best.partition.num_stages
    if request.schedule in CHUNKED:
        workers = request.workers(chosen)
        return f"{chosen}, {chosen // workers} on each of {workers} worker{'s' * (workers > 1)}"
    if request.split_points:
        return f"{chosen}, from the split points"
    if request.num_stages is not None:
        return f"{chosen}, as asked for"
    if request.partitioner == "hierarchical":
        return f"{chosen}, chosen together with their replicas"
    if len(looked_at) == 1:
        return f"{chosen}; no other number was looked at" if len(problem.cluster.devices) > 1 else "1, for one worker"
    others = ", ".join(
        f"{d.partition.num_stages}: {human_s(d.prediction.step_s)}"
        for d in sorted(looked_at, key=lambda d: d.partition.num_stages)
    )
    return f"{chosen} of at most {len(problem.cluster.devices)}; predicted steps by number of stages: {others}"


def _machine(crowd: Sequence[tuple[int, float]]) -> str:
    factors = ", ".join(f"{workers} at once: {factor:.2f}" for workers, factor in crowd)
    return f"shared by all workers; processor seconds of each over those of one alone: {factors}"


def _microbatches(best: Decision) -> str:
    count, size = best.num_microbatches, best.microbatch_size
    if best.choice is not None:
        return best.choice.reason
    if best.request.num_microbatches is not None:
        return f"{count} of {size}, as asked for"
    if best.request.schedule in ASYNCHRONOUS:
        return f"{count} of {size}, by the rule of 4 per stage: without a bubble, fewer are as quick"
    return f"{count} of {size}, by the rule of 4 per stage: seconds are known for one size only"


def _schedule(problem: Problem, best: Decision) -> str:
    asked, settled = problem.request.schedule, best.request
    if asked != "auto":
        return f"{asked}, as asked for"
    if best.partition.num_stages == 1:
        return "1f1b, for one stage has nothing to wait for"
    if settled.schedule == "1f1b":
        return "1f1b, for memory is short and it holds the fewest micro-batches"
    if not problem.described:
        return "slack 2 hides transfers of up to half a micro-batch's computation"
    return f"slack {settled.slack} hides the transfers of these links as far as that shortens the step"
