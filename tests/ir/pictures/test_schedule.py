"""A schedule in slots: who waits for whom is the one rule, and links take no time."""

from __future__ import annotations

from raypipe.ir.pictures.schedule import in_slots
from raypipe.ir.schedule import Schedule, dependencies
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from tests.planner.specs import spec_for


def _slots(schedule: Schedule) -> float:
    return in_slots(schedule.rows(), lambda action: dependencies(action, schedule.wiring)).makespan_s


def test_1f1b_takes_as_long_as_its_law_says() -> None:
    """(M + S - 1) (F + B) with F = 1 and B = 2, lowered or not."""
    made = schedule_of(spec_for("1f1b", 4, 8), 4)
    assert _slots(made) == (8 + 4 - 1) * 3
    assert _slots(lower(made)) == (8 + 4 - 1) * 3


def test_a_split_backward_fills_the_gaps() -> None:
    assert _slots(schedule_of(spec_for("zb-h1", 4, 8, slack=(1, 1, 1)), 4)) < (8 + 4 - 1) * 3
