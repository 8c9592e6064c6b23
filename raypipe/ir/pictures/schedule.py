"""A schedule in slots of time, before anybody has measured anything: F takes one, B two, I and W one each.

The model leaves out links: a message takes no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from raypipe.ir.action import COMPUTE, Action, Op
from raypipe.ir.pictures.timeline import timeline_svg
from raypipe.ir.timeline import Span, Timeline

__all__ = ["in_slots", "schedule_svg"]

SLOTS = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.0, Op.W: 1.0}


def schedule_svg(rows: Sequence[Sequence[Action]], before: Callable[[Action], Sequence[Action]], name: str) -> str:
    """The picture of a schedule's rows.

    Args:
        rows: by worker.
        before: (action) -> actions that must have ended, as ``dependencies``.
        name: of the schedule.
    """
    return timeline_svg([in_slots(rows, before, name)], slots=True)


def in_slots(
    rows: Sequence[Sequence[Action]], before: Callable[[Action], Sequence[Action]], name: str = ""
) -> Timeline:
    """When everything is computed, in slots; rows that wait for each other for ever end where they do."""
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
                needed = [found for found in _computed(action, before) if found in known]
                if any(found not in ends for found in needed):
                    break
                start = max([free[worker], *(ends[found] for found in needed)])
                ends[action] = free[worker] = start + SLOTS[action.op]
                spans.append(Span(worker, action, start, ends[action]))
                places[worker] += 1
                going = True
    return Timeline(tuple(spans), "schedule", name=name)


def _computed(action: Action, before: Callable[[Action], Sequence[Action]]) -> Iterator[Action]:
    """What must have been computed, messages looked through."""
    for found in before(action):
        if found.op in COMPUTE:
            yield found
        else:
            yield from _computed(found, before)
