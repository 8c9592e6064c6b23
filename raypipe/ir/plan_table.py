"""All of a plan as text for people; every number in it is a field of the plan, so its JSON holds them all.

stage  parameters  ...  forward + backward  of slowest    memory     limit  device  operations
    0     4.0 MiB         4.1 ms + 8.2 ms         97%  10.1 GiB  24.0 GiB  gpu0    embed ... blocks.3
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raypipe.ir.plan_facts import PlanFacts
    from raypipe.ir.prediction import Prediction

__all__ = ["human_bytes", "human_rate", "human_s", "smallest_bubble", "table"]

Column = tuple[str, Sequence[str]]
LONGEST_CURVE = 12
SEEN = 0.0005
"""Share of a step below which a difference would be written as 0.0%."""
_REFUSED = {
    "memory": "does not fit into memory",
    "model": "the model does not take so few samples at once",
    "schedule": "the schedule or the replicas need a multiple",
}
_ACTION = re.compile(r"\d+([FBIW])(\d+)")


def table(plan: PlanFacts, peaks: Sequence[int]) -> str:
    """The plan as a table.

    Args:
        peaks: most micro-batches in flight, by stage.
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
        lines += [*_step(plan.prediction), _memory(plan.prediction, placement)]
    held = {f"stage {stage.index}" for stage in stages}  # which the four lines tell
    lines += [f"{what}: {why}" for what, why in plan.reasons if what not in held]
    if plan.prediction is not None and plan.prediction.curve:
        lines += _curve(plan.prediction, plan.num_microbatches)
    return "\n".join(lines)


def _title(plan: PlanFacts, stages: int, workers: int) -> str:
    count = f"{stages} stages" if stages > 1 else "1 stage"
    if workers != stages:
        count += f" on {workers} workers" if workers > 1 else " on 1 worker"
    return (
        f"plan: {count}, schedule {plan.schedule.kind}, {plan.minibatch_size} samples per step, "
        f"{plan.num_microbatches} micro-batch{'es' * (plan.num_microbatches > 1)} of {plan.microbatch_size}, "
        f"transport {plan.transport}"
    )


def _predicted(found: Prediction) -> list[Column]:
    worst = max(stage.busy_s for stage in found.stages) or 1.0
    columns: list[Column] = [
        ("forward + backward", [f"{human_s(s.forward_s)} + {human_s(s.backward_s)}" for s in found.stages]),
        ("of slowest", [f"{s.busy_s / worst:.0%}" for s in found.stages]),
        ("memory", [human_bytes(s.memory_bytes) for s in found.stages]),
    ]
    if any(s.exchange_s for s in found.stages):
        columns.append(("sums of gradients", [human_s(s.exchange_s) if s.exchange_s else "-" for s in found.stages]))
        behind = [human_s(s.exchange_s - s.hidden_s) if s.exchange_s else "-" for s in found.stages]
        columns.append(("waited for", behind))
    if any(s.limit_bytes is not None for s in found.stages):
        columns.append(
            ("limit", ["none" if s.limit_bytes is None else human_bytes(s.limit_bytes) for s in found.stages])
        )
    if any(len(s.devices) > 1 for s in found.stages):
        columns.append(("replicas", [str(max(1, len(s.devices))) for s in found.stages]))
    if any(s.devices for s in found.stages):
        columns.append(("device", [_device(s.devices) for s in found.stages]))
    return columns


def _device(names: Sequence[str]) -> str:
    if not names:
        return "-"
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _step(found: Prediction) -> list[str]:
    lines = [
        f"step: {human_s(found.step_s)} predicted, {human_rate(found.samples_per_s)}, workers idle "
        f"{found.bubble_fraction:.1%}, computing time {found.source}, links {found.links}",
        f"slowest: {found.bound}",
    ]
    if found.one_f_one_b_s is not None:
        loss = found.one_f_one_b_s / found.step_s - 1 if found.step_s else 0.0
        than = f"{abs(loss):.1%} {'longer' if loss > 0 else 'shorter'}" if abs(loss) >= SEEN else "as long"
        lines.append(f"with 1f1b: {human_s(found.one_f_one_b_s)} per step, {than}")
    return lines


