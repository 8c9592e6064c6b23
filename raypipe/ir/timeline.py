"""What ran when: the one type of a simulated and of a measured run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raypipe.ir.action import COMPUTE, Action

__all__ = ["Span", "Timeline", "chrome_trace_json"]


class Span(NamedTuple):
    """One action on one worker; seconds since the timeline's own zero."""

    worker: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans of all workers, with where they come from ("simulated" or "measured").

    Attributes:
        spans: every action that took time, in any order; a tuple, or ``raypipe.ir.spans.PackedSpans``.
        source: "simulated" or "measured".
        peak_in_flight: most micro-batches whose activations each stage held at once, by stage.
        name: what was run, for the viewer's title.
    """

    spans: Sequence[Span]
    source: str
    peak_in_flight: tuple[int, ...] = ()
    name: str = ""

    @property
    def num_workers(self) -> int:
        return 1 + max((s.worker for s in self.spans), default=-1)

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end, in seconds."""
        if not self.spans:
            return 0.0
        return max(s.end_s for s in self.spans) - min(s.start_s for s in self.spans)

    def busy_s(self, worker: int) -> float:
        """Seconds the worker spent in F, B, I and W."""
        return sum(s.end_s - s.start_s for s in self.spans if s.worker == worker and s.action.op in COMPUTE)

    @property
    def bubble_fraction(self) -> float:
        """Share of worker time that no compute action used: 0 is perfect, (S-1)/(M+S-1) is 1F1B's."""
        span = self.makespan_s * self.num_workers
        return 1.0 - sum(self.busy_s(w) for w in range(self.num_workers)) / span if span else 0.0

    def _repr_html_(self) -> str:
        from raypipe.ir.pictures.timeline import timeline_svg

        return timeline_svg([self])

    def chrome_trace(self, process: int = 0) -> list[dict[str, object]]:
        """Events for Perfetto or chrome://tracing: one process per timeline, one thread per worker.

        Compute actions lie on the worker's own track, transfers and waits on the track below it.
        """
        zero = min((s.start_s for s in self.spans), default=0.0)
        title = f"{self.source} {self.name}".strip()
        events: list[dict[str, object]] = [
            {"ph": "M", "pid": process, "name": "process_name", "args": {"name": title}},
        ]
        for worker in range(self.num_workers):
            for track, label in ((2 * worker, f"worker {worker}"), (2 * worker + 1, f"worker {worker} links")):
                thread = {"ph": "M", "pid": process, "tid": track}
                events.append({**thread, "name": "thread_name", "args": {"name": label}})
                events.append({**thread, "name": "thread_sort_index", "args": {"sort_index": track}})
        for span in sorted(self.spans, key=lambda s: (s.worker, s.start_s)):
            compute = span.action.op in COMPUTE
            events.append(
                {
                    "ph": "X",
                    "pid": process,
                    "tid": 2 * span.worker + (0 if compute else 1),
                    "name": str(span.action),
                    "cat": span.action.op.value,
                    "ts": round((span.start_s - zero) * 1e6, 3),
                    "dur": round((span.end_s - span.start_s) * 1e6, 3),
                    "args": {"stage": span.action.stage, "microbatch": span.action.microbatch},
                }
            )
        return events


def chrome_trace_json(timelines: Iterable[Timeline]) -> str:
    """One file for several timelines, so that predicted and measured stand one above the other."""
    events = [event for process, timeline in enumerate(timelines) for event in timeline.chrome_trace(process)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
