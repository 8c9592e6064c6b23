"""Charts: lines or staircases over steps, with axes, units, a legend, and marks at events.

If there are more points than pixels, local minima and maxima are drawn pale, with the median of neighbours on top. A
non-finite point leaves a gap and a red dash on the axis.
"""

from __future__ import annotations

import html
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from statistics import median
from typing import NamedTuple

from raypipe.viz import svg
from raypipe.viz.svg import GAP, LINES, MARK, ROW, frame, in_unit, legend, shortened, text, ticks

Point = tuple[float, float]
LEFT, RIGHT, TOP, BOTTOM = 78.0, 24.0, 62.0, 52.0
WIDTH, HEIGHT = 640, 320
"""Size of a chart in pixels; a legend of several rows adds to the height."""
LETTER_PX = 7.6
TITLE_PX = 17
MEDIANS = 120
"""Number of points of the median line."""
MOST_LONG = 12
"""Maximum number of marks drawn as long lines. If there are more, all marks of some kinds are drawn short, those of the
kind "bad" last.
"""
SHORT_PX = 9.0
BESIDE_PX = 3.0
"""Distance in pixels between long marks at the same step."""

DASHES = {"bad": "10 3", "good": "4 3", "note": "2 2"}
"""Dash pattern by kind of mark, so that kinds differ without colour. The rows of short marks are in this order."""


class Line(NamedTuple):
    """Line of a chart.

    Attributes:
        name: name in the legend.
        points: (x, y) of each point, in the order of x.
        stays: True to draw a staircase: each value holds until the next point.
        cut_peaks: True to clip rare values far above the others at the top, and count them in the label of the axis.
    """

    name: str
    points: Sequence[Point]
    stays: bool = False
    cut_peaks: bool = False


class Annotation(NamedTuple):
    """Event to mark at ``x``: ``words`` is its tooltip, ``kind`` is "bad", "good" or "note"."""

    x: float
    words: str
    kind: str = "note"


def chart_svg(
    lines: Sequence[Line],
    title: str,
    x_label: str,
    y_label: str,
    unit: str = "",
    marks: Sequence[Annotation] = (),
    span: tuple[float, float] | None = None,
) -> str:
    """Draw a chart as SVG.

    Args:
        x_label, y_label: axis labels; the unit, scaled to the values, is appended to y_label.
        unit: unit of y: "s", "B", "B/s", "%" (values are fractions from 0 to 1), any other text, or "". If it is not
            "", the y axis includes 0.
        marks: events to mark.
        span: minimum range of x.
    """
    known = [point for line in lines for point in line.points if _finite(point)]
    top = _usual(known) if any(line.cut_peaks for line in lines) else math.inf
    lower = [y for _, y in known if y <= top]
    scale, unit_name = (0.01, "%") if unit == "%" else in_unit(max(lower, default=0.0), unit)
    box = _Box(known, [*(mark.x for mark in marks), *(span or ())], scale, bool(unit), top)
    if len(_long(marks)) < len({mark.kind for mark in marks}):
        box.top += SHORT_PX * len(DASHES)
    label = f"{y_label} ({unit_name})" if unit_name else y_label
    if higher := len(known) - len(lower):
        highest = max(y for _, y in known) / scale
        label += (
            f"; {higher} higher, up to {highest:,.0f}" if highest >= 1000 else f"; {higher} higher, up to {highest:.4g}"
        )
    parts = [text(12, 24, shortened(title, WIDTH - 24, TITLE_PX), size=TITLE_PX, bold=True)]
    parts += [*_axes(box, x_label, label, bool(known)), *_marks(marks, box)]
    for number, line in enumerate(lines):
        parts += _line(line, number % len(LINES), box)
    named, more = _legend([line.name for line in lines], 12 + LETTER_PX * len(label))
    parts += named
    if not known:
        parts.append(text(WIDTH / 2, (TOP + box.bottom) / 2, "nothing yet", "mute", "middle"))
    seen = [[line.name, [[x, y / scale] for x, y in _thinned(line.points, 400) if _finite((x, y))]] for line in lines]
    places = [LEFT, WIDTH - RIGHT, TOP, box.bottom]
    content = {"lines": seen, "unit": unit_name, "x": x_label, "plot": places, "span": [box.low_x, box.high_x]}
    data = f"data-chart='{html.escape(json.dumps(content, separators=(',', ':')))}'"
    return frame(WIDTH, HEIGHT + more, f"{title}: {label} over {x_label}", "".join(parts), "rp-chart", data)


