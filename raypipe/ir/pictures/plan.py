"""A plan as a picture: the predicted step as a timeline, and below it seconds and bytes of every stage as bars."""

from __future__ import annotations

import html
from collections.abc import Sequence

from raypipe.ir.pictures.legend import ROW as LEGEND_ROW
from raypipe.ir.pictures.legend import legend
from raypipe.ir.pictures.schedule import schedule_svg
from raypipe.ir.pictures.theme import frame, text
from raypipe.ir.pictures.timeline import Drawn, timeline_svg
from raypipe.ir.plan_facts import PlanFacts
from raypipe.ir.plan_table import human_bytes, human_s
from raypipe.ir.prediction import Prediction, StagePrediction
from raypipe.ir.schedule import dependencies

__all__ = ["plan_html", "plan_svg", "stage_bars_svg"]

BYTES = (1, 3, 5, 6, 4, 7, 8, 9)
"""Colours of what bytes are for: those of ``LINES`` that are neither F's nor B's."""

LEFT, BAR, ROW, HEAD, FOOT = 104.0, 16.0, 52.0, 40.0, 56.0
LETTER_PX = 8.0
FAR = 4
"""A limit of more than so many times what the fullest stage holds is told in words: bars on its scale would be dots."""


def plan_svg(plan: PlanFacts, timeline: Drawn, width: int = 1200) -> str:
    """Timeline above, bars below.

    Args:
        timeline: the predicted step.

    Raises:
        ValueError: the plan was made without a profile.
    """
    if plan.prediction is None:
        raise ValueError("this plan was made without a profile, so there is nothing to draw")
    placement = plan.schedule.wiring.placement
    parts = (timeline_svg([timeline], width), stage_bars_svg(plan.prediction, width, placement))
    heights = [_height(part) for part in parts]
    # A picture may stand inside another one; only its place is added.
    placed = (part.replace("<svg ", f'<svg x="0" y="{sum(heights[:i]):.0f}" ', 1) for i, part in enumerate(parts))
    return frame(width, sum(heights), "The plan's predicted step, and its stages", "".join(placed))


def plan_html(plan: PlanFacts, words: str) -> str:
    """For notebooks: the plan in words, its schedule in slots, and the stages' bars where they are known.

    Args:
        words: of the plan.
    """
    wiring = plan.schedule.wiring
    rows = plan.schedule.rows(2 if plan.schedule.prologue else 1)
    schedule = schedule_svg(rows, lambda action: dependencies(action, wiring), plan.schedule.kind)
    bars = "" if plan.prediction is None else stage_bars_svg(plan.prediction, 1200, wiring.placement)
    return f'<pre style="white-space:pre-wrap">{html.escape(words)}</pre>{schedule}{bars}'


def stage_bars_svg(found: Prediction, width: int = 1200, placement: Sequence[int] = ()) -> str:
    """Two bars per stage: seconds per micro-batch (F, B) and bytes by what they are for, with a near limit as a line.

    Args:
        placement: worker of each stage, which is named where one holds several; the limit is that of the worker.
    """
    shared = len(set(placement)) < len(placement)
    slowest_s = max(stage.busy_s for stage in found.stages) or 1.0
    fullest = max(s.memory_bytes for s in found.stages)
    near = [s.limit_bytes for s in found.stages if s.limit_bytes is not None and s.limit_bytes <= FAR * fullest]
    most = max([fullest, *near]) or 1
    told = [_bytes_told(s, placement[at] if shared else None) for at, s in enumerate(found.stages)]
    scale = width - LEFT - 24 - LETTER_PX * max(map(len, told))
    title = f"Stages: time per micro-batch ({found.source}) and memory at its fullest (predicted)"
    parts = [text(12, 24, title, size=17, bold=True)]
    names = list(dict.fromkeys(name for stage in found.stages for name, count in stage.memory if count))
    kinds = list(dict.fromkeys(_kind(name) for name in names))
    for index, stage in enumerate(found.stages):
        top = HEAD + index * ROW
        parts.append(text(LEFT - 10, top + 13, f"stage {index}", anchor="end"))
        if shared:
            parts.append(text(LEFT - 10, top + BAR + 15, f"worker {placement[index]}", "mute", "end"))
        _add_seconds(parts, top, stage, slowest_s, scale)
        _add_bytes(parts, top + BAR + 3, stage, most, scale, kinds, told[index])
    top = HEAD + len(found.stages) * ROW
    entries = [("F", "forward"), ("B", "backward"), *((f"area{_colour(kinds, k)}", k) for k in kinds)]
    explained, rows = legend(entries, LEFT, top, width - LEFT / 4)
    return frame(
        width, top + FOOT - 24 + (rows - 1) * LEGEND_ROW, "Seconds and bytes of every stage", "".join(parts + explained)
    )


def _add_seconds(parts: list[str], top: float, stage: StagePrediction, slowest_s: float, scale: float) -> None:
    """The bar of a stage's seconds, and how many they are."""
    seconds = ((stage.forward_s, "F", "forward"), (stage.backward_s, "B", "backward"))
    end = _bar(parts, top, [(s / slowest_s * scale, kind, f"{name} {human_s(s)}") for s, kind, name in seconds])
    parts.append(text(end + 8, top + 13, human_s(stage.busy_s)))


def _bytes_told(stage: StagePrediction, worker: int | None) -> str:
    """What a stage holds, and its limit, which is that of its worker.

    Args:
        worker: that is said; None where each stage has its own.
    """
    if stage.limit_bytes is None:
        return human_bytes(stage.memory_bytes)
    of_worker = "" if worker is None else f" of worker {worker}"
    return f"{human_bytes(stage.memory_bytes)} of {human_bytes(stage.limit_bytes)}{of_worker}"


def _add_bytes(
    parts: list[str], top: float, stage: StagePrediction, most: int, scale: float, kinds: Sequence[str], told: str
) -> None:
    """The bar of a stage's bytes, their limit where it is near, and both in words."""
    shares = [
        (count / most * scale, f"area{_colour(kinds, name)}", f"{name} {human_bytes(count)}")
        for name, count in stage.memory
        if count
    ]
    end = _bar(parts, top, shares)
    if stage.limit_bytes is not None and stage.limit_bytes <= most:
        at = LEFT + stage.limit_bytes / most * scale
        parts.append(
            f'<path d="M{at:.1f},{top - 2:g}V{top + BAR + 2:g}" class="rp-limit" stroke-width="2">'
            f"<title>limit {human_bytes(stage.limit_bytes)}</title></path>"
        )
        end = max(end, at)
    parts.append(text(end + 8, top + 13, told))


def _kind(name: str) -> str:
    """What bytes are for, without how many of them: "activations of 4 micro-batches" -> "activations"."""
    return name.split(" of ")[0].split(" x ")[0] if name.startswith(("activations", "weights")) else name


def _colour(kinds: Sequence[str], name: str) -> int:
    return BYTES[kinds.index(_kind(name)) % len(BYTES)]


def _bar(parts: list[str], top: float, pieces: Sequence[tuple[float, str, str]]) -> float:
    """Append one bar made of (width, class, tip); returns where it ends."""
    at = LEFT
    for width, kind, tip in pieces:
        parts.append(
            f'<rect x="{at:.1f}" y="{top:g}" width="{max(width, 0.4):.1f}" height="{BAR:g}" class="rp-{kind}">'
            f"<title>{html.escape(tip)}</title></rect>"
        )
        at += width
    return at


def _height(svg: str) -> float:
    return float(svg.split('height="', 1)[1].split('"', 1)[0])
