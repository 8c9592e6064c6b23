"""Page of a report: one HTML file that contains its sections, style and script, and loads nothing.

The charts of memory over a step combine the bytes that the plan predicts with a timeline. Activations of a micro-batch
are allocated with its F and freed with its B, or its W if backwards are split. All other categories of
``StagePrediction.memory`` are constant.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from typing import Any

from raypipe import __version__
from raypipe.engine.io.storage import Place, PlaceError
from raypipe.errors import ConfigError
from raypipe.ir.plan import StagePrediction
from raypipe.ir.schedule import Op
from raypipe.ir.timeline import Timeline
from raypipe.ir.units import human_bytes, human_price, human_s
from raypipe.report.run_facts import RunFacts, read_run
from raypipe.run.status import ALERTS, Alert
from raypipe.viz.chart import Annotation, Line, chart_svg
from raypipe.viz.plan_svg import stage_bars_svg
from raypipe.viz.svg import in_unit
from raypipe.viz.timeline_svg import timeline_svg


def bytes_over_step(stages: Sequence[StagePrediction], timeline: Timeline) -> list[list[tuple[float, float]]]:
    """Compute the bytes that each stage holds over a step.

    Returns:
        For each stage, the points at which its bytes change: (seconds since the start of the timeline, bytes from then
            on).
    """
    zero = min((span.start_s for span in timeline.spans), default=0.0)
    splits = any(span.action.op is Op.W for span in timeline.spans)
    last = Op.W if splits else Op.B
    changes: list[list[tuple[float, int]]] = [[] for _ in stages]
    for span in timeline.spans:
        if span.action.stage < len(stages):
            if span.action.op is Op.F:
                changes[span.action.stage].append((span.start_s - zero, 1))
            elif span.action.op is last:
                changes[span.action.stage].append((span.end_s - zero, -1))
    curves = []
    for stage, moments in zip(stages, changes, strict=True):
        moving = sum(count for name, count in stage.memory if name.startswith("activations"))
        each = moving / max(stage.in_flight, 1)
        held = float(stage.memory_bytes - moving)
        points = [(0.0, held)]
        for moment_s, change in sorted(moments):
            held += change * each
            points.append((moment_s, held))
        points.append((timeline.makespan_s, held))
        curves.append(points)
    return curves


CHANGES = ("recovery", "regroup", "join", "resize", "replan", "move", "take over", "drain")
FAILURES = ("failure", "give up", "fail", "skip")
CONTROL = ("switch", "undo", "paid", "open", "keep", "wait", "drift")
DASHED = (
    '<p class="hint">Upright lines: red with long dashes, something failed; green with short ones, a recovery, resize '
    "or another cut; dotted, another schedule. Kinds of which there are many are short marks at the top: failures in "
    "the first row, changes in the second, schedules in the third. Pointing at one of them names it. A "
    "short red mark on the axis: no finite number there.</p>"
)
MOST_STAGES = 8
MOST_METRICS = 12
MOST_EVENTS = 1000
FEW = 16
"""Maximum number of letters in a table cell whose text is kept on one line."""


def facts_of(run: RunFacts) -> list[tuple[str, str]]:
    """List (name, value) of the numbers at the top of the page."""
    last = run.records[-1] if run.records else None
    begun, num_steps = run.events_of("start"), 0
    facts: list[tuple[str, str]] = []
    if begun:
        num_steps = int(begun[-1].get("num_steps", 0))
        facts.append(("began", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begun[0]["time"]))))
        facts.append(("took", _duration(run.events[-1]["time"] - begun[0]["time"])))
    if last is not None:
        half = sorted(record.seconds for record in run.records)
        median_s = half[len(half) // 2]
        facts += [
            ("step", f"{last.step + 1:,} of {max(num_steps, last.step + 1):,}"),
            ("loss", f"{last.loss:.4f}"),
            ("step time, median", human_s(median_s)),
            ("samples per second", f"{last.samples / median_s:,.0f}" if median_s else "unknown"),
        ]
        if last.tokens and median_s:
            facts.append(("tokens per second", f"{last.tokens / median_s:,.0f}"))
        if last.goodput:
            facts.append(("goodput", f"{last.goodput:.1%}"))
    if run.plan is not None:
        stages = run.plan.partition.num_stages
        facts += [("stages", str(stages)), ("schedule", run.plan.schedule.kind)]
        facts.append(("micro-batches", f"{run.plan.num_microbatches} x {run.plan.microbatch_size} samples"))
    facts.append(("failures survived", str(len(run.events_of("recovery", "regroup")))))
    if run.cost is not None:
        facts.append(("cost", human_price(run.cost)))
    return facts


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
    lines = [Line("measured", seconds, cut_peaks=True)]
    if run.plan is not None and run.plan.prediction is not None and seconds:
        promised = run.plan.prediction.step_s
        lines.append(Line("predicted", [(seconds[0][0], promised), (seconds[-1][0], promised)]))
    idle = [(record.step + 1.0, record.bubble_fraction) for record in run.records]
    useful = [(record.step + 1.0, record.goodput) for record in run.records if record.goodput]
    rates = [(record.step + 1.0, record.lr) for record in run.records if record.lr is not None]
    pictures = [
        chart_svg(lines, "Time per step", "step", "time", "s", marks),
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
        curves = bytes_over_step(run.plan.prediction.stages, timeline)
        longest_s = timeline.makespan_s
        unit_s, unit = in_unit(longest_s, "s")
        in_units = [[(moment_s / unit_s, count) for moment_s, count in points] for points in curves]
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
    seen = [event for event in run.events_of(*CONTROL) if event.get("link_s")]
    ways = max((len(event["link_s"]) for event in seen), default=0)
    if ways:
        lines = [
            Line(_direction_name(way), _message_times(run, seen, way), True) for way in range(min(ways, MOST_STAGES))
        ]
        title = "A message, as the controller measured it"
        pictures.append(chart_svg(lines, title, "step", "time", "s", _marks(run), _span(run)))
    pictures += _schedule_charts(run)
    return _row(*pictures) if pictures else ""


def _direction_name(place: int) -> str:
    """Name the direction of index ``place`` in ``link_s``: from stage 0 to 1, 1 to 0, 1 to 2, 2 to 1, ..."""
    hop, back = divmod(place, 2)
    return f"{hop + 1}→{hop}" if back else f"{hop}→{hop + 1}"


def _message_times(run: RunFacts, seen: Sequence[dict[str, Any]], way: int) -> list[tuple[float, float]]:
    """Return (step, seconds of a message) of the events ``seen`` for a direction; the last value is repeated."""
    points = [(event["step"] + 1.0, float(event["link_s"][way])) for event in seen if way < len(event["link_s"])]
    return [*points, (max(_span(run)[1], points[-1][0]), points[-1][1])]


def _span(run: RunFacts) -> tuple[float, float]:
    """Return the numbers of the first and the last step, counted from 1: the x range of charts over steps."""
    return (run.records[0].step + 1.0, run.records[-1].step + 1.0) if run.records else (0.0, 1.0)


def _schedule_charts(run: RunFacts) -> list[str]:
    """Draw the schedules over steps: group sizes k if all are kfkb or 1f1b, else a number for each, with a legend."""
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
    """Parse k of "kfkb k=2"; 1 for "1f1b", which is kFkB with k = 1; None for other schedules."""
    words = name.split(" + ")[0].split()
    if words == ["1f1b"]:
        return 1
    sizes = [word[2:] for word in words if word.startswith("k=")]
    return int(sizes[0]) if words[:1] == ["kfkb"] and sizes and sizes[0].isdigit() else None


def _recoveries(run: RunFacts) -> str:
    events = run.events_of(*CHANGES, *FAILURES)
    alerts = [Alert(**one) for event in run.events_of(ALERTS) for one in event["alerts"]]
    alert_rows = [(a.kind, str(a.count), str(a.first_step), str(a.last_step), a.message) for a in alerts]
    table = (
        _table(("alert", "times", "first after step", "last after step", "last message"), alert_rows)
        if alert_rows
        else ""
    )
    if not events:
        return table or "<p>Nothing failed, and nothing was moved.</p>"
    rows = []
    for event in events[:MOST_EVENTS]:
        parts = ", ".join(
            f"{name.removesuffix('_s')} {human_s(value)}"
            for name, value in event.items()
            if name.endswith("_s") and isinstance(value, int | float)
        )
        more = [f"{event['redone_steps']} steps done again"] if event.get("redone_steps") else []
        more += [f"{human_bytes(event['moved_bytes'])} moved"] if event.get("moved_bytes") else []
        seconds = event.get("seconds")
        took = human_s(seconds) if isinstance(seconds, int | float) and seconds else ""
        detail = "; ".join(filter(None, [parts, *more]))
        rows.append((str(event.get("step", "")), event["decision"], took, str(event["reason"]), detail))
    return _table(("after step", "what", "took", "why", "parts"), rows) + table


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


def _marks(run: RunFacts) -> list[Annotation]:
    """Create the annotations of failures, recoveries and changed schedules for charts over steps."""
    kinds = {**dict.fromkeys(FAILURES, "bad"), **dict.fromkeys(CHANGES, "good"), "switch": "note", "undo": "note"}
    changes = [event for event in run.events if event["decision"] in kinds and isinstance(event.get("step"), int)]
    return [
        Annotation(e["step"] + 1.0, f"{e['decision']}: {e.get('reason', '')}", kinds[e["decision"]])
        for e in changes[:200]
    ]


def _row(*pictures: str) -> str:
    return '<div class="row">' + "".join(f"<figure>{picture}</figure>" for picture in pictures) + "</div>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    few = ("", ' class="few"')
    cells = ("".join(f"<td{few[len(words) <= FEW]}>{escape(words)}</td>" for words in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


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
"""Sections of the page, in order: (title, function that returns the HTML of the content). "" omits the section."""


def write_report(folder: Place, state: str, output: str = "") -> str:
    """Write the report of a run, and return the path of the file.

    Args:
        folder: folder of the run.
        state: as in ``report_html``.
        output: path or URI of the file; "" for report.html in the run's folder.

    Raises:
        ConfigError: the folder is not that of a run, or ``output`` cannot be written.
        CheckpointError: report.html cannot be written to the run's folder.
    """
    page = report_html(read_run(folder), state).encode()
    if not output:
        folder.write_bytes("report.html", page)
        return str(folder / "report.html")
    try:
        Place.of(output).write_bytes("", page)
    except PlaceError as error:
        raise ConfigError(f"{output} cannot be written: {error.__cause__ or error}. Give another file.") from error
    return output


def report_html(run: RunFacts, state: str) -> str:
    """Build the HTML of the page.

    Args:
        state: state of the run: "finished", "stopped", "failed", "running", "killed" or "unknown".
    """
    sections = [(title, fill(run)) for title, fill in SECTIONS]
    links = "".join(f'<a href="#{_anchor(title)}">{escape(title)}</a>' for title, inside in sections if inside)
    body = "".join(
        f'<section id="{_anchor(title)}"><h2>{escape(title)}</h2>{inside}</section>'
        for title, inside in sections
        if inside
    )
    facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts_of(run))
    ends = run.events_of("fail") if state == "failed" else []
    why = f'<p class="why">{escape(str(ends[-1].get("reason", "")))}</p>' if ends else ""
    missing = "".join(f"<li>{escape(what)}</li>" for what in run.missing)
    # The browser holds the page to what it promises: no script but ours, nothing from elsewhere.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(run.name)}: raypipe report</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<style>{_asset('page.css')}</style></head><body><header><h1>{escape(run.name)} "
        f'<span class="state {escape(state)}">{escape(state)}</span></h1><nav>{links}</nav></header>'
        f'<main>{why}<dl class="facts">{facts}</dl>'
        f"{f'<ul class=missing>{missing}</ul>' if missing else ''}{body}</main>"
        f"<footer>{escape(run.folder)}; written by raypipe {__version__}</footer>"
        f"<script>{_asset('page.js')}</script></body></html>\n"
    )


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _asset(name: str) -> str:
    return resources.files("raypipe.report").joinpath(name).read_text(encoding="utf-8")
