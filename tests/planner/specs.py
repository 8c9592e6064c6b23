"""Schedules by a few numbers, as tests say them, and the sends from one worker of a schedule to another."""

from __future__ import annotations

from typing import Any

from raypipe.ir.schedule import Action, Op, Schedule
from raypipe.ir.schedule_spec import ScheduleSpec, takes

__all__ = ["sends_between", "spec_for"]


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


def sends_between(lowered: Schedule, sender: int, receiver: int) -> list[Action]:
    """List the sends from one worker to another, in order."""
    step = {Op.SEND_F: 1, Op.SEND_B: -1}
    return [
        action
        for action in lowered.row(sender)
        if action.op in step and lowered.wiring.worker_of(action.stage + step[action.op], action.microbatch) == receiver
    ]
