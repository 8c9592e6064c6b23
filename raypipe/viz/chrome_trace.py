"""Timelines as a trace for Perfetto (https://ui.perfetto.dev) or chrome://tracing, in the Trace Event Format.

    process 0: predicted      worker 0           F and B, the optimizer step          slices
    process 1: measured       worker 0 links     sending, waiting for a message       slices, joined by flows
                              micro-batches held by stage 0, messages on their way    counters

A flow leads from the SEND of a message to its RECV, or to the action that uses it if no RECV was needed.
Times are microseconds since the start of the timeline.
The format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from raypipe.ir.schedule import COMPUTE, Action, Op
from raypipe.ir.timeline import Span, Timeline, messages_of

Event = dict[str, object]
Clock = Callable[[float], float]
NANOSECOND_US = 0.001


def chrome_trace_json(timelines: Iterable[Timeline]) -> str:
    """Convert timelines to one trace as JSON text; each timeline is a process, shown below the previous one."""
    events = [event for process, timeline in enumerate(timelines) for event in _events(timeline, process)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _events(timeline: Timeline, process: int) -> list[Event]:
    spans = sorted(timeline.spans, key=lambda span: (span.worker, span.start_s))
    clock = partial(_microseconds, min((span.start_s for span in spans), default=0.0))
    title = f"{timeline.source} {timeline.name}".strip()
    events: list[Event] = [{"ph": "M", "pid": process, "name": "process_name", "args": {"name": title}}]
    names, tracks = _tracks(spans, timeline.num_workers, clock)
    for track, label in enumerate(names):
        thread: Event = {"ph": "M", "pid": process, "tid": track}
        events.append({**thread, "name": "thread_name", "args": {"name": label}})
        events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": track}})
    events += [_slice(span, process, tracks[span.action], clock) for span in spans]
    return [*events, *_flows(spans, process, tracks, clock), *_counters(spans, process, clock)]


def _microseconds(zero_s: float, moment_s: float) -> float:
    """Convert seconds to microseconds since ``zero_s``, rounded to nanoseconds."""
    return round((moment_s - zero_s) * 1e6, 3)


def _tracks(spans: Sequence[Span], num_workers: int, clock: Clock) -> tuple[list[str], dict[Action, int]]:
    """Return (names of the tracks, index of the track of every action). A track is a row of the trace viewer.

    The slices of a track may not overlap. Computation is on the worker's first track. A message that leaves while
    another one is in transit gets a further track.

    Args:
        clock: (seconds) -> microseconds of the trace.
    """
    names: list[str] = []
    tracks: dict[Action, int] = {}
    for worker in range(num_workers):
        first, free_us = len(names), [0.0]
        for span in spans:
            if span.worker == worker:
                lane = 0
                if span.action.op not in COMPUTE and span.action.op is not Op.STEP:
                    begin_us = clock(span.start_s)
                    lane = next((i for i, free in enumerate(free_us, 1) if free <= begin_us), len(free_us) + 1)
                    free_us[lane - 1 : lane] = [clock(span.end_s)]
                tracks[span.action] = first + lane
        more = [f"worker {worker} links {lane}" for lane in range(2, len(free_us) + 1)]
        names += [f"worker {worker}", f"worker {worker} links", *more]
    return names, tracks


def _slice(span: Span, process: int, track: int, clock: Clock) -> Event:
    begin_us = clock(span.start_s)
    return {
        "ph": "X",
        "pid": process,
        "tid": track,
        "name": str(span.action),
        "cat": span.action.op.value,
        "ts": begin_us,
        "dur": round(clock(span.end_s) - begin_us, 3),
        "args": {"stage": span.action.stage, "microbatch": span.action.microbatch},
    }


def _flows(spans: Sequence[Span], process: int, tracks: Mapping[Action, int], clock: Clock) -> list[Event]:
    """Build two flow events per message: the ends of an arrow from the sending slice to the slice that uses it.

    Args:
        process: number of the timeline's process in the trace.
        tracks: index of the track of every action.
        clock: (seconds) -> microseconds of the trace.
    """
    events: list[Event] = []
    for number, (_, source, target, start_s, _, taken_s) in enumerate(messages_of(spans)):
        flow: Event = {"pid": process, "cat": "message", "name": "message", "id": (process << 32) + number}
        begin_us = _inside(source, clock(start_s), clock)
        end_us = max(_inside(target, clock(taken_s), clock), begin_us)
        events.append({**flow, "ph": "s", "tid": tracks[source.action], "ts": begin_us})
        events.append({**flow, "ph": "f", "bp": "e", "tid": tracks[target.action], "ts": end_us})
    return events


def _inside(span: Span, moment_us: float, clock: Clock) -> float:
    """Clamp a time in microseconds to a span, excluding the span's end, so that viewers bind an arrow to its slice."""
    begin_us, end_us = clock(span.start_s), clock(span.end_s)
    return round(max(begin_us, min(moment_us, end_us - NANOSECOND_US)), 3)


def _counters(spans: Sequence[Span], process: int, clock: Clock) -> list[Event]:
    """Build counter events: micro-batches held by each stage, and messages in transit."""
    splits = any(span.action.op is Op.W for span in spans)
    changes: dict[str, list[tuple[float, int]]] = {}
    for span in spans:
        name = f"micro-batches held by stage {span.action.stage}"
        if span.action.op is Op.F:
            changes.setdefault(name, []).append((clock(span.start_s), 1))
        elif span.action.op is (Op.W if splits else Op.B):
            changes.setdefault(name, []).append((clock(span.end_s), -1))
    for message in messages_of(spans):
        moments = [(clock(message.start_s), 1), (clock(message.taken_s), -1)]
        changes.setdefault("messages on their way", []).extend(moments)
    events: list[Event] = []
    for name, moved in sorted(changes.items()):
        held = max(0, -min(total for _, total in _totals(moved, 0)))  # by a step before
        for moment_us, total in _totals(moved, held):
            events.append({"ph": "C", "pid": process, "name": name, "ts": moment_us, "args": {"count": total}})
    return events


def _totals(moments: Iterable[tuple[float, int]], start: int) -> list[tuple[float, int]]:
    """Return (time, running total from ``start``) after each of the moments (time, change), one for equal times."""
    totals: dict[float, int] = {}
    total = start
    for moment_us, change in sorted(moments):
        total += change
        totals[moment_us] = total
    return list(totals.items())
