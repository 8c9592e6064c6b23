"""Schedules by a few numbers, as tests say them: one slack for all hops, and numbers that a kind has no use for."""

from __future__ import annotations

from typing import Any

from raypipe.ir.schedule_spec import ScheduleSpec, takes

__all__ = ["spec_for"]


def spec_for(
    kind: str, num_stages: int, num_microbatches: int, *, slack: int | tuple[int, ...] = 1, **numbers: Any
) -> ScheduleSpec:
    """A spec of so many stages; numbers that the kind does not take are left out."""
    fields = {
        name: value
        for name, value in numbers.items()
        if name not in ("group_size", "lag", "chunks") or takes(kind, name)
    }
    if takes(kind, "slack"):
        fields["slack"] = (slack,) * (num_stages - 1) if isinstance(slack, int) else tuple(slack)
    return ScheduleSpec(kind, num_microbatches, **fields)