def _memory(found: Prediction, placement: Sequence[int]) -> str:
    """The fullest stage, or, where workers hold several, the fullest worker: the sum of what its stages hold."""
    if len(set(placement)) < len(placement):
        held: dict[int, int] = {}
        for stage, worker in zip(found.stages, placement, strict=True):
            held[worker] = held.get(worker, 0) + stage.memory_bytes
        worst = max(held, key=held.__getitem__)
        each = [
            f"stage {s} {human_bytes(stage.memory_bytes)} at {_moment(stage.fullest_at)}"
            for s, stage in enumerate(found.stages)
            if placement[s] == worst
        ]
        return f"memory: worker {worst} is fullest with at most {human_bytes(held[worst])}: {', '.join(each)}"
    fullest = max(found.stages, key=lambda s: s.memory_bytes)
    parts = ", ".join(f"{name}: {human_bytes(count)}" for name, count in fullest.memory if count)
    at = _moment(fullest.fullest_at)
    return f"memory: stage {found.stages.index(fullest)} is fullest at {at}. {parts or 'nothing known'}"


def _moment(action: str) -> str:
    """ "1F2" -> "1F2 (forward of micro-batch 2)"."""
    found = _ACTION.fullmatch(action)
    if found is None:
        return action
    what = {"F": "forward", "B": "backward", "I": "input half of the backward", "W": "weight half of the backward"}
    return f"{action} ({what[found[1]]} of micro-batch {found[2]})"


def _bubble(plan: PlanFacts, workers: int) -> str:
    """What no costs could beat; nothing of a V with split backwards, whose parts fill it as far as they last."""
    if not plan.weights.synchronous:
        return "; workers wait only where the pipeline is emptied"
    stages = plan.partition.num_stages
    if (workers < stages and plan.schedule.wiring.split_backward) or plan.schedule.wiring.replicated:
        return ""
    return f"; workers are idle at least {smallest_bubble(stages, workers, plan.num_microbatches):.0%} of a step"


def smallest_bubble(num_stages: int, num_workers: int, num_microbatches: int) -> float:
    """Share of worker time without computation, of equal stages, free links and whole backwards.

    S stages on P workers, v = S / P on each: from M = P on a worker waits for P - 1 of the smaller stages, with fewer
    micro-batches for all of the pipeline to fill (Narayanan et al., arXiv:2104.04473, section 2.2; 1F1B where v is 1).
    """
    each = num_stages / num_workers
    slots = max(each * num_microbatches + num_workers - 1, num_microbatches + num_stages - 1)
    return 1 - each * num_microbatches / slots


def _curve(found: Prediction, chosen: int) -> list[str]:
    """Other numbers of micro-batches, around the choice; many divisors make more of them than anybody reads."""
    at = next((i for i, point in enumerate(found.curve) if point.num_microbatches == chosen), 0)
    first = max(0, min(at - LONGEST_CURVE // 2, len(found.curve) - LONGEST_CURVE))
    best = min(point.predicted_s for point in found.curve)
    lines = [
        "other numbers of micro-batches, by a formula that is rougher than the prediction above:",
        f"{'micro-batches':>13}  {'samples':>7}  {'step':>7}  {'longer':>7}",
    ]
    for point in found.curve[first : first + LONGEST_CURVE]:
        mark = "<- chosen" if point.num_microbatches == chosen else _REFUSED.get(point.refused, "")
        over = point.predicted_s / best - 1 if best else 0.0
        lines.append(
            f"{point.num_microbatches:>13}  {point.microbatch_size:>7}  {human_s(point.predicted_s):>7}  "
            f"{over:>7.1%}  {mark}".rstrip()
        )
    return lines


def human_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_rate(samples_per_s: float) -> str:
    """61550.1 -> "61,550 samples/s"."""
    return f"{samples_per_s:,.0f} samples/s" if samples_per_s >= 100 else f"{samples_per_s:.3g} samples/s"


def human_s(seconds: float) -> str:
    """0.0123 -> "12.3 ms"."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 1000 else f"{seconds * factor:.0f} {unit}"
    raise AssertionError("unreachable: microseconds are the last unit")
