"""Text of a plan: the summary in four lines, the full table, and the table of candidate shapes.

stages:  2. Stage 0: wte (Embedding) to h.0 (Block); stage 1: h.1 (Block) to lm_head (Linear)
step:    393 ms predicted for 32 samples in 4 micro-batches of 8 (81.5 samples/s), workers idle 22% of it; ...
memory:  at most 53.0 MiB on worker 0, 32.6 MiB on worker 1; no limit is set
why:     stage 1 takes longest, 78.3 ms per micro-batch; 2 stages, as set by num_stages

Every number is a field of the plan, and so in its JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from raypipe.ir.plan import Candidate, Plan, Prediction, Stage, smallest_bubble
from raypipe.ir.units import human_bytes, human_rate, human_s

FEW = 4
"""Maximum number of stages or workers of which each one is listed."""


def summary(plan: Plan) -> str:
    """Return the lines on stages, step, memory and the reason of the plan, and one line per note."""
    prediction = plan.prediction
    lines = [
        f"stages:  {_stages(plan)}",
        f"step:    {_step_without_seconds(plan) if prediction is None else _step(plan, prediction)}",
        f"memory:  {_memory_without_bytes(plan) if prediction is None else _memory(plan, prediction)}",
        f"why:     {_why(plan)}",
    ]
    return "\n".join(lines + [f"note:    {note}" for note in plan.notes])


def _stages(plan: Plan) -> str:
    stages, placement = plan.partition.stages, plan.schedule.wiring.placement
    words = dict(plan.reasons)
    wiring = plan.schedule.wiring
    workers = wiring.num_workers
    shared = workers < len(stages)

    def one(stage: Stage) -> str:
        where = f" (worker {placement[stage.index]})" if shared else ""
        if len(stage.devices) > 1:
            where = f" ({len(stage.devices)} workers)"
        held = words.get(f"stage {stage.index}") or _ends(stage)
        return f"stage {stage.index}{where}: {held}"

    count = str(len(stages))
    if shared:
        count += f" on {workers} worker{'s' * (workers > 1)}"
    if wiring.lanes > 1:
        count += f" on {workers} workers" * wiring.replicated + f", gradients summed in {wiring.lanes} lanes"
    shown = [one(stage) for stage in stages]
    if len(shown) > FEW:
        shown = [*shown[:2], "...", shown[-1]]
    text = "; ".join(shown)
    return f"{count}. {text[0].upper()}{text[1:]}"


def _ends(stage: Stage) -> str:
    return stage.first_node if stage.first_node == stage.last_node else f"{stage.first_node} to {stage.last_node}"


def _parts(plan: Plan) -> str:
    count, size = plan.num_microbatches, plan.microbatch_size
    if count == 1:
        return f"{plan.minibatch_size} samples at once"
    at_most = "at most " if count * size > plan.minibatch_size else ""
    return f"{plan.minibatch_size} samples in {count} micro-batches of {at_most}{size}"


def _step(plan: Plan, prediction: Prediction) -> str:
    idle = f", workers idle {prediction.bubble_fraction:.0%} of it" if plan.partition.num_stages > 1 else ""
    links = f", links {prediction.links}" if prediction.hops else ""
    return (
        f"{human_s(prediction.step_s)} predicted for {_parts(plan)} ({human_rate(prediction.samples_per_s)}){idle}; "
        f"computing times {prediction.source}{links}"
    )


def _step_without_seconds(plan: Plan) -> str:
    return f"{_parts(plan)}; how long it takes is not known, for nothing was timed"


def _memory(plan: Plan, prediction: Prediction) -> str:
    """Describe peak memory by worker. A stage with replicas is described once, as "each of stage 1's 2 workers"."""
    placement = plan.schedule.wiring.placement
    held: dict[int, int] = {}
    for stage, worker in zip(prediction.stages, placement, strict=True):
        held[worker] = held.get(worker, 0) + stage.memory_bytes
    limits = {worker: stage.limit_bytes for stage, worker in zip(prediction.stages, placement, strict=True)}
    if all(limit is None for limit in limits.values()):
        end, bare = "; no limit is set", True
    else:
        end, bare = "", len(set(limits.values())) == 1
        if bare:
            end = f", of {human_bytes(limits[0] or 0)} each" if len(held) > 1 else f", of {human_bytes(limits[0] or 0)}"
    names = {worker: _worker(prediction, placement.index(worker), worker) for worker in held}

    def one(worker: int) -> str:
        of = "" if bare else " of no limit" if limits[worker] is None else f" of {human_bytes(limits[worker] or 0)}"
        return f"{human_bytes(held[worker])}{of} on {names[worker]}"

    if len(held) <= FEW:
        return "at most " + ", ".join(map(one, sorted(held))) + end
    # Show the worker nearest to its limit, or the fullest one if no worker has a limit.
    fullest = max(held, key=lambda worker: (held[worker] / (limits[worker] or 1 << 62), held[worker]))
    return f"at most {one(fullest)}, the fullest of {len(held)} workers{end}"


def _worker(prediction: Prediction, stage: int, worker: int) -> str:
    devices = prediction.stages[stage].devices
    if len(devices) > 1:
        return f"each of stage {stage}'s {len(devices)} workers"
    return f"worker {worker}" if not devices or devices[0] == f"worker{worker}" else devices[0]


def _memory_without_bytes(plan: Plan) -> str:
    most = max(plan.partition.stages, key=lambda stage: stage.param_bytes)
    return (
        f"parameters take at most {human_bytes(most.param_bytes)}, on stage {most.index}; what else is needed was not "
        "measured"
    )


def _why(plan: Plan) -> str:
    """Return what bounds the seconds of the step, and the reason for the plan's most important choice.

    Each of the two is cut at its first semicolon.
    """
    words = dict(plan.reasons)
    prediction = plan.prediction
    if prediction is None:
        texts = [plan.partition.reason, words.get("weights", "")]
    elif not plan.weights.synchronous:
        texts = [prediction.bound, words.get("weights", "")]
    elif prediction.decided_by == "memory":
        texts = [prediction.bound, words.get("micro-batches", "")]
    else:
        texts = [prediction.bound, words.get("replicas") or words.get("stages", "")]
    return "; ".join(text.partition("; ")[0] for text in texts if text)


Column = tuple[str, Sequence[str]]
LONGEST_CURVE = 12
SEEN = 0.0005
"""Fraction of a step below which a difference is not shown, because it would be printed as 0.0%."""
_REFUSED = {
    "memory": "does not fit into memory",
    "model": "the model does not take so few samples at once",
}
_ACTION = re.compile(r"\d+([FBIW])(\d+)")


def table(plan: Plan, peaks: Sequence[int]) -> str:
    """Format the plan as a table with one row per stage, followed by lines on step, memory and reasons.

    Args:
        peaks: for each stage, the maximum number of micro-batches in flight.
    """
    stages = plan.partition.stages
    total = sum(stage.param_bytes for stage in stages) or 1
    placement = plan.schedule.wiring.placement
    workers = plan.schedule.wiring.num_workers
    columns: list[Column] = [("stage", [str(stage.index) for stage in stages])]
    if workers < len(stages):
        columns.append(("worker", [str(worker) for worker in placement]))
    if plan.schedule.wiring.replicated and plan.prediction is None:
        columns.append(("replicas", [str(count) for count in plan.partition.replicas]))
    columns += [
        ("parameters", [human_bytes(stage.param_bytes) for stage in stages]),
        ("share", [f"{stage.param_bytes / total:.0%}" for stage in stages]),
        ("receives per sample", [human_bytes(stage.input_bytes) if stage.index else "data" for stage in stages]),
        ("micro-batches held", [str(peak) for peak in peaks]),
    ]
    if any(plan.recompute):
        columns.append(("forwards", ["twice" if again else "once" for again in plan.recompute]))
    if plan.prediction is not None:
        columns += _predicted(plan.prediction)
    lines = [_title(plan, len(stages), workers)]
    widths = [max(len(title), *map(len, cells)) for title, cells in columns]
    lines.append("  ".join([f"{t:>{w}}" for (t, _), w in zip(columns, widths, strict=True)] + ["operations"]))
    for row, stage in enumerate(stages):
        cells = [f"{cells[row]:>{w}}" for (_, cells), w in zip(columns, widths, strict=True)]
        lines.append("  ".join([*cells, f"{stage.first_node} ... {stage.last_node}"]))
    if plan.prediction is None:
        lines.append(f"cut: {plan.partition.reason}{_bubble(plan, workers)}")
    else:
        lines += [*_step_lines(plan.prediction), _fullest(plan.prediction, placement)]
    held = {f"stage {stage.index}" for stage in stages}  # already in the summary
    lines += [f"{what}: {why}" for what, why in plan.reasons if what not in held]
    if plan.prediction is not None and plan.prediction.curve:
        lines += _curve(plan.prediction, plan.num_microbatches)
    return "\n".join(lines)


def _title(plan: Plan, stages: int, workers: int) -> str:
    count = f"{stages} stages" if stages > 1 else "1 stage"
    if workers != stages:
        count += f" on {workers} workers" if workers > 1 else " on 1 worker"
    return (
        f"plan: {count}, schedule {plan.schedule.kind}, {plan.minibatch_size} samples per step, "
        f"{plan.num_microbatches} micro-batch{'es' * (plan.num_microbatches > 1)} of {plan.microbatch_size}"
    )


def _predicted(prediction: Prediction) -> list[Column]:
    worst = max(stage.busy_s for stage in prediction.stages) or 1.0
    columns: list[Column] = [
        ("forward + backward", [f"{human_s(s.forward_s)} + {human_s(s.backward_s)}" for s in prediction.stages]),
        ("of slowest", [f"{s.busy_s / worst:.0%}" for s in prediction.stages]),
        ("memory", [human_bytes(s.memory_bytes) for s in prediction.stages]),
    ]
    if any(s.exchange_s for s in prediction.stages):
        columns.append(
            ("sums of gradients", [human_s(s.exchange_s) if s.exchange_s else "-" for s in prediction.stages])
        )
        behind = [human_s(s.exchange_s - s.hidden_s) if s.exchange_s else "-" for s in prediction.stages]
        columns.append(("waited for", behind))
    if any(s.limit_bytes is not None for s in prediction.stages):
        columns.append(
            ("limit", ["none" if s.limit_bytes is None else human_bytes(s.limit_bytes) for s in prediction.stages])
        )
    if any(len(s.devices) > 1 for s in prediction.stages):
        columns.append(("replicas", [str(max(1, len(s.devices))) for s in prediction.stages]))
    if any(s.devices for s in prediction.stages):
        columns.append(("device", [_device(s.devices) for s in prediction.stages]))
    return columns


def _device(names: Sequence[str]) -> str:
    if not names:
        return "-"
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _step_lines(prediction: Prediction) -> list[str]:
    lines = [
        f"step: {human_s(prediction.step_s)} predicted, {human_rate(prediction.samples_per_s)}, workers idle "
        f"{prediction.bubble_fraction:.1%}, computing time {prediction.source}, links {prediction.links}",
        f"slowest: {prediction.bound}",
    ]
    if prediction.one_f_one_b_s is not None:
        loss = prediction.one_f_one_b_s / prediction.step_s - 1 if prediction.step_s else 0.0
        than = f"{abs(loss):.1%} {'longer' if loss > 0 else 'shorter'}" if abs(loss) >= SEEN else "as long"
        lines.append(f"with 1f1b: {human_s(prediction.one_f_one_b_s)} per step, {than}")
    return lines


def _fullest(prediction: Prediction, placement: Sequence[int]) -> str:
    """Describe the stage with the most memory; if ``placement`` puts several stages on a worker, the fullest worker."""
    if len(set(placement)) < len(placement):
        held: dict[int, int] = {}
        for stage, worker in zip(prediction.stages, placement, strict=True):
            held[worker] = held.get(worker, 0) + stage.memory_bytes
        worst = max(held, key=held.__getitem__)
        each = [
            f"stage {s} {human_bytes(stage.memory_bytes)} at {_moment(stage.fullest_at)}"
            for s, stage in enumerate(prediction.stages)
            if placement[s] == worst
        ]
        return f"memory: worker {worst} is fullest with at most {human_bytes(held[worst])}: {', '.join(each)}"
    fullest = max(prediction.stages, key=lambda s: s.memory_bytes)
    parts = ", ".join(f"{name}: {human_bytes(count)}" for name, count in fullest.memory if count)
    at = _moment(fullest.fullest_at)
    return f"memory: stage {prediction.stages.index(fullest)} is fullest at {at}. {parts or 'nothing known'}"


def _moment(action: str) -> str:
    """Spell out an action: "1F2" -> "1F2 (forward of micro-batch 2)"."""
    match = _ACTION.fullmatch(action)
    if match is None:
        return action
    what = {"F": "forward", "B": "backward", "I": "input half of the backward", "W": "weight half of the backward"}
    return f"{action} ({what[match[1]]} of micro-batch {match[2]})"


def _bubble(plan: Plan, workers: int) -> str:
    """Describe the minimum idle share of the workers; "" if it depends on costs (zb-v), or if a stage has replicas."""
    if not plan.weights.synchronous:
        return "; workers wait only where the pipeline is emptied"
    stages = plan.partition.num_stages
    if (workers < stages and plan.schedule.wiring.split_backward) or plan.schedule.wiring.replicated:
        return ""
    return f"; workers are idle at least {smallest_bubble(stages, workers, plan.num_microbatches):.0%} of a step"


def _curve(prediction: Prediction, chosen: int) -> list[str]:
    """Format a table of predicted times by number of micro-batches: at most LONGEST_CURVE rows around ``chosen``."""
    at = next((i for i, point in enumerate(prediction.curve) if point.num_microbatches == chosen), 0)
    first = max(0, min(at - LONGEST_CURVE // 2, len(prediction.curve) - LONGEST_CURVE))
    best = min(point.predicted_s for point in prediction.curve)
    lines = [
        "other numbers of micro-batches, with the same cut and schedule:",
        f"{'micro-batches':>13}  {'samples':>7}  {'step':>7}  {'longer':>7}",
    ]
    for point in prediction.curve[first : first + LONGEST_CURVE]:
        mark = "<- chosen" if point.num_microbatches == chosen else _REFUSED.get(point.refused, "")
        over = point.predicted_s / best - 1 if best else 0.0
        lines.append(
            f"{point.num_microbatches:>13}  {point.microbatch_size:>7}  {human_s(point.predicted_s):>7}  "
            f"{over:>7.1%}  {mark}".rstrip()
        )
    return lines


def candidate_lines(candidates: Sequence[Candidate]) -> list[str]:
    """Format the compared plans as the lines of a table, in the order given.

    Each row has the best plan for certain numbers of workers per stage, or the reason why these are impossible.
    """
    best_s = min((each.step_s for each in candidates if each.chosen), default=0.0)
    rows = [("workers", "kind", "micro-batches", "step", "memory", "")]
    for each in candidates:
        shape = "-".join(map(str, each.workers))
        if each.refused:
            rows.append((shape, each.kind, "-", "-", "-", each.refused))
            continue
        longer = _longer(each.step_s / best_s) if best_s else ""
        parts = f"{each.num_microbatches} of {each.microbatch_size}"
        memory = human_bytes(each.memory_bytes)
        rows.append((shape, each.kind, parts, human_s(each.step_s), memory, "<- chosen" if each.chosen else longer))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        shape, kind, *numbers = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=False))
        lines.append("  ".join(["", shape, f"{kind.strip():<{widths[1]}}", *numbers, row[-1]]).rstrip())
    return ["candidates:", *lines]


def _longer(ratio: float) -> str:
    if ratio < 1.005:
        return "as long"
    return f"{ratio - 1:.0%} longer" if ratio < 2 else f"{ratio:.1f} times as long"
