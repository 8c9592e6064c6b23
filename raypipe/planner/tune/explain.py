"""Why this plan: one sentence for each choice, with the numbers that decided it."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.ir.codec_cost import NO_CODEC
from raypipe.ir.plan_table import human_s
from raypipe.planner.tune.decision import Decision
from raypipe.planner.tune.problem import Problem
from raypipe.planner.tune.recompute import is_open
from raypipe.planner.tune.request import Request
from raypipe.planner.tune.weights import weight_reason

__all__ = ["reasons_of", "recompute_reason"]

WORTH_A_WORD = 1.005
"""Ratio of two predicted steps above which one is called faster."""
SHARED = (
    "seconds are those of a worker alone on its machine; workers that share one machine's processors may be some "
    "percent slower than predicted"
)


def reasons_of(problem: Problem, best: Decision, looked_at: Sequence[Decision]) -> tuple[tuple[str, str], ...]:
    """(what, why) of each choice.

    Args:
        looked_at: the decisions for every number of stages that fits.
    """
    reasons = [("cut", best.partition.reason), ("stages", _stages(problem, best, looked_at))]
    if not problem.described and best.partition.num_stages > 1:
        reasons.append(("machine", SHARED))
    reasons.append(("micro-batches", _microbatches(best)))
    reasons.append(("schedule", _schedule(problem, best)))
    if problem.request.codecs != (NO_CODEC, NO_CODEC) and best.partition.num_stages > 1:
        reasons.append(("codecs", _codecs(problem.request)))
    if recompute := recompute_reason(problem.request, best.request.recomputed(best.partition.num_stages)):
        reasons.append(("recompute", recompute))
    weights = weight_reason(best.request, best.partition.num_stages, best.num_microbatches)
    if weights:
        reasons.append(("weights", weights))
    return tuple(reasons)


def recompute_reason(asked: Request, found: Sequence[bool]) -> str:
    """Which stages run their forwards again, and why; "" for none.

    Args:
        found: by stage.
    """
    stages = [stage for stage, again in enumerate(found) if again]
    if not stages:
        return ""
    which = "all stages run" if len(stages) == len(found) > 1 else f"stage {stages[0]} runs"
    if 1 < len(stages) < len(found):
        which = f"stages {', '.join(map(str, stages[:-1]))} and {stages[-1]} run"
    given = asked.recompute
    said = not is_open(asked) or (isinstance(given, tuple) and all(given[stage] for stage in stages))
    without = "for memory would not hold the activations otherwise, or steps would take longer"
    why = "as recompute says" if said else without
    its = "its forward" if which.startswith("stage ") else "their forwards"
    return f"{which} {its} again in the backward, {why}"


def _stages(problem: Problem, best: Decision, looked_at: Sequence[Decision]) -> str:
    request, chosen = problem.request, best.partition.num_stages
    what = f"{chosen} stage{'s' * (chosen > 1)}"
    if request.kind.several_stages:
        workers, each = request.workers(chosen), request.replicas_of(chosen)[0]
        found = f"{what}, {chosen // workers} on each of {workers} worker{'s' * (workers > 1)}"
        return found + (f", with {each} replicas of each" if each > 1 else "")
    if request.split_points:
        return f"{what}, cut at the modules that partitioner names"
    if request.num_stages is not None:
        return f"{what}, as num_stages says"
    if request.partitioner == "hierarchical":
        return f"{what}, chosen together with the number of workers of each"
    most = min(len(problem.cluster.devices), len(problem.profile.graph.cut_positions()) + 1)
    if most == 1:
        return f"{what}, for there is one worker" if len(problem.cluster.devices) == 1 else f"{what}: no place to cut"
    if request.num_workers is None and not problem.described:
        return f"{what} by default, for neither num_stages nor num_workers is set"
    if len(looked_at) == 1:
        return f"{what}; any other number does not fit or cannot be faster"
    steps = sorted(looked_at, key=lambda d: d.partition.num_stages)
    others = ", ".join(f"{human_s(d.prediction.step_s)} with {d.partition.num_stages}" for d in steps)
    return f"{what}, {_best_of(best, looked_at)}; predicted steps: {others}"


def _best_of(best: Decision, looked_at: Sequence[Decision]) -> str:
    """How a number of stages compares with the next best one."""
    others = [d for d in looked_at if d.partition.num_stages != best.partition.num_stages]
    next_s, step_s = min(d.prediction.step_s for d in others), best.prediction.step_s
    next_best = min(others, key=lambda d: d.prediction.step_s).partition.num_stages
    if next_s > step_s * WORTH_A_WORD:
        return f"{next_s / step_s - 1:.0%} faster than {next_best}" if step_s else "the fastest number"
    return f"as fast as {next_best}, with fewer workers"


def _microbatches(best: Decision) -> str:
    count, size = best.num_microbatches, best.microbatch_size
    what = f"{count} micro-batch{'es' * (count > 1)} of {size}"
    if best.choice is not None:
        return best.choice.reason
    if best.request.num_microbatches is not None:
        return f"{what}, as num_microbatches says"
    if best.request.replicated:
        return f"{what}, 4 per worker"
    if not best.request.kind.synchronous:
        return f"{what}, 4 per stage; workers do not wait between steps, so the number hardly matters"
    return f"{what}, 4 per stage; only one size was timed, so others could not be compared"


def _codecs(request: Request) -> str:
    """What messages are compressed to, and what it takes."""
    told = []
    for which, codec in zip(("activations", "gradients"), request.codecs, strict=True):
        if codec != NO_CODEC:
            encode, decode = codec.encode_s_per_byte * 1e9, codec.decode_s_per_byte * 1e9
            told.append(
                f"{which} in {codec.name}, {codec.ratio:.1f} times smaller than fp32, {encode:.2f} and {decode:.2f} s "
                "per GB to encode and decode"
            )
    return "; ".join(told)


def _schedule(problem: Problem, best: Decision) -> str:
    asked, settled = problem.request.schedule, best.request
    if asked != "auto":
        return f"{asked}, as schedule says"
    if best.partition.num_stages == 1:
        return "1f1b, for a single stage waits for nobody"
    if settled.schedule == "1f1b":
        return "1f1b, the quickest within memory: it holds the fewest micro-batches at once"
    if settled.schedule == "zb-h1":
        return "zb-h1; gradients of parameters are computed where stages would wait, so that less of the step is idle"
    if not problem.described:
        return "slack 2; stages start one forward more ahead than in 1f1b, so that computing hides what links take"
    return f"slack {settled.slack}; stages start more forwards ahead than in 1f1b, so that computing hides these links"