def _usual(points: Sequence[Point]) -> float:
    """Return an upper end for the y axis that clips rare peaks; infinity if no point is far above the others."""
    heights = sorted(y for _, y in points)
    if not heights:
        return math.inf
    usual = heights[int(0.95 * (len(heights) - 1))]
    return 1.5 * usual if heights[-1] > 4.0 * usual > 0.0 else math.inf


class _Box:
    """Plot area of a chart, and the mapping from values, divided by ``scale``, to pixels.

    The range of x includes ``more_x``. The range of y ends at ``top``, and includes 0 if ``from_zero`` is True.
    """

    def __init__(
        self, points: Sequence[Point], more_x: Sequence[float], scale: float, from_zero: bool, top: float
    ) -> None:
        xs = [*(x for x, _ in points), *more_x]
        ys = [min(y, top) / scale for _, y in points]
        self.low_x, self.high_x = min(xs, default=0.0), max(xs, default=1.0)
        low_y, high_y = min(ys, default=0.0), max(ys, default=1.0)
        if from_zero or low_y == high_y > 0.0:  # a single value is drawn above 0, so that its size is visible
            low_y = min(low_y, 0.0)
        if self.high_x == self.low_x:
            self.high_x += 1.0
        spare = (high_y - low_y) * 0.05 or abs(high_y) * 0.05 or 0.5
        self.low_y, self.high_y = (
            low_y - (0.0 if low_y == 0.0 and min(ys, default=0.0) >= 0.0 else spare),
            high_y + spare,
        )
        self.scale = scale
        self.counts = not from_zero and all(y == int(y) for y in ys)
        self.counts_x = all(x == int(x) for x in xs)
        self.top, self.bottom = TOP, HEIGHT - BOTTOM

    def x(self, value: float) -> float:
        return LEFT + (value - self.low_x) / (self.high_x - self.low_x) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Return the pixel of a value given in the displayed unit."""
        height = min(1.0, (value - self.low_y) / (self.high_y - self.low_y))
        return self.bottom - height * (self.bottom - self.top)


def _axes(box: _Box, x_label: str, y_label: str, known: bool) -> list[str]:
    """Draw axes with labels. Ticks are drawn only if ``known`` is True, which means that there are points."""
    right = WIDTH - RIGHT
    parts = [text(12, TOP - 14, y_label, "mute")]
    for value in ticks(box.low_y, box.high_y, 5, whole=box.counts) if known else ():
        y = box.y(value)
        parts.append(f'<path d="M{LEFT},{y:.1f}H{right}" class="rp-grid"/>')
        parts.append(text(LEFT - 8, y + 5, f"{value:.6g}", "mute", "end"))
    parts.append(f'<path d="M{LEFT},{TOP}V{box.bottom}H{right}" class="rp-axis" fill="none"/>')
    for value in ticks(box.low_x, box.high_x, 7, whole=box.counts_x) if known else ():
        x, words = box.x(value), f"{value:,.10g}" if box.counts_x else f"{value:.6g}"
        parts.append(f'<path d="M{x:.1f},{box.bottom}v5" class="rp-axis"/>')
        parts.append(text(min(x, WIDTH - 8 - LETTER_PX * len(words) / 2), box.bottom + 20, words, "mute", "middle"))
    parts.append(text((LEFT + right) / 2, box.bottom + 42, x_label, "mute", "middle"))
    return parts


def _marks(marks: Sequence[Annotation], box: _Box) -> list[str]:
    """Draw one line per mark: long dashed lines for kinds with few marks, else short lines in one row per kind."""
    seen, parts, there = _long(marks), [], Counter[float]()
    for mark in marks:
        at, row, few = box.x(mark.x), TOP + SHORT_PX * list(DASHES).index(mark.kind), mark.kind in seen
        if few:  # a failure and its recovery are usually at the same step
            at, there[mark.x] = at + BESIDE_PX * there[mark.x], there[mark.x] + 1
        first, last = (TOP, box.bottom) if few else (row, row + SHORT_PX - 1)
        dashes = f'stroke-dasharray="{DASHES[mark.kind]}"' if few else ""
        parts.append(
            f'<line x1="{at:.1f}" y1="{first:g}" x2="{at:.1f}" y2="{last:g}" class="rp-{mark.kind}" {dashes} '
            f'stroke-width="1.5"><title>{html.escape(mark.words)}</title></line>'
        )
    return parts


def _long(marks: Sequence[Annotation]) -> set[str]:
    """Choose the kinds of marks to draw as long lines: in the order of DASHES, at most MOST_LONG marks in all."""
    counts, kinds = Counter(mark.kind for mark in marks), set[str]()
    for kind in filter(counts.__contains__, DASHES):
        if sum(counts[one] for one in kinds) + counts[kind] > MOST_LONG:
            break
        kinds.add(kind)
    return kinds


def _line(line: Line, colour: int, box: _Box) -> list[str]:
    parts, most = [], 2 * WIDTH
    many = len(line.points) > most and not line.stays
    points = _thinned(line.points, most)
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
            parts.append(_polyline(placed, colour, 'stroke-width="1" opacity="0.45"' if many else 'stroke-width="2"'))
    if many:
        medians = [(box.x(x), box.y(y / box.scale)) for x, y in _medians(line.points)]
        parts.append(_polyline(medians, colour, 'stroke-width="2"'))
    return parts


def _polyline(placed: Sequence[Point], colour: int, how: str) -> str:
    pairs = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    return f'<polyline points="{pairs}" fill="none" class="rp-line{colour}" {how}/>'


def _legend(names: Sequence[str], label_px: float) -> tuple[list[str], float]:
    """Draw the legend of a chart; ([], 0.0) for fewer than two lines, which need none.

    The legend is at the right of the y label if it fits there, else below the chart.

    Args:
        names: name of each line.
        label_px: pixels from the chart's left edge to the end of the y label.

    Returns:
        (SVG parts of the legend, pixels by which it makes the chart higher).
    """
    if len(names) < 2:
        return [], 0.0
    names = [shortened(name, WIDTH / 2) for name in names]
    wide = sum(MARK + svg.LETTER_PX * len(name) + GAP for name in names)
    beside = wide <= WIDTH - RIGHT - label_px
    left, top = (WIDTH - RIGHT + GAP - wide, TOP - 26) if beside else (LEFT, HEIGHT)
    entries = [(f"area{number % len(LINES)}", name) for number, name in enumerate(names)]
    parts, rows = legend(entries, left, top, WIDTH - RIGHT + GAP)
    return parts, 0.0 if beside else rows * ROW + 4


def _medians(points: Sequence[Point]) -> list[Point]:
    """Return the medians of MEDIANS groups of equally many neighbours, ignoring non-finite points."""
    ends = [len(points) * i // MEDIANS for i in range(MEDIANS + 1)]
    groups = ([point for point in points[begin:end] if _finite(point)] for begin, end in pairwise(ends))
    return [(group[len(group) // 2][0], median(y for _, y in group)) for group in groups if group]


def _finite(point: Point) -> bool:
    return math.isfinite(point[1])


def _thinned(points: Sequence[Point], most: int) -> Iterable[Point]:
    """Return about ``most`` points: of each group of neighbours the minimum, the maximum and one non-finite point."""
    if len(points) <= most:
        return points
    ends = [len(points) * i // (most // 2) for i in range(most // 2 + 1)]
    return [point for begin, end in pairwise(ends) for point in _extremes(points[begin:end])]


def _extremes(group: Sequence[Point]) -> Iterable[Point]:
    """Return the minimum, the maximum and one non-finite point of a group, in the order of the group."""
    known = [point for point in group if _finite(point)]
    extremes = {min(known, key=_height), max(known, key=_height)} if known else set()
    return sorted(extremes | {*[point for point in group if not _finite(point)][:1]}, key=lambda point: point[0])


def _height(point: Point) -> float:
    return point[1]
