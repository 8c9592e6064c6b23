"""What the controller did, as a picture: seconds of every step, and below them the schedule that ran."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from raypipe.ir.pictures.legend import ROW, legend
from raypipe.ir.pictures.theme import LINES, frame, text

__all__ = ["history_svg"]

WIDTH, HEIGHT, LEFT, TOP, BAND, RIGHT = 900, 260, 64, 40, 26, 20


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

    parts = [text(12, 24, title, bold=True)]
    for share in (0.25, 0.5, 0.75, 1.0):
        level = y(share * top_s)
        parts.append(text(LEFT - 6, level + 5, f"{share * top_s * 1e3:.0f} ms", "mute", "end", 12))
        parts.append(f'<line x1="{LEFT}" y1="{level:.1f}" x2="{WIDTH}" y2="{level:.1f}" class="rp-grid"/>')
    for begin, name in phases:
        at = f'x1="{x(begin):.1f}" y1="{TOP}" x2="{x(begin):.1f}" y2="{bottom + BAND}"'
        parts += [f'<line {at} class="rp-axis"/>', text(x(begin) + 4, TOP + 14, name, "mute", size=12)]
    points = " ".join(f"{x(step + 0.5):.1f},{y(value_s):.1f}" for step, value_s in enumerate(seconds))
    parts.append(f'<polyline points="{points}" fill="none" class="rp-limit"/>')
    known, begin = list(dict.fromkeys(schedules)), 0
    for name, run in groupby(schedules):
        end = begin + len(list(run))
        size = f'x="{x(begin):.1f}" y="{bottom + 4}" width="{x(end) - x(begin):.1f}" height="{BAND - 6}"'
        parts.append(f"<rect {size} {_colour(known.index(name))}/>")
        begin = end
    entries = [(f"area{place % len(LINES)}", name or "as planned") for place, name in enumerate(known)]
    named, rows = legend(entries, LEFT, bottom + BAND + 12, WIDTH)
    label = f"{title}: seconds of every step, and the schedule that ran"
    return f"{frame(WIDTH + RIGHT, bottom + BAND + 20 + ROW * rows, label, ''.join([*parts, *named]))}\n"


def _colour(place: int) -> str:
    return f'class="rp-area{place % len(LINES)}"'
