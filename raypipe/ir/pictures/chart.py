"""Charts: lines or staircases over steps, with axes, units, a legend, and marks where something happened.

Of more points than fit into the width, those that are highest and lowest near each other are drawn. A point that is not
finite leaves a gap and a red dash on the axis.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from raypipe.ir.pictures.axis import in_unit, ticks
from raypipe.ir.pictures.theme import LINES, frame, text

__all__ = ["Line", "Mark", "chart_svg"]

Point = tuple[float, float]
LEFT, RIGHT, TOP, BOTTOM = 78.0, 24.0, 62.0, 52.0
WIDTH, HEIGHT = 720, 330
"""Of every chart, in pixels."""
LETTER_PX = 7.6

DASHES = {"bad": "10 3", "good": "4 3", "note": "2 2"}
"""Of marks, so that kinds differ without their colours too."""


class Line(NamedTuple):
    """One line: its name in the legend, its points (x, y), and whether y stays until the next point."""

    name: str
    points: Sequence[Point]
    stays: bool = False


class Mark(NamedTuple):
    """Something that happened at ``x``: a broken line; ``kind`` is "bad", "good" or "note"."""

    x: float
    words: str
    kind: str = "note"


def chart_svg(
    lines: Sequence[Line],
    title: str,
    x_label: str,
    y_label: str,
    unit: str = "",
    marks: Sequence[Mark] = (),
    span: tuple[float, float] | None = None,
) -> str:
    """One chart.

    Args:
        x_label, y_label: what the axes count; ``unit`` of y is added to it, in a size that fits.
        unit: "s", "B", "B/s", "%" (of shares from 0 to 1) or anything else; those named begin at 0.
        marks: where something happened.
        span: of x, where it is to be more than what the points have.
    """
    known = [point for line in lines for point in line.points if _finite(point)]
    scale, unit_name = (0.01, "%") if unit == "%" else in_unit(max((y for _, y in known), default=0.0), unit)
    box = _Box(known, [*(mark.x for mark in marks), *(span or ())], scale, bool(unit))
    label = f"{y_label} ({unit_name})" if unit_name else y_label
    parts = [text(12, 24, title, size=17, bold=True), *_axes(box, x_label, label)]
    for mark in marks:
        at = box.x(mark.x)
        parts.append(
            f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{box.bottom}" class="rp-{mark.kind}" '
            f'stroke-dasharray="{DASHES[mark.kind]}" stroke-width="1.5"><title>{html.escape(mark.words)}</title></line>'
        )
    for number, line in enumerate(lines):
        parts += _line(line, number % len(LINES), box)
    parts += _legend([line.name for line in lines])
    if not known:
        parts.append(text(WIDTH / 2, (TOP + box.bottom) / 2, "nothing yet", "mute", "middle"))
    seen = [[line.name, [[x, y / scale] for x, y in _thinned(line.points, 400) if _finite((x, y))]] for line in lines]
    content = {"lines": seen, "unit": unit_name, "x": x_label, "box": [LEFT, WIDTH - RIGHT, box.low_x, box.high_x]}
    data = f"data-chart='{html.escape(json.dumps(content, separators=(',', ':')))}'"
    return frame(WIDTH, HEIGHT, f"{title}: {label} over {x_label}", "".join(parts), "rp-chart", data)


class _Box:
    """Where the plot is, and the way from values to pixels."""

    def __init__(self, points: Sequence[Point], more_x: Sequence[float], scale: float, from_zero: bool) -> None:
        xs = [*(x for x, _ in points), *more_x]
        ys = [y / scale for _, y in points]
        self.low_x, self.high_x = min(xs, default=0.0), max(xs, default=1.0)
        low_y, high_y = min(ys, default=0.0), max(ys, default=1.0)
        if from_zero:
            low_y = min(low_y, 0.0)
        if self.high_x == self.low_x:
            self.high_x += 1.0
        spare = (high_y - low_y) * 0.05 or abs(high_y) * 0.05 or 0.5
        self.low_y, self.high_y = low_y - (0.0 if from_zero and low_y == 0.0 else spare), high_y + spare
        self.scale = scale
        self.counts = not from_zero and all(y == int(y) for y in ys)
        self.bottom = HEIGHT - BOTTOM

    def x(self, value: float) -> float:
        return LEFT + (value - self.low_x) / (self.high_x - self.low_x) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Of a value in the unit that is shown."""
        return self.bottom - (value - self.low_y) / (self.high_y - self.low_y) * (self.bottom - TOP)


