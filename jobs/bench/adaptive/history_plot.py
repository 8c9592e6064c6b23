"""What the controller did, as a picture: seconds of every step, and below them the schedule that ran."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

__all__ = ["history_svg"]

WIDTH, HEIGHT, LEFT, TOP, BAND = 900, 260, 60, 30, 26
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b")


def history_svg(
    title: str, seconds: Sequence[float], schedules: Sequence[str], phases: Sequence[tuple[int, str]]
) -> str:
    """One picture.

    Args:
        seconds, schedules: by step.
        phases: (first step, what the link was like).
    """
    count, top_s = len(seconds), 1.05 * sorted(seconds)[int(0.98 * (len(seconds) - 1))]
    bottom = TOP + HEIGHT

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT) * step / count

    def y(value_s: float) -> float:
        return bottom - HEIGHT * min(value_s, top_s) / top_s

    known = list(dict.fromkeys(schedules))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 20}" height="{bottom + 70 + 18 * len(known)}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14">{escape(title)}</text>',
    ]
    for begin, name in phases:
        parts.append(f'<line x1="{x(begin)}" y1="{TOP}" x2="{x(begin)}" y2="{bottom + BAND}" stroke="#999"/>')
        parts.append(f'<text x="{x(begin) + 4}" y="{TOP + 12}" fill="#555">{escape(name)}</text>')
    for share in (0.25, 0.5, 0.75, 1.0):
        value_s = share * top_s
        parts.append(f'<text x="{LEFT - 6}" y="{y(value_s) + 4}" text-anchor="end">{value_s * 1e3:.0f} ms</text>')
        parts.append(f'<line x1="{LEFT}" y1="{y(value_s)}" x2="{WIDTH}" y2="{y(value_s)}" stroke="#eee"/>')
    points = " ".join(f"{x(step + 0.5):.1f},{y(value_s):.1f}" for step, value_s in enumerate(seconds))
    parts.append(f'<polyline points="{points}" fill="none" stroke="#222"/>')
    begin = 0
    for name, run in groupby(schedules):
        end = begin + len(list(run))
        colour = COLOURS[known.index(name) % len(COLOURS)]
        parts.append(
            f'<rect x="{x(begin)}" y="{bottom + 4}" width="{x(end) - x(begin)}" height="{BAND - 6}" fill="{colour}"/>'
        )
        begin = end
    for place, name in enumerate(known):
        level = bottom + BAND + 24 + 18 * place
        colour = COLOURS[place % len(COLOURS)]
        parts.append(f'<rect x="{LEFT}" y="{level - 10}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 18}" y="{level}">{escape(name or "as planned")}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
