"""What ran when: the one type of a simulated and of a measured run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raypipe.ir.action import COMPUTE, Action

__all__ = ["Span", "Timeline"]


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
