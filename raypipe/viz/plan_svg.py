"""Pictures of a plan: the predicted step as a timeline, and seconds and bytes of every stage as bars."""

from __future__ import annotations

import html
from collections.abc import Sequence

from raypipe.ir.plan import Plan, Prediction, StagePrediction
from raypipe.ir.schedule import dependencies
from raypipe.ir.timeline import Timeline
from raypipe.ir.units import human_bytes, human_s
from raypipe.viz.svg import ROW as LEGEND_ROW
from raypipe.viz.svg import frame, legend, text
from raypipe.viz.timeline_svg import schedule_svg, timeline_svg

BYTES = (1, 3, 5, 6, 4, 7, 8, 9)
"""Colours of memory categories, as indices into ``svg.LINES`` whose colours differ from those of F and B."""

LEFT, BAR, ROW, HEAD, FOOT = 104.0, 16.0, 52.0, 40.0, 56.0
LETTER_PX = 8.0
FAR = 4
"""Multiple of the bytes of the fullest stage up to which a limit is drawn. At a larger limit, the bars would be dots.
"""


def plan_svg(plan: Plan, timeline: Timeline, width: int = 1200) -> str:
    """Draw the timeline of the predicted step above the bars of the stages.

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
    # SVG pictures nest; only the position is added.
    placed = (part.replace("<svg ", f'<svg x="0" y="{sum(heights[:i]):.0f}" ', 1) for i, part in enumerate(parts))
    return frame(width, sum(heights), "The plan's predicted step, and its stages", "".join(placed))


def plan_html(plan: Plan, words: str) -> str:
    """Build the HTML of a plan for notebooks: its text, its schedule in abstract time slots, and bars of its stages.

    The bars are left out if the plan was made without a profile.

    Args:
        words: text of the plan.
    """
    wiring = plan.schedule.wiring
    rows = plan.schedule.rows(2 if plan.schedule.prologue else 1)
    schedule = schedule_svg(rows, lambda action: dependencies(action, wiring), plan.schedule.kind)
    bars = "" if plan.prediction is None else stage_bars_svg(plan.prediction, 1200, wiring.placement)
    return f'<pre style="white-space:pre-wrap">{html.escape(words)}</pre>{schedule}{bars}'


def stage_bars_svg(prediction: Prediction, width: int = 1200, placement: Sequence[int] = ()) -> str:
    """Draw two bars per stage: seconds per micro-batch (F, B), and bytes by category, with a line at the memory limit.

    The line is drawn if the limit is at most FAR times the bytes of the stage with the most bytes.

    Args:
        placement: worker of each stage; shown if a worker holds several stages, which then share its limit.
    """
    shared = len(set(placement)) < len(placement)
    slowest_s = max(stage.busy_s for stage in prediction.stages) or 1.0
    fullest = max(s.memory_bytes for s in prediction.stages)
    near = [s.limit_bytes for s in prediction.stages if s.limit_bytes is not None and s.limit_bytes <= FAR * fullest]
    most = max([fullest, *near]) or 1
    labels = [_bytes_label(s, placement[at] if shared else None) for at, s in enumerate(prediction.stages)]
    scale = width - LEFT - 24 - LETTER_PX * max(map(len, labels))
    title = f"Stages: time per micro-batch ({prediction.source}) and memory at its fullest (predicted)"
    parts = [text(12, 24, title, size=17, bold=True)]
    names = list(dict.fromkeys(name for stage in prediction.stages for name, count in stage.memory if count))
    kinds = list(dict.fromkeys(_kind(name) for name in names))
    for index, stage in enumerate(prediction.stages):
        top = HEAD + index * ROW
        parts.append(text(LEFT - 10, top + 13, f"stage {index}", anchor="end"))
        if shared:
            parts.append(text(LEFT - 10, top + BAR + 15, f"worker {placement[index]}", "mute", "end"))
        _add_seconds(parts, top, stage, slowest_s, scale)
        _add_bytes(parts, top + BAR + 3, stage, most, scale, kinds, labels[index])
    top = HEAD + len(prediction.stages) * ROW
    entries = [("F", "forward"), ("B", "backward"), *((f"area{_colour(kinds, k)}", k) for k in kinds)]
    explained, rows = legend(entries, LEFT, top, width - LEFT / 4)
    return frame(
        width, top + FOOT - 24 + (rows - 1) * LEGEND_ROW, "Seconds and bytes of every stage", "".join(parts + explained)
    )


def _add_seconds(parts: list[str], top: float, stage: StagePrediction, slowest_s: float, scale: float) -> None:
    """Append to ``parts`` the bar of a stage's seconds, and their sum; ``slowest_s`` is drawn ``scale`` pixels long."""
    seconds = ((stage.forward_s, "F", "forward"), (stage.backward_s, "B", "backward"))
    end = _bar(parts, top, [(s / slowest_s * scale, kind, f"{name} {human_s(s)}") for s, kind, name in seconds])
    parts.append(text(end + 8, top + 13, human_s(stage.busy_s)))


def _bytes_label(stage: StagePrediction, worker: int | None) -> str:
    """Format a stage's bytes and limit. ``worker`` is named as the owner of the limit; None names no worker."""
    if stage.limit_bytes is None:
        return human_bytes(stage.memory_bytes)
    of_worker = "" if worker is None else f" of worker {worker}"
    return f"{human_bytes(stage.memory_bytes)} of {human_bytes(stage.limit_bytes)}{of_worker}"


def _add_bytes(
    parts: list[str], top: float, stage: StagePrediction, most: int, scale: float, kinds: Sequence[str], label: str
) -> None:
    """Append to ``parts`` the bar of a stage's bytes, a line at its limit if that is at most ``most``, and the label.

    Args:
        most: number of bytes that is drawn ``scale`` pixels long.
        kinds: categories of memory in the order of their colours.
    """
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
    parts.append(text(end + 8, top + 13, label))


def _kind(name: str) -> str:
    """Return the name of a memory category without its count: "activations of 4 micro-batches" -> "activations"."""
    return name.split(" of ")[0].split(" x ")[0] if name.startswith(("activations", "weights")) else name


def _colour(kinds: Sequence[str], name: str) -> int:
    return BYTES[kinds.index(_kind(name)) % len(BYTES)]


def _bar(parts: list[str], top: float, pieces: Sequence[tuple[float, str, str]]) -> float:
    """Append to ``parts`` a bar of pieces (width in pixels, CSS class, tooltip) at ``top``; return its right end."""
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
