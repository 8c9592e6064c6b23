"""Bytes that each stage holds over a step: what its plan counts at the fullest moment, moved along a timeline.

Activations come with every F and go with its B, or W; all else of ``StagePrediction.memory`` is there all the time. The
timeline may be a measured one: then the times are measured and the bytes predicted.
"""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.ir.prediction import StagePrediction
from raypipe.ir.schedule import Op
from raypipe.ir.timeline import Timeline

__all__ = ["bytes_over_step"]


def bytes_over_step(stages: Sequence[StagePrediction], timeline: Timeline) -> list[list[tuple[float, float]]]:
    """By stage, (seconds since the timeline's begin, bytes from then on)."""
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
    found = []
    for stage, moments in zip(stages, changes, strict=True):
        moving = sum(count for name, count in stage.memory if name.startswith("activations"))
        each = moving / max(stage.in_flight, 1)
        held = float(stage.memory_bytes - moving)
        points = [(0.0, held)]
        for moment_s, change in sorted(moments):
            held += change * each
            points.append((moment_s, held))
        points.append((timeline.makespan_s, held))
        found.append(points)
    return found
