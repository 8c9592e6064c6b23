"""The sections of a report: each takes what is known of the run and gives HTML, or "" where it has nothing to say."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from raypipe.ir.cost import human_price
from raypipe.ir.pictures.axis import in_unit
from raypipe.ir.pictures.chart import Line, Mark, chart_svg
from raypipe.ir.pictures.plan import stage_bars_svg
from raypipe.ir.pictures.timeline import timeline_svg
from raypipe.ir.plan_table import human_bytes, human_s
from raypipe.report.memory import bytes_over_step
from raypipe.report.read import RunFacts

__all__ = ["SECTIONS", "facts_of"]

CHANGES = ("recovery", "regroup", "join", "resize", "replan", "move", "take over", "drain")
FAILURES = ("failure", "give up", "fail", "damage", "skip")
CONTROL = ("switch", "undo", "paid", "open", "keep", "wait", "drift")
DASHED = (
    '<p class="hint">Upright lines: red with long dashes, something failed; green with short ones, a recovery, resize '
    "or another cut; dotted, another schedule. Kinds of which there are many are short marks at the top: failures in "
    "the first row, changes in the second, schedules in the third. The pointer on one of them says what it was. A "
    "short red mark on the axis: no finite number there.</p>"
)
MOST_STAGES = 8
MOST_METRICS = 12
MOST_EVENTS = 1000
FEW = 16
"""Letters of a cell that is not broken."""


def facts_of(run: RunFacts) -> list[tuple[str, str]]:
    """The numbers at the top: (name, value)."""
    last = run.records[-1] if run.records else None
    begun, wanted = run.told("start"), 0
    found: list[tuple[str, str]] = []
    if begun:
        wanted = int(begun[-1].get("num_steps", 0))
        found.append(("began", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begun[0]["time"]))))
        found.append(("took", _duration(run.events[-1]["time"] - begun[0]["time"])))
    if last is not None:
        half = sorted(record.seconds for record in run.records)
        median_s = half[len(half) // 2]
        found += [
            ("step", f"{last.step + 1:,} of {max(wanted, last.step + 1):,}"),
            ("loss", f"{last.loss:.4f}"),
            ("step time, median", human_s(median_s)),
            ("samples per second", f"{last.samples / median_s:,.0f}" if median_s else "unknown"),
        ]
        if last.tokens and median_s:
            found.append(("tokens per second", f"{last.tokens / median_s:,.0f}"))
        if last.goodput:
            found.append(("goodput", f"{last.goodput:.1%}"))
    if run.plan is not None:
        stages = run.plan.partition.num_stages
        found += [("stages", str(stages)), ("schedule", run.plan.schedule.kind)]
        found.append(("micro-batches", f"{run.plan.num_microbatches} x {run.plan.microbatch_size} samples"))
    found.append(("failures survived", str(len(run.told("recovery", "regroup")))))
    if run.cost is not None:
        found.append(("cost", human_price(run.cost)))
    return found


def _loss(run: RunFacts) -> str:
    if not run.records:
        return "<p>No step is known.</p>"
    marks = _marks(run)
    loss = [(record.step + 1.0, record.loss) for record in run.records]
    norms = [(record.step + 1.0, record.grad_norm) for record in run.records]
    evaluated: dict[str, list[tuple[float, float]]] = {}
    for record in run.records:
        for name, value in record.evaluation:
            evaluated.setdefault(name, []).append((record.step + 1.0, value))
    lines = [Line("loss", loss)]
    if "eval_loss" in evaluated:
        lines.append(Line("eval_loss", evaluated.pop("eval_loss")))
    pictures = [
        chart_svg(lines, "Loss", "step", "loss", marks=marks),
        chart_svg([Line("gradient norm", norms)], "Gradient norm, before clipping", "step", "norm", marks=marks),
    ]
    for name, points in list(evaluated.items())[:MOST_METRICS]:
        pictures.append(chart_svg([Line(name, points)], name, "step", name, marks=marks, span=_span(run)))
    return _row(*pictures) + (DASHED if marks else "")


def _speed(run: RunFacts) -> str:
    if not run.records:
        return ""
    marks = _marks(run)
    seconds = [(record.step + 1.0, record.seconds) for record in run.records]
    lines = [Line("measured", seconds)]
    if run.plan is not None and run.plan.prediction is not None and seconds:
        promised = run.plan.prediction.step_s
        lines.append(Line("predicted", [(seconds[0][0], promised), (seconds[-1][0], promised)]))
    idle = [(record.step + 1.0, record.bubble_fraction) for record in run.records]
    useful = [(record.step + 1.0, record.goodput) for record in run.records if record.goodput]
    rates = [(record.step + 1.0, record.lr) for record in run.records]
    pictures = [
        chart_svg(lines, "Time per step", "step", "time", "s", marks, cut_peaks=True),
        chart_svg([Line("idle", idle)], "Workers idle", "step", "share of worker time", "%", marks),
    ]
    if useful:
        pictures.append(chart_svg([Line("goodput", useful)], "Goodput", "step", "share of time", "%", marks))
    if any(rate for _, rate in rates):
        line = Line("learning rate", rates)
        pictures.append(chart_svg([line], "Learning rate", "step", "learning rate", marks=marks))
    return _row(*pictures)


def _timeline(run: RunFacts) -> str:
    if not run.timelines:
        return ""
    return (
        '<div class="tools" hidden><button data-zoom="in" title="zoom in">+</button>'
        '<button data-zoom="out" title="zoom out">&minus;</button><button data-zoom="all">whole step</button>'
        '<span class="hint">wheel with Ctrl zooms, dragging moves, a click on a box shows its numbers; '
        "keys: + &minus; 0, and arrows from box to box</span></div>"
        f'<figure class="wide">{timeline_svg(run.timelines)}</figure><p class="picked" aria-live="polite" hidden></p>'
    )


def _cut(run: RunFacts) -> str:
    plan = run.plan
    if plan is None:
        return ""
    names = dict(plan.reasons)
    placement, homes = plan.schedule.wiring.placement, plan.schedule.wiring.homes
    rows = [
        (
            str(stage.index),
            ", ".join(map(str, homes[stage.index])),
            names.get(f"stage {stage.index}", f"{stage.first_node} to {stage.last_node}"),
            human_bytes(stage.param_bytes),
            human_bytes(stage.input_bytes) if stage.index else "data",
        )
        for stage in plan.partition.stages
    ]
    why = [f"{what}: {reason}" for what, reason in plan.reasons if not what.startswith("stage ")]
    reasons = "".join(f"<li>{escape(line)}</li>" for line in [*why, *(f"note: {note}" for note in plan.notes)])
    bars = ""
    if plan.prediction is not None:
        bars = f'<figure class="wide">{stage_bars_svg(plan.prediction, 1200, placement)}</figure>'
    return (
        f"<p>{escape(plan.partition.reason)}.</p>{bars}"
        + _table(("stage", "worker", "holds", "parameters", "receives per sample"), rows)
        + f"<details><summary>Every choice and its reason</summary><ul>{reasons}</ul></details>"
    )


def _memory(run: RunFacts) -> str:
    if run.plan is None or run.plan.prediction is None or not run.timelines:
        return ""
    pictures = []
    for timeline in run.timelines:
        found = bytes_over_step(run.plan.prediction.stages, timeline)
        longest_s = timeline.makespan_s
        unit_s, unit = in_unit(longest_s, "s")
        in_units = [[(moment_s / unit_s, count) for moment_s, count in points] for points in found]
        lines = [Line(f"stage {stage}", points, stays=True) for stage, points in enumerate(in_units[:MOST_STAGES])]
        source = {"simulated": "predicted"}.get(timeline.source, timeline.source)
        title = f"Memory over a step, {source} times" + ("" if longest_s else " (empty)")
        pictures.append(chart_svg(lines, title, f"time ({unit})", "predicted bytes", "B"))
    more = len(run.plan.prediction.stages) - MOST_STAGES
    note = f"<p>{more} more stages are not drawn.</p>" if more > 0 else ""
    return _row(*pictures) + note


def _links(run: RunFacts) -> str:
    sent = [(record.step + 1.0, record.link_bytes_per_s) for record in run.records]
    pictures = []
    if any(rate for _, rate in sent):
        line = Line("sent", sent)
        pictures.append(chart_svg([line], "Sent over all links", "step", "bytes per second", "B/s", _marks(run)))
    seen = [event for event in run.told(*CONTROL) if event.get("link_s")]
    ways = max((len(event["link_s"]) for event in seen), default=0)
    if ways:
        lines = [Line(_way(way), _of_way(run, seen, way), True) for way in range(min(ways, MOST_STAGES))]
        title = "A message, as the controller measured it"
        pictures.append(chart_svg(lines, title, "step", "time", "s", _marks(run), _span(run)))
    pictures += _turned(run)
    return _row(*pictures) if pictures else ""


def _way(place: int) -> str:
    """Name of a place in ``link_s``, which has hop 0 forward, hop 0 backward, hop 1 forward, ..."""
    hop, back = divmod(place, 2)
    return f"{hop + 1}→{hop}" if back else f"{hop}→{hop + 1}"


def _of_way(run: RunFacts, seen: Sequence[dict[str, Any]], way: int) -> list[tuple[float, float]]:
    """(step, seconds of a message) of one way of a link; what was heard last stays to the end."""
    points = [(event["step"] + 1.0, float(event["link_s"][way])) for event in seen if way < len(event["link_s"])]
    return [*points, (max(_span(run)[1], points[-1][0]), points[-1][1])]


def _span(run: RunFacts) -> tuple[float, float]:
    """First and last step, so that all charts over steps have the same axis."""
    return (run.records[0].step + 1.0, run.records[-1].step + 1.0) if run.records else (0.0, 1.0)


def _turned(run: RunFacts) -> list[str]:
    """k, where the schedule is kfkb; else which schedule ran, as a number with its name in the legend."""
    named = [(record.step + 1.0, record.schedule) for record in run.records if record.schedule]
    if not named:
        return []
    groups = [(step, _group_size(name)) for step, name in named]
    if all(size is not None for _, size in groups):
        points = [(step, float(size or 0)) for step, size in groups]
        return [chart_svg([Line("k", points, True)], "Group size k of kFkB", "step", "k", marks=_marks(run))]
    kinds = list(dict.fromkeys(name for _, name in named))
    places = [(step, float(kinds.index(name) + 1)) for step, name in named]
    legend = "; ".join(f"{number}: {name}" for number, name in enumerate(kinds, 1))
    chart = chart_svg([Line("schedule", places, True)], "Schedule that ran", "step", "number", marks=_marks(run))
    return [chart + f"<figcaption>{escape(legend)}</figcaption>"]


def _group_size(name: str) -> int | None:
    """Of ``kfkb k=2``; 1F1B is kFkB with k = 1."""
    words = name.split(" + ")[0].split()
    if words == ["1f1b"]:
        return 1
    sizes = [word[2:] for word in words if word.startswith("k=")]
    return int(sizes[0]) if words[:1] == ["kfkb"] and sizes and sizes[0].isdigit() else None


def _recoveries(run: RunFacts) -> str:
    found = run.told(*CHANGES, *FAILURES)
    if not found:
        return "<p>Nothing failed, and nothing was moved.</p>"
    rows = []
    for event in found[:MOST_EVENTS]:
        parts = ", ".join(
            f"{name.removesuffix('_s')} {human_s(value)}"
            for name, value in event.items()
            if name.endswith("_s") and isinstance(value, int | float)
        )
        more = [f"{event['redone_steps']} steps done again"] if event.get("redone_steps") else []
        more += (
            [f"{event['replayed_steps']} steps done again by one stage alone"] if event.get("replayed_steps") else []
        )
        more += [f"{human_bytes(event['moved_bytes'])} moved"] if event.get("moved_bytes") else []
        more += [f"not by one stage alone, because {event['not_replayed']}"] if event.get("not_replayed") else []
        seconds = event.get("seconds")
        took = human_s(seconds) if isinstance(seconds, int | float) and seconds else ""
        detail = "; ".join(filter(None, [parts, *more]))
        rows.append((str(event.get("step", "")), event["decision"], took, str(event["reason"]), detail))
    return _table(("after step", "what", "took", "why", "parts"), rows)


def _events(run: RunFacts) -> str:
    begin = run.events[0]["time"] if run.events else 0.0
    known = ("time", "decision", "reason", "step")
    rows = [
        (
            _duration(event["time"] - begin),
            str(event.get("step", "")),
            event["decision"],
            str(event.get("reason", "")),
            ", ".join(f"{name}={value}" for name, value in event.items() if name not in known),
        )
        for event in run.events[-MOST_EVENTS:]
    ]
    table = _table(("at", "step", "what", "why", "numbers"), rows)
    settings = f"<details><summary>config.yaml</summary><pre>{escape(run.config)}</pre></details>" if run.config else ""
    return f"<details><summary>{len(run.events)} events</summary>{table}</details>{settings}"


def _marks(run: RunFacts) -> list[Mark]:
    """What changed a run, for charts over its steps."""
    kinds = {**dict.fromkeys(FAILURES, "bad"), **dict.fromkeys(CHANGES, "good"), "switch": "note", "undo": "note"}
    found = [event for event in run.events if event["decision"] in kinds and isinstance(event.get("step"), int)]
    return [Mark(e["step"] + 1.0, f"{e['decision']}: {e.get('reason', '')}", kinds[e["decision"]]) for e in found[:200]]


def _row(*pictures: str) -> str:
    return '<div class="row">' + "".join(f"<figure>{picture}</figure>" for picture in pictures) + "</div>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(words: str) -> str:
    """A cell of a table; a few words stay in one line."""
    return f'<td class="few">{escape(words)}</td>' if len(words) <= FEW else f"<td>{escape(words)}</td>"


def _duration(seconds: float) -> str:
    hours, rest = divmod(max(0.0, seconds), 3600)
    minutes, rest = divmod(rest, 60)
    if hours:
        return f"{hours:.0f} h {minutes:02.0f} min"
    return f"{minutes:.0f} min {rest:02.0f} s" if minutes else f"{rest:.1f} s"


SECTIONS: tuple[tuple[str, Callable[[RunFacts], str]], ...] = (
    ("Loss", _loss),
    ("Speed", _speed),
    ("Timeline of one step", _timeline),
    ("The cut", _cut),
    ("Memory", _memory),
    ("Links and schedule", _links),
    ("Failures and recoveries", _recoveries),
    ("Events and settings", _events),
)
"""Titles and what fills them, in their order."""
