"""Timelines as one SVG picture: predicted above measured, on one scale, a lane per worker.

F blue, B green, I and W lighter; transfers and waits in grey on the thin lane below each worker
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from itertools import pairwise

from raypipe.ir.schedule import COMPUTE, Op
from raypipe.ir.timeline import Span, Timeline

__all__ = ["curve_svg", "timeline_svg"]

COLOURS = {Op.F: "#4c78a8", Op.B: "#54a24b", Op.I: "#88d27a", Op.W: "#b6e3ae", Op.STEP: "#e45756"}
GREY = "#c8c8c8"
LEFT, LANE, LINKS, GAP, HEAD = 90, 26, 7, 10, 34
LETTER_PX = 6.5


def timeline_svg(timelines: Sequence[Timeline], width: int = 1200) -> str:
    """The picture of one or more timelines.

    Args:
        timelines: drawn one below the other; all start at their own first span.
        width: of the picture in pixels; heights follow from the workers.
    """
    longest_s = max((t.makespan_s for t in timelines), default=0.0) or 1.0
    scale = (width - LEFT - 10) / longest_s
    parts: list[str] = []
    top = 0.0
    for timeline in timelines:
        title = f"{timeline.source} {timeline.name}".strip()
        numbers = f"{timeline.makespan_s * 1e3:.1f} ms, idle {timeline.bubble_fraction:.1%}"
        parts.append(f'<text x="4" y="{top + 20:.1f}" font-size="14">{html.escape(title)}: {numbers}</text>')
        top += HEAD
        zero = min((s.start_s for s in timeline.spans), default=0.0)
        # Micro-batches count over the whole run; in the picture, from the first one shown.
        first = min((s.action.microbatch for s in timeline.spans), default=0)
        for worker in range(timeline.num_workers):
            parts.append(f'<text x="4" y="{top + 17:.1f}" font-size="12">worker {worker}</text>')
            for span in timeline.spans:
                if span.worker == worker:
                    parts += _box(span, zero, first, top, scale)
            top += LANE + LINKS + GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top + 10:.0f}" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>'
    )


def _box(span: Span, zero_s: float, first: int, top: float, scale: float) -> list[str]:
    op = span.action.op
    x, w = LEFT + (span.start_s - zero_s) * scale, max((span.end_s - span.start_s) * scale, 0.4)
    compute = op in COMPUTE or op is Op.STEP
    y, h = (top, LANE) if compute else (top + LANE + 1, LINKS)
    tip = f"<title>{span.action}  {(span.end_s - span.start_s) * 1e3:.3f} ms</title>"
    colour = COLOURS.get(op, GREY)
    parts = [f'<rect x="{x:.2f}" y="{y:.1f}" width="{w:.2f}" height="{h}" fill="{colour}" stroke="white" ']
    parts[0] += f'stroke-width="0.5">{tip}</rect>'
    label = "step" if op is Op.STEP else f"{op.value}{span.action.microbatch - first}"
    if compute and w >= LETTER_PX * len(label):
        parts.append(
            f'<text x="{x + w / 2:.2f}" y="{y + 17:.1f}" font-size="10" fill="white" text-anchor="middle">'
            f"{label}</text>"
        )
    return parts


def curve_svg(points: Sequence[tuple[float, float]], title: str, x_label: str, y_label: str, width: int = 640) -> str:
    """A line through ``points`` (x, y) with the ends of both axes written out; points that are not finite are left out.

    Of more points than fit into the width those that are highest and lowest near each other are drawn.

    Args:
        width: of the picture in pixels; it is half as high.
    """
    height, margin = width / 2, 48.0
    known = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    low_x, high_x = min((x for x, _ in known), default=0.0), max((x for x, _ in known), default=1.0)
    low_y, high_y = min((y for _, y in known), default=0.0), max((y for _, y in known), default=1.0)
    scale_x = (width - 2 * margin) / ((high_x - low_x) or 1.0)
    scale_y = (height - 2 * margin) / ((high_y - low_y) or 1.0)
    line = " ".join(
        f"{margin + (x - low_x) * scale_x:.1f},{height - margin - (y - low_y) * scale_y:.1f}"
        for x, y in _extremes(known, 2 * width)
    )
    texts = [
        (4, 18, "start", title),
        (margin, height - margin + 18, "middle", f"{low_x:g}"),
        (width - margin, height - margin + 18, "middle", f"{high_x:g}"),
        (width / 2, height - 8, "middle", x_label),
        (margin - 4, height - margin, "end", f"{low_y:.3g}"),
        (margin - 4, margin + 4, "end", f"{high_y:.3g}"),
        (margin - 4, height / 2, "end", y_label),
    ]
    words = "".join(
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="11" text-anchor="{anchor}">{html.escape(text)}</text>'
        for x, y, anchor, text in texts
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" font-family="sans-serif">'
        f'<rect width="100%" height="100%" fill="white"/><path d="M{margin},{margin} V{height - margin} '
        f'H{width - margin}" fill="none" stroke="{GREY}"/>'
        f'<polyline points="{line}" fill="none" stroke="{COLOURS[Op.F]}" stroke-width="1.5"/>{words}</svg>'
    )


def _extremes(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """The points, or of each of ``most / 2`` groups of neighbours the highest and the lowest, in their order."""
    if len(points) <= most:
        return list(points)
    ends = [len(points) * i // (most // 2) for i in range(most // 2 + 1)]
    groups = (points[begin:end] for begin, end in pairwise(ends))
    return [p for group in groups for p in sorted({min(group, key=_height), max(group, key=_height)})]


def _height(point: tuple[float, float]) -> float:
    return point[1]
