"""Texts for users: the reason of each choice in a plan, with the numbers that decided, and a profile as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from raypipe.ir.communication import NO_CODEC
from raypipe.ir.graph import Node
from raypipe.ir.profile import Profile
from raypipe.ir.units import human_bytes, human_s
from raypipe.planner.search.predict import source_of
from raypipe.planner.search.problem import Decision, Problem, times_of
from raypipe.planner.search.recompute import is_open
from raypipe.planner.search.request import Request
from raypipe.planner.search.schedule_settings import weight_reason

WORTH_A_WORD = 1.005
"""Ratio of two predicted step times above which the shorter one is called faster."""
WORTHLESS = 0.5
"""Relative distance from the lower bound from which a reason leaves it out: on slow links it counts computing only."""
SHARED = (
    "seconds are those of a worker alone on its machine; workers that share one machine's processors may be some "
    "percent slower than predicted"
)


def reasons_of(
    problem: Problem, best: Decision, looked_at: Sequence[Decision], bound_s: float
) -> tuple[tuple[str, str], ...]:
    """List (choice, reason) pairs, such as ("schedule", "1f1b, as set by schedule").

    Args:
        looked_at: the compared decisions, one for each number of stages that fits.
        bound_s: lower bound of the seconds of a step over all permitted plans.
    """
    reasons = [("cut", best.partition.reason), ("stages", _stages(problem, best, looked_at))]
    over = best.prediction.step_s / bound_s - 1 if bound_s > 0 else math.inf
    if best.partition.num_stages > 1 and over < WORTHLESS:
        reasons.append(("optimum", f"the step is within {over:.0%} of the shortest that this request allows"))
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


def recompute_reason(request: Request, recompute: Sequence[bool]) -> str:
    """Explain which stages recompute activations, and why; "" if no stage does.

    Args:
        recompute: by stage, True if it recomputes.
    """
    stages = [stage for stage, again in enumerate(recompute) if again]
    if not stages:
        return ""
    which = "all stages run" if len(stages) == len(recompute) > 1 else f"stage {stages[0]} runs"
    if 1 < len(stages) < len(recompute):
        which = f"stages {', '.join(map(str, stages[:-1]))} and {stages[-1]} run"
    setting = request.recompute
    is_set = not is_open(request) or (isinstance(setting, tuple) and all(setting[stage] for stage in stages))
    without = "for memory would not hold the activations otherwise, or steps would take longer"
    why = "as set by recompute" if is_set else without
    its = "its forward" if which.startswith("stage ") else "their forwards"
    return f"{which} {its} again in the backward, {why}"


def _stages(problem: Problem, best: Decision, looked_at: Sequence[Decision]) -> str:
    request, chosen = problem.request, best.partition.num_stages
    what = f"{chosen} stage{'s' * (chosen > 1)}"
    if request.kind.several_stages:
        workers, each = request.workers(chosen), request.replicas_of(chosen)[0]
        text = f"{what}, {chosen // workers} on each of {workers} worker{'s' * (workers > 1)}"
        return text + (f", with {each} replicas of each" if each > 1 else "")
    if request.split_points:
        return f"{what}, cut at the modules that partitioner names"
    if request.num_stages is not None:
        return f"{what}, as set by num_stages"
    most = min(len(problem.cluster.devices), len(problem.profile.graph.cut_positions()) + 1)
    if most == 1:
        return f"{what}, for there is one worker" if len(problem.cluster.devices) == 1 else f"{what}: no place to cut"
    if request.num_workers is None and not problem.described:
        return f"{what} by default, for neither num_stages nor num_workers is set"
    if all(each.partition.num_stages == best.partition.num_stages for each in looked_at):
        return f"{what}; any other number does not fit or cannot be faster"
    steps = sorted(looked_at, key=lambda d: d.partition.num_stages)
    others = ", ".join(f"{human_s(d.prediction.step_s)} with {d.partition.num_stages}" for d in steps)
    return f"{what}, {_best_of(best, looked_at)}; predicted steps: {others}"


def _best_of(best: Decision, looked_at: Sequence[Decision]) -> str:
    """Describe how much faster the best number of stages is than the next best one."""
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
        return f"{what}, as set by num_microbatches"
    if best.request.replicated:
        return f"{what}, 4 per worker"
    if not best.request.kind.synchronous:
        return f"{what}, 4 per stage; workers do not wait between steps, so the number hardly matters"
    return f"{what}, 4 per stage; only one size was timed, so others could not be compared"


def _codecs(request: Request) -> str:
    """Describe the codecs of the messages and their cost."""
    texts = []
    for which, codec in zip(("activations", "gradients"), request.codecs, strict=True):
        if codec != NO_CODEC:
            encode, decode = codec.encode_s_per_byte * 1e9, codec.decode_s_per_byte * 1e9
            texts.append(
                f"{which} in {codec.name}, {codec.ratio:.1f} times smaller than fp32, {encode:.2f} and {decode:.2f} s "
                "per GB to encode and decode"
            )
    return "; ".join(texts)


def codec_reason(best: Decision, found: Sequence[Decision]) -> str:
    """Explain the choice of a pair of codecs by predicted steps.

    Args:
        found: decisions with the codecs that are used without a choice, and with others; ``best`` is one of them.
    """
    steps = {"/".join(codec.name for codec in each.request.codecs): human_s(each.prediction.step_s) for each in found}
    own = next(iter(steps))
    names = "/".join(codec.name for codec in best.request.codecs)
    none = f"{own}: no permitted codec makes the step shorter by min_gain"
    what = none if names == own else f"{names}, which make the step shorter"
    listed = ", ".join(f"{step} with {pair}" for pair, step in steps.items())
    return f"{what}; predicted steps by codec of activations/gradients: {listed}"


def _schedule(problem: Problem, best: Decision) -> str:
    requested, settled = problem.request.schedule, best.request
    if requested != "auto":
        k = (
            f"; k={settled.group_size} has the shortest step"
            if settled.group_size != problem.request.group_size
            else ""
        )
        return f"{requested}, as set by schedule{k}"
    if best.partition.num_stages == 1:
        return "1f1b, for a single stage waits for no other"
    if settled.schedule == "1f1b":
        return "1f1b, the quickest within memory: it holds the fewest micro-batches at once"
    if settled.schedule == "zb-h1":
        text = "zb-h1; gradients of parameters are computed where stages would wait, so that less of the step is idle"
        return text + "; stages that lack memory put off fewer of them" * bool(settled.lag)
    if not problem.described:
        return "slack 2; stages start one forward more ahead than in 1f1b, so that computing hides what links take"
    return f"slack {settled.slack}; stages start more forwards ahead than in 1f1b, so that computing hides these links"


LONGEST = 40
"""Most rows of a profile's table."""


