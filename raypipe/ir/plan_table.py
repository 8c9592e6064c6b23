"""A plan as text for people; every number in it is a field of the plan, so its JSON holds them all.

stage  devices  parameters  ...  ms/micro-batch  busy    memory     limit   operations
    0  gpu0         4.0 MiB           12.3        97%    10.1 GiB  24.0 GiB  embed ... blocks.3
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raypipe.ir.plan import Plan
    from raypipe.ir.prediction import Prediction

__all__ = ["human_bytes", "human_s", "table"]

Column = tuple[str, Sequence[str]]
LONGEST_CURVE = 12


def table(plan: Plan, peaks: Sequence[int]) -> str:
    """The plan as a table.

    Args:
        peaks: most micro-batches in flight, by stage.
    """
    stages = plan.partition.stages
    total = sum(stage.param_bytes for stage in stages) or 1
    columns: list[Column] = [
        ("stage", [str(stage.index) for stage in stages]),
        ("parameters", [human_bytes(stage.param_bytes) for stage in stages]),
        ("share", [f"{stage.param_bytes / total:.0%}" for stage in stages]),
        ("receives/sample", [human_bytes(stage.input_bytes) if stage.index else "data" for stage in stages]),
        ("in flight", [str(peak) for peak in peaks]),
    ]
    if plan.prediction is not None:
        columns += _predicted(plan.prediction)
    count = f"{len(stages)} stages" if len(stages) > 1 else "1 stage"
    lines = [
        f"plan: {count}, schedule {plan.schedule.kind}, {plan.num_microbatches} micro-batches of "
        f"{plan.microbatch_size} of {plan.minibatch_size} samples, transport {plan.transport}"
    ]
    widths = [max(len(title), *map(len, cells)) for title, cells in columns]
    lines.append("  ".join([f"{t:>{w}}" for (t, _), w in zip(columns, widths, strict=True)] + ["operations"]))
    for row, stage in enumerate(stages):
        cells = [f"{cells[row]:>{w}}" for (_, cells), w in zip(columns, widths, strict=True)]
        lines.append("  ".join([*cells, f"{stage.first_node} ... {stage.last_node}"]))
    if plan.prediction is None:
        ideal = (len(stages) - 1) / (plan.num_microbatches + len(stages) - 1)
        bubble = f"smallest possible bubble {ideal:.0%}" if plan.weights.synchronous else "no bubble but at a drain"
        lines.append(f"cut: {plan.partition.reason}; {bubble}")
    else:
        lines += _step(plan.prediction)
    lines += [f"{what}: {why}" for what, why in plan.reasons]
    if plan.prediction is not None and plan.prediction.curve:
        lines += _curve(plan.prediction, plan.num_microbatches)
    return "\n".join(lines + [f"note: {note}" for note in plan.notes])


def _predicted(found: Prediction) -> list[Column]:
    worst = max(stage.busy_s for stage in found.stages) or 1.0
    columns: list[Column] = [
        ("seconds F + B", [f"{human_s(s.forward_s)} + {human_s(s.backward_s)}" for s in found.stages]),
        ("of slowest", [f"{s.busy_s / worst:.0%}" for s in found.stages]),
        ("memory", [human_bytes(s.memory_bytes) for s in found.stages]),
    ]
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
        f"step: {human_s(found.step_s)} predicted, {found.samples_per_s:.4g} samples/s, bubble "
        f"{found.bubble_fraction:.1%}, seconds {found.source}, links {found.links}",
        f"bound: {found.bound}",
    ]
    if found.one_f_one_b_s is not None:
        loss = found.one_f_one_b_s / found.step_s - 1 if found.step_s else 0.0
        lines.append(f"1f1b: would take {human_s(found.one_f_one_b_s)} per step, {loss:+.1%}")
    fullest = max(found.stages, key=lambda s: s.memory_bytes)
    parts = ", ".join(f"{name} {human_bytes(count)}" for name, count in fullest.memory if count)
    lines.append(
        f"memory: stage {found.stages.index(fullest)} is fullest at {fullest.fullest_at}: {parts or 'nothing known'}"
    )
    return lines


def _curve(found: Prediction, chosen: int) -> list[str]:
    """The curve around the choice; a mini-batch of many divisors has more points than anybody reads."""
    at = next((i for i, point in enumerate(found.curve) if point.num_microbatches == chosen), 0)
    first = max(0, min(at - LONGEST_CURVE // 2, len(found.curve) - LONGEST_CURVE))
    best = min(point.predicted_s for point in found.curve)
    lines = [f"{'micro-batches':>13}  {'samples':>7}  {'closed form':>11}  over best"]
    for point in found.curve[first : first + LONGEST_CURVE]:
        mark = "<- chosen" if point.num_microbatches == chosen else point.refused and f"refused: {point.refused}"
        over = point.predicted_s / best - 1 if best else 0.0
        lines.append(
            f"{point.num_microbatches:>13}  {point.microbatch_size:>7}  {human_s(point.predicted_s):>11}  "
            f"{over:>9.1%}  {mark}".rstrip()
        )
    return lines


def human_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_s(seconds: float) -> str:
    """0.0123 -> "12.3 ms"."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 1000 else f"{seconds * factor:.0f} {unit}"
    raise AssertionError("unreachable: microseconds are the last unit")
