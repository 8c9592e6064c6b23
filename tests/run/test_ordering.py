"""When copies are taken, and when a requested checkpoint is saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.ir.report import CopyReport, StepReport
from raypipe.ir.segment import Order
from raypipe.planner.segments import Position
from raypipe.run.controller_thread import ActiveSettings
from raypipe.run.ordering import AGAIN_STEPS, NEW_MEMORY_COPIES, CopyTimes, Ordering
from raypipe.run.plans.blueprint import assemble
from raypipe.run.requests import Requests
from tests.run.plans.test_planning import trainer

pytestmark = pytest.mark.engine

STEPS = 50


def reports(*copied: CopyReport | None, copying: bool = False) -> list[StepReport]:
    nothing = StepReport(0, 0, 1, None, None, 0.0, 0.0, 0.0, 0.0, (0, 0), 1)
    return [replace(nothing, copied=one, copying=copying) for one in copied]


def test_the_next_one_waits_until_all_have_the_one_before() -> None:
    times = CopyTimes(3)
    times.ordered(0)
    quick = CopyReport(0, 1e-6, 1e-6)
    for copied in (reports(None, None), reports(quick, None)):
        times.on_step(1.0, copied)
        assert not times.due(9)
    times.on_step(1.0, reports(quick, quick))
    assert [times.due(step) for step in (2, 3, 9)] == [False, True, True]
    times.ordered(9)
    times.on_step(1.0, reports(quick, quick))  # which is that of step 0
    assert not times.due(9 + AGAIN_STEPS - 1)


def intervals(slower_s: Sequence[float], first_s: float = 0.1) -> list[int]:
    """Of copies beside two steps each, which take 1 s and that much longer; copying alone takes 0.1 s.

    Args:
        first_s: that the first copies take.
    """
    times, at = CopyTimes(3), 0
    times.on_step(1.0, reports(None, None))
    found = []
    for copy, slower in enumerate(slower_s):
        times.ordered(at)
        held = CopyReport(at, first_s if copy < NEW_MEMORY_COPIES else 0.1, 1.0)
        for copied in (reports(None, held, copying=True), reports(held, held, copying=True)):
            times.on_step(1.0 + slower, copied)
        found.append(next(step - at for step in range(at, at + 100) if times.due(step)))
        at += found[-1]
    return found


FIRST = (0.0,) * NEW_MEMORY_COPIES
ARE_FREE = [3] * NEW_MEMORY_COPIES
"""What sending took, 1 s, is less than half of three steps."""


def test_it_waits_as_long_as_copies_are_dear() -> None:
    """Copying alone is 3 % of 4 s, and two slower steps beside a copy, 0.4 s, are of 14 s; the middle copy decides."""
    assert intervals((*FIRST, 0.2, 0.2, 0.2, 0.2)) == [*ARE_FREE, 4, 8, 14, 14]
    assert intervals((*FIRST, 0.0, 0.2, 0.2, 0.0, 0.0)) == [*ARE_FREE, 4, 7, 14, 7, 4]


def test_copies_into_new_memory_say_nothing() -> None:
    assert intervals((9.0, 9.0, 9.0, 0.0), first_s=5.0) == [*ARE_FREE, 4]


def test_workers_that_have_come_have_new_memory_again_and_the_interval_stays() -> None:
    times = CopyTimes(3)
    times.interval = 20
    times.soon()
    times.ordered(50)
    times.on_step(1.0, reports(None))
    times.on_step(1.0, reports(CopyReport(50, 9.0, 1.0), copying=True))
    assert [times.due(step) for step in (69, 70)] == [False, True]


def test_a_start_that_slows_some_steps_does_not_keep_copies_away_for_long() -> None:
    """Beside a copy two steps take 10 s longer each, for another process starts: 3 % of eleven minutes."""
    assert intervals((*FIRST, 10.0, 0.0, 0.0)) == [*ARE_FREE, 4, 8, 4]


def test_after_going_back_it_counts_from_there() -> None:
    times = CopyTimes(3)
    times.ordered(30)
    times.ordered(10)
    times.on_step(1.0, reports(CopyReport(10, 0.0, 0.0)))
    assert [times.due(step) for step in (12, 13)] == [False, True]


def test_where_the_pipeline_must_run_empty_only_the_number_decides() -> None:
    """And no copy is taken there while the one before is on its way."""
    times = CopyTimes(5)
    times.ordered(0)
    assert [step for step in range(12) if times.empties(step)] == [0, 5, 10]
    assert not times.due(5)
    times.on_step(1.0, reports(CopyReport(0, 0.0, 0.0)))
    assert times.due(5)


def test_one_that_was_lost_is_taken_again_and_one_that_is_slow_is_waited_for() -> None:
    times = CopyTimes(3)
    times.ordered(0)
    for copying, due in ((True, False), (False, True)):
        times.on_step(1.0, reports(None, copying=copying))
        assert [times.due(step) for step in (AGAIN_STEPS - 1, AGAIN_STEPS)] == [False, due]


class Never:
    """Checkpoints that are never due by themselves."""

    overdue = False

    def due(self, step: int) -> bool:
        return False

    due_at = due

    def begin(self, step: int) -> str:
        return f"after {step}"


@pytest.mark.parametrize(("schedule", "first"), [("1f1b", "after 1"), ("2bw", "after 20")])
def test_it_comes_at_once_or_beside_the_next_copy(schedule: str, first: str, tmp_path: Path) -> None:
    """Of an asynchronous run the latter: it runs empty there anyway, and nowhere else without other bits."""
    run = trainer(tmp_path, "run", "noisy", schedule=schedule, verify="off")
    run._run = SimpleNamespace(**vars(run._run), failure_config=SimpleNamespace(max_failures=-1))
    job = run._prepared()
    blueprint = run._blueprint(job, STEPS, local=True)
    plan = assemble(blueprint, job.planned)

    def orders(*, soon: bool) -> list[Order]:
        control: Any = SimpleNamespace(runs=False, settings=ActiveSettings())
        checkpoints: Any = Never()
        ordering = Ordering(blueprint.spec, plan, checkpoints, control, Requests(), lambda step, *, saves: False)
        if soon:
            ordering.save_soon()
        return list(ordering.orders(Position()))

    plain, soon = orders(soon=False), orders(soon=True)
    assert [order.save_to for order in plain if order.save_to] == [f"after {STEPS}"]
    assert [order.save_to for order in soon if order.save_to] == [first, f"after {STEPS}"]
    assert [order.segment for order in soon] == [order.segment for order in plain]