def profile_table(profile: Profile) -> str:
    """Format a profile as a table, with one row for each run of neighbouring operations of a module.

    At most ``LONGEST`` rows are kept, those that take longest. Seconds are of one micro-batch; bytes of activations and
    outputs are of one sample.
    """
    rows = _by_module(profile.graph.nodes)
    shown = sorted(sorted(range(len(rows)), key=lambda i: -sum(n.busy_s for n in rows[i][1]))[:LONGEST])
    total_s = profile.graph.busy_s or 1.0
    lines = [f"{'forward':>9}  {'backward':>9}  {'share':>5}  {'parameters':>10}  {'kept':>10}  {'output':>10}  module"]
    for name, nodes in (rows[i] for i in shown):
        lines.append(_row(nodes, total_s, f"{name or '(model)'}{f' ({len(nodes)} operations)' * (len(nodes) > 1)}"))
    if len(shown) < len(rows):
        lines.append(f"... and {len(rows) - len(shown)} more that take less; --json has all")
    lines.append(_row(profile.graph.nodes, total_s, f"whole model, {len(profile.graph.nodes)} operations"))
    lines.append(f"micro-batch of {profile.microbatch_size}; seconds {source_of(profile.graph)}")
    if profile.device:
        lines.append(f"on {profile.device}")
    if len(profile.seconds_by_size) > 1:
        lines.append(
            "seconds by micro-batch size: " + ", ".join(f"{b}: {human_s(s)}" for b, s in profile.seconds_by_size)
        )
    if (times := times_of(profile)) is not None:
        lines.append(
            f"b samples take about {human_s(times.sigma_s)} x (b + {times.overhead_samples:.3g}), "
            f"at most {times.worst_error:.0%} beside what was measured"
        )
    return "\n".join(lines + [f"note: {note}" for note in profile.notes])


def _by_module(nodes: Sequence[Node]) -> list[tuple[str, list[Node]]]:
    rows: list[tuple[str, list[Node]]] = []
    for node in nodes:
        if not rows or rows[-1][0] != node.module:
            rows.append((node.module, []))
        rows[-1][1].append(node)
    return rows


def _row(nodes: Sequence[Node], total_s: float, name: str) -> str:
    busy_s = sum(node.busy_s for node in nodes)
    return (
        f"{human_s(sum(n.forward_s for n in nodes)):>9}  {human_s(sum(n.backward_s for n in nodes)):>9}  "
        f"{busy_s / total_s:>5.0%}  {human_bytes(sum(n.param_bytes for n in nodes)):>10}  "
        f"{human_bytes(sum(n.activation_bytes for n in nodes)):>10}  {human_bytes(nodes[-1].output_bytes):>10}  {name}"
    )