def _axes(box: _Box, x_label: str, y_label: str) -> list[str]:
    right = WIDTH - RIGHT
    parts = [text(12, TOP - 14, y_label, "mute")]
    for value in ticks(box.low_y, box.high_y, 5, whole=box.counts):
        y = box.y(value)
        parts.append(f'<path d="M{LEFT},{y:.1f}H{right}" class="rp-grid"/>')
        parts.append(text(LEFT - 8, y + 5, f"{value:.6g}", "mute", "end"))
    parts.append(f'<path d="M{LEFT},{TOP}V{box.bottom}H{right}" class="rp-axis" fill="none"/>')
    for value in ticks(box.low_x, box.high_x, 7, whole=True):
        x = box.x(value)
        parts.append(f'<path d="M{x:.1f},{box.bottom}v5" class="rp-axis"/>')
        parts.append(text(x, box.bottom + 20, f"{value:.10g}", "mute", "middle"))
    parts.append(text((LEFT + right) / 2, box.bottom + 42, x_label, "mute", "middle"))
    return parts


def _line(line: Line, colour: int, box: _Box) -> list[str]:
    parts = []
    points = _thinned(line.points, 2 * WIDTH)
    for finite, group in groupby(points, _finite):
        placed = [(box.x(x), box.y(y / box.scale) if finite else box.bottom) for x, y in group]
        if not finite:
            parts += [
                f'<path d="M{x:.1f},{y - 12:.1f}v12" class="rp-bad" stroke-width="3"><title>not finite</title></path>'
                for x, y in placed
            ]
        elif len(placed) == 1:
            parts.append(f'<circle cx="{placed[0][0]:.1f}" cy="{placed[0][1]:.1f}" r="3" class="rp-area{colour}"/>')
        else:
            if line.stays:
                placed = [placed[0], *(p for a, b in pairwise(placed) for p in ((b[0], a[1]), b))]
            pairs = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            parts.append(f'<polyline points="{pairs}" fill="none" class="rp-line{colour}" stroke-width="2"/>')
    return parts


def _legend(names: Sequence[str]) -> list[str]:
    """To the right of the y axis' label, from the right; a single line needs none."""
    if len(names) < 2:
        return []
    parts, at = [], WIDTH - RIGHT
    for number, name in reversed(list(enumerate(names))):
        at -= LETTER_PX * len(name)
        parts.append(text(at, TOP - 14, name))
        at -= 24
        parts.append(f'<path d="M{at:.1f},{TOP - 19}h18" class="rp-line{number % len(LINES)}" stroke-width="3"/>')
        at -= 16
    return parts


def _finite(point: Point) -> bool:
    return math.isfinite(point[1])


def _thinned(points: Sequence[Point], most: int) -> Iterable[Point]:
    """The points, or of each of ``most / 2`` groups of neighbours the highest and the lowest, in their order."""
    if len(points) <= most:
        return points
    ends = [len(points) * i // (most // 2) for i in range(most // 2 + 1)]
    return [point for begin, end in pairwise(ends) for point in _extremes(points[begin:end])]


def _extremes(group: Sequence[Point]) -> Iterable[Point]:
    """The highest and the lowest, and one that is not finite, in their order."""
    known = [point for point in group if _finite(point)]
    found = {min(known, key=_height), max(known, key=_height)} if known else set()
    return sorted(found | {*[point for point in group if not _finite(point)][:1]}, key=lambda point: point[0])


def _height(point: Point) -> float:
    return point[1]
