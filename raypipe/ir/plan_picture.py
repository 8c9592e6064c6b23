"""A plan as one SVG: the predicted step as a timeline, and below it seconds and bytes of every stage as bars."""

from __future__ import annotations

import html
from collections.abc import Sequence

from raypipe.ir.picture import COLOURS, GREY, timeline_svg
from raypipe.ir.plan import Plan
from raypipe.ir.plan_table import human_bytes, human_s
from raypipe.ir.prediction import Prediction
from raypipe.ir.schedule import Op
from raypipe.ir.timeline import Timeline

__all__ = ["plan_svg", "stage_bars_svg"]

LEFT, RIGHT, BAR, ROW, HEAD = 90, 150, 12, 40, 30
KINDS = ("#4c78a8", "#72b7b2", "#f58518", "#e45756", "#54a24b", "#b279a2", "#9d755d")


def plan_svg(plan: Plan, timeline: Timeline, width: int = 1200) -> str:
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
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{sum(heights):.0f}">{"".join(placed)}</svg>'
    )


def stage_bars_svg(found: Prediction, width: int = 1200, placement: Sequence[int] = ()) -> str:
    """Two bars per stage: seconds per micro-batch (F, B) and bytes by what they are for, with the limit as a line.

    Args:
        placement: worker of each stage, which is named where one holds several; the limit is that of the worker.
    """
    shared = len(set(placement)) < len(placement)
    slowest_s = max(stage.busy_s for stage in found.stages) or 1.0
    most = max([s.memory_bytes for s in found.stages] + [s.limit_bytes or 0 for s in found.stages]) or 1
    scale = width - LEFT - RIGHT
    parts = [f'<text x="4" y="20" font-size="14">stages: seconds per micro-batch, bytes ({found.source})</text>']
    for index, stage in enumerate(found.stages):
        top = HEAD + index * ROW
        parts.append(f'<text x="4" y="{top + 12}" font-size="12">stage {index}</text>')
        if shared:
            parts.append(f'<text x="4" y="{top + BAR + 13}" font-size="11">worker {placement[index]}</text>')
        seconds = ((stage.forward_s, COLOURS[Op.F], "F"), (stage.backward_s, COLOURS[Op.B], "B"))
        end = _bar(parts, top, [(s / slowest_s * scale, colour, f"{name} {human_s(s)}") for s, colour, name in seconds])
        parts.append(f'<text x="{end + 4:.1f}" y="{top + 10}" font-size="11">{human_s(stage.busy_s)}</text>')
        shares = [
            (count / most * scale, KINDS[i % len(KINDS)], f"{name} {human_bytes(count)}")
            for i, (name, count) in enumerate(stage.memory)
            if count
        ]
        end = _bar(parts, top + BAR + 3, shares)
        words = human_bytes(stage.memory_bytes)
        if stage.limit_bytes is not None:
            at = LEFT + stage.limit_bytes / most * scale
            parts.append(
                f'<path d="M{at:.1f},{top + BAR + 1} V{top + 2 * BAR + 5}" stroke="black"><title>limit '
                f"{human_bytes(stage.limit_bytes)}</title></path>"
            )
            words += f" of {human_bytes(stage.limit_bytes)}" + (f" of worker {placement[index]}" if shared else "")
            end = max(end, at)
        parts.append(f'<text x="{end + 4:.1f}" y="{top + BAR + 13}" font-size="11">{words}</text>')
    height = HEAD + len(found.stages) * ROW + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>'
    )


def _bar(parts: list[str], top: float, pieces: Sequence[tuple[float, str, str]]) -> float:
    """Append one bar made of (width, colour, tip); returns where it ends."""
    at = float(LEFT)
    for width, colour, tip in pieces:
        parts.append(
            f'<rect x="{at:.1f}" y="{top}" width="{max(width, 0.4):.1f}" height="{BAR}" fill="{colour}" '
            f'stroke="{GREY}" stroke-width="0.3"><title>{html.escape(tip)}</title></rect>'
        )
        at += width
    return at


def _height(svg: str) -> float:
    return float(svg.split('height="', 1)[1].split('"', 1)[0])
