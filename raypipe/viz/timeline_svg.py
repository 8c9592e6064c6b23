"""Picture of timelines, predicted above measured on one scale, and of a schedule in abstract time slots.

worker 0   [F0][F1]....[B0]         computation; pale while it waits for a message
worker 1   ....[F0][B0]
link 0→1      [F0--][F1--]          a message: full while it is sent, pale until it is received
link 1→0              [B0-]
time (ms)  0    10    20    30
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from raypipe.ir.schedule import COMPUTE, Action, Op
from raypipe.ir.timeline import MessageSpan, Span, Timeline, messages_of
from raypipe.viz.svg import ROW, frame, in_unit, legend, shortened, text, ticks

LEFT, RIGHT, HEAD, FOOT = 104.0, 28.0, 34.0, 44.0
TITLE_PX = 17
LANE, LINK, GAP = 28.0, 18.0, 6.0
LETTER_PX, SMALL_PX = 8.0, 7.2
"""Widths of a letter in a box, in pixels: normal, and small (font size 12). page.js has the same numbers."""
EDGE_PX, THIN_PX = 0.8, 4.0
"""Width of the edge between boxes; the edge is thinner if most boxes are narrower than ``THIN_PX``."""
MOST_BOXES = 20_000
"""Maximum number of boxes in a picture, so that it has a few megabytes at most and browsers can scroll it."""
WORDS = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "backward, gradients of inputs",
    Op.W: "backward, gradients of weights",
    Op.STEP: "optimizer step",
    Op.REDUCE_GRAD: "sum of gradients",
    Op.REDUCE_NORM: "gradient norm",
    Op.SEND_F: "activations sent",
    Op.SEND_B: "gradients sent",
    Op.RECV_F: "wait for activations",
    Op.RECV_B: "wait for gradients",
}
SENDS = (Op.SEND_F, Op.SEND_B)
TRAVEL = (*SENDS, Op.RECV_F, Op.RECV_B)


def timeline_svg(timelines: Sequence[Timeline], width: int = 1200, slots: bool = False) -> str:
    """Draw one or more timelines.

    Args:
        timelines: timelines, drawn one below the other on one scale; each begins with its first span.
        width: width of the picture in pixels; the height follows from the number of workers.
        slots: True if times are abstract slots instead of seconds.
    """
    longest = max((t.makespan_s for t in timelines), default=0.0) or 1.0
    unit_s, unit = (1.0, "slots") if slots else in_unit(longest, "s")
    scale = (width - LEFT - RIGHT) / longest
    top, parts = 10.0, list[str]()
    seen, linked = set[Op](), False
    for timeline in timelines:
        shown = _shown(timeline, not slots)
        drawn, top = _timeline(timeline, shown, top, _Scale(scale, longest, unit_s, unit))
        parts += drawn
        seen |= {span.action.op for span in shown.spans if span.end_s > span.start_s}
        linked |= bool(shown.links)
    explained, rows = legend(_legend(seen, linked), LEFT, top + 6, width - RIGHT)
    parts += explained
    names = " and ".join(_title(timeline) for timeline in timelines)
    span = f'data-plot="{LEFT:g} {width - RIGHT:g} {longest / unit_s:.9g} {unit}"'
    return frame(width, top + 40 + (rows - 1) * ROW, f"Timeline, {names}", "".join(parts), "rp-timeline", span)


class _Scale(NamedTuple):
    """Scale of the time axis: pixels per second, length of the axis in seconds, seconds per unit, name of the unit."""

    px: float
    longest_s: float
    unit_s: float
    unit: str


class _Shown(NamedTuple):
    """Selection of what is drawn: spans, and the messages of each link (sending worker, receiving worker).

    ``whole`` is False if a part of the timeline is left out.
    """

    spans: Sequence[Span]
    links: Sequence[tuple[tuple[int, int], list[MessageSpan]]]
    whole: bool = True


def _shown(timeline: Timeline, links: bool) -> _Shown:
    """Select what to draw: all spans, and the messages of links if ``links`` is True.

    If there are more than MOST_BOXES spans, messages are left out, and then the latest spans.
    """
    spans = sorted(timeline.spans, key=lambda span: span.start_s)
    if len(spans) <= MOST_BOXES:
        return _Shown(spans, _links(spans) if links else ())
    return _Shown([span for span in spans if span.action.op not in TRAVEL][:MOST_BOXES], (), whole=False)


def _title(timeline: Timeline) -> str:
    source = {"simulated": "predicted"}.get(timeline.source, timeline.source)
    return f"{source} {timeline.name}".strip()


def _timeline(timeline: Timeline, shown: _Shown, top: float, scale: _Scale) -> tuple[list[str], float]:
    """Draw one timeline at ``top`` pixels; return (SVG parts, top of the next timeline in pixels)."""
    length = f"{timeline.makespan_s / scale.unit_s:.4g} {scale.unit}"
    words = f": {length}, workers idle {timeline.bubble_fraction:.1%} of it"
    spans, zero = shown.spans, min((span.start_s for span in timeline.spans), default=0.0)
    if not shown.whole:
        words += "; messages are not drawn"
    if not shown.whole and len(spans) == MOST_BOXES:
        words += f", and only the first {(spans[-1].end_s - zero) / scale.unit_s:.4g} {scale.unit}"
    right = LEFT + scale.longest_s * scale.px
    name = shortened(_title(timeline), right - 12 - 0.62 * TITLE_PX * len(words), TITLE_PX)
    parts = [text(12, top + 20, name + words, size=TITLE_PX, bold=True)]
    top += HEAD
    boxes = _Boxes(spans, zero, scale)
    inside: list[str] = []
    for worker in range(timeline.num_workers):
        parts.append(text(LEFT - 10, top + LANE / 2 + 5, f"worker {worker}", "ink", "end"))
        inside += boxes.lane(worker, top)
        top += LANE + GAP
    for (sender, receiver), messages in shown.links:
        parts.append(text(LEFT - 10, top + LINK / 2 + 5, f"link {sender}→{receiver}", "mute", "end"))
        for message in messages:
            inside += boxes.message(message, top)
        top += LINK + GAP
    parts.append(f'<g class="rp-plot" stroke-width="{_edge_px(spans, scale):g}">{"".join(inside)}</g>')
    parts.append(
        f'<path d="M{LEFT},{top + 2:g}H{right:.1f}" class="rp-axis"/><g class="rp-ticks" data-y="{top + 2:g}">'
    )
    for tick in ticks(0.0, scale.longest_s / scale.unit_s, 10):
        at = LEFT + tick * scale.unit_s * scale.px
        parts.append(f'<path d="M{at:.1f},{top + 2:g}v5" class="rp-axis"/>')
        parts.append(text(at, top + 22, f"{tick:.6g}", "mute", "middle"))
    parts.append("</g>")
    axis = scale.unit if scale.unit == "slots" else f"time ({scale.unit})"
    parts.append(text(LEFT - 34, top + 22, axis, "mute", "end"))
    return parts, top + FOOT


def _edge_px(spans: Sequence[Span], scale: _Scale) -> float:
    wide = sorted(span.end_s - span.start_s for span in spans if span.action.op in COMPUTE)
    return EDGE_PX * min(1.0, wide[len(wide) // 2] * scale.px / THIN_PX) if wide else EDGE_PX


class _Boxes:
    def __init__(self, spans: Sequence[Span], zero_s: float, scale: _Scale) -> None:
        self._spans, self._zero_s, self._scale = spans, zero_s, scale
        # Micro-batches are numbered over the whole run; the picture numbers them from the first one shown.
        self._first = min((span.action.microbatch for span in spans), default=0)
        own: dict[int, set[int]] = {}
        for span in spans:
            own.setdefault(span.worker, set()).add(span.action.stage)
        self._stages = any(len(stages) > 1 for stages in own.values())

    def lane(self, worker: int, top: float) -> list[str]:
        """Draw the boxes of a worker in the row at ``top`` pixels; computation is drawn over waits."""
        mine = [span for span in self._spans if span.worker == worker and span.action.op not in SENDS]
        waits = [span for span in mine if span.action.op in (Op.RECV_F, Op.RECV_B)]
        return [part for span in waits + [s for s in mine if s not in waits] for part in self._box(span, top)]

    def message(self, message: MessageSpan, top: float) -> list[str]:
        """Draw a message in the row at ``top`` pixels: full while it is sent, pale until it is received."""
        label = self._label(message.action._replace(op=Op.F if message.action.op is Op.SEND_F else Op.B))
        kind = "F" if message.action.op is Op.SEND_F else "B"
        lasts = f"{message.action} {WORDS[message.action.op]} to worker {message.target.worker}: " + self._when(
            message.start_s, message.taken_s
        )
        tail = self._rect(message.start_s, message.taken_s, top, LINK, kind, lasts, 'opacity="0.35"')
        return [tail, self._rect(message.start_s, message.sent_s, top, LINK, kind, lasts, f'data-l="{label}"')]

    def _box(self, span: Span, top: float) -> list[str]:
        op = span.action.op
        own = op in COMPUTE or op is Op.STEP
        kind = op.value if own else "REDUCE" if op.value.startswith("REDUCE") else "wait"
        label = self._label(span.action) if own else ""
        words = f"{span.action} {WORDS[op]}: {self._when(span.start_s, span.end_s)}"
        data = f'data-l="{label}"' if label else ""
        parts = [self._rect(span.start_s, span.end_s, top, LANE, kind, words, data)]
        wide = (span.end_s - span.start_s) * self._scale.px
        at = LEFT + (span.start_s - self._zero_s) * self._scale.px + wide / 2
        for words, down, size in _fitting(label, wide) if label else ():
            parts.append(text(at, top + down, words, "on-pale" if op in (Op.I, Op.W) else "on-full", "middle", size))
        return parts

    def _label(self, action: Action) -> str:
        if action.op is Op.STEP:
            return "step"
        stage = str(action.stage) if self._stages else ""
        return f"{stage}{action.op.value}{action.microbatch - self._first}"

    def _when(self, start_s: float, end_s: float) -> str:
        scale = self._scale
        took, begin = (end_s - start_s) / scale.unit_s, (start_s - self._zero_s) / scale.unit_s
        return f"{took:.3g} {scale.unit}, from {begin:.4g}"

    def _rect(self, start_s: float, end_s: float, top: float, height: float, kind: str, words: str, data: str) -> str:
        x, wide = LEFT + (start_s - self._zero_s) * self._scale.px, max((end_s - start_s) * self._scale.px, 0.4)
        return (
            f'<rect x="{x:.2f}" y="{top:g}" width="{wide:.2f}" height="{height:g}" class="rp-{kind}" {data}>'
            f"<title>{html.escape(words)}</title></rect>"
        )


def _fitting(label: str, wide: float) -> list[tuple[str, float, float]]:
    """Fit a label into a box of ``wide`` pixels.

    If it does not fit into one line, the stage is printed above the rest: "4F0" becomes "4" and "F0".

    Returns:
        (words, pixels below the top of the box, font size or 0 for the picture's) of each line; [] if too narrow.
    """
    if wide >= LETTER_PX * _letters(label) + 4:
        return [(label, LANE / 2 + 5, 0)]
    if wide >= SMALL_PX * _letters(label) + 2:
        return [(label, LANE / 2 + 4, 12)]
    rest = label.lstrip("0123456789")
    stage = label.removesuffix(rest)
    if stage and wide >= SMALL_PX * max(_letters(stage), _letters(rest)) + 2:
        return [(stage, 12, 12), (rest, 25, 12)]
    return []


def _letters(words: str) -> float:
    """Return the width of words in units of an average letter."""
    return len(words) + 0.6 * words.count("W")


def _links(spans: Sequence[Span]) -> list[tuple[tuple[int, int], list[MessageSpan]]]:
    """Group the messages that took time by link: ((sending worker, receiving worker), messages), sorted."""
    by_link: dict[tuple[int, int], list[MessageSpan]] = {}
    for message in messages_of(spans):
        if message.taken_s > message.start_s:
            by_link.setdefault((message.source.worker, message.target.worker), []).append(message)
    return sorted(by_link.items())


def _legend(seen: set[Op], messages: bool) -> list[tuple[str, str]]:
    """Return (CSS class, words) of each kind of box: those of the operations ``seen``, and of messages if drawn."""
    named = [(op.value, f"{op.value} {WORDS[op]}") for op in (Op.F, Op.B, Op.I, Op.W) if op in seen]
    if Op.STEP in seen:
        named.append(("STEP", "optimizer step"))
    if seen & {Op.REDUCE_GRAD, Op.REDUCE_NORM}:
        named.append(("REDUCE", "sum and norm of gradients"))
    if seen & {Op.RECV_F, Op.RECV_B}:
        named.append(("wait", "waits for a message"))
    if messages:
        named.append(('F opacity="0.35"', "message, pale until it is taken"))
    return named


SLOTS = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.0, Op.W: 1.0}


def schedule_svg(rows: Sequence[Sequence[Action]], before: Callable[[Action], Sequence[Action]], name: str) -> str:
    """Draw a schedule in abstract time slots.

    Args:
        rows: actions of each worker, in order.
        before: (action) -> actions that must end before it begins, as ``dependencies`` returns them.
        name: name of the schedule.
    """
    return timeline_svg([in_slots(rows, before, name)], slots=True)


def in_slots(
    rows: Sequence[Sequence[Action]], before: Callable[[Action], Sequence[Action]], name: str = ""
) -> Timeline:
    """Compute the timeline of a schedule in abstract slots: F, I and W take 1, B takes 2.

    After a deadlock, the remaining actions are left out. The arguments are those of ``schedule_svg``.
    """
    rows = [[action for action in row if action.op in COMPUTE] for row in rows]
    known = {action for row in rows for action in row}
    ends: dict[Action, float] = {}
    spans: list[Span] = []
    places, free = [0] * len(rows), [0.0] * len(rows)
    going = True
    while going:
        going = False
        for worker, row in enumerate(rows):
            while places[worker] < len(row):
                action = row[places[worker]]
                needed = [one for one in _computed(action, before) if one in known]
                if any(one not in ends for one in needed):
                    break
                start = max([free[worker], *(ends[one] for one in needed)])
                ends[action] = free[worker] = start + SLOTS[action.op]
                spans.append(Span(worker, action, start, ends[action]))
                places[worker] += 1
                going = True
    return Timeline(tuple(spans), "schedule", name=name)


def _computed(action: Action, before: Callable[[Action], Sequence[Action]]) -> Iterator[Action]:
    """Yield the computing actions on which an action depends by ``before``, directly or through messages."""
    for needed in before(action):
        if needed.op in COMPUTE:
            yield needed
        else:
            yield from _computed(needed, before)
