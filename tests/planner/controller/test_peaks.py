"""Budgets as measured peaks leave them."""

from __future__ import annotations

from raypipe.ir.communication import StageSample
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.controller import Choice, MemoryBudget
from raypipe.planner.controller.memory_budget import PeakMemory

SMALL, LARGE = (
    Choice(ScheduleSpec("1f1b", 8)),
    Choice(ScheduleSpec("gpipe", 8)),
)
BUDGET = MemoryBudget(limit_bytes=1000, fixed_bytes=100, activation_bytes=10)


def sample(peak_bytes: int | None) -> list[StageSample]:
    return [StageSample(0, 0, 1.0, 2.0, peak_bytes=peak_bytes)]


def test_what_a_peak_is_above_the_expected_is_gone_for_good():
    memory = PeakMemory((BUDGET,) * 2).after(SMALL, sample(150))
    assert [budget.extra_bytes for budget in memory.budgets] == [30, 0]
    assert memory.after(SMALL, sample(140)).budgets == memory.budgets
    assert memory.after(SMALL, sample(None)).budgets == memory.budgets


def test_a_peak_belongs_to_the_fullest_choice_that_has_run():
    """A process reports the highest peak of its life: after a larger choice it says nothing of a smaller one."""
    memory = PeakMemory((BUDGET,) * 2).after(LARGE, sample(180))
    assert memory.fullest_bytes == (180, 180)
    assert memory.after(SMALL, sample(180)).budgets == (BUDGET,) * 2


def test_what_an_earlier_process_found_is_taken_over():
    memory = PeakMemory((BUDGET,) * 2).after(SMALL, sample(150))
    assert PeakMemory((BUDGET,) * 2, memory.fullest_bytes).with_extra([30, 0]) == memory
