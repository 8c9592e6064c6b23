"""When copies are taken: not too soon, and not before all stages have the one before."""

from __future__ import annotations

from dataclasses import replace

from raypipe.ir.report import CopyReport, StepReport
from raypipe.runtime.run.copy_times import CopyTimes


def reports(*copied: CopyReport | None) -> list[StepReport]:
    nothing = StepReport(0, 0, 1, None, None, 0.0, 0.0, 0.0, 0.0, (0, 0), 1)
    return [replace(nothing, copied=one) for one in copied]


def test_the_next_one_waits_until_all_have_the_one_before() -> None:
    times = CopyTimes(3)
    times.ordered(0)
    quick = CopyReport(0, 1e-6, 1e-6)
    for copied in (reports(None, None), reports(quick, None)):
        times.heard(1.0, copied)
        assert not times.due(9, fixed=False)
    times.heard(1.0, reports(quick, quick))
    assert [times.due(step, fixed=False) for step in (2, 3, 9)] == [False, True, True]
    times.ordered(9)
    times.heard(1.0, reports(quick, quick))  # which is that of step 0
    assert not times.due(99, fixed=False)


def test_it_waits_as_long_as_copies_are_dear() -> None:
    times = CopyTimes(3)
    times.ordered(0)
    times.heard(1.0, reports(CopyReport(0, 0.3, 0.0), CopyReport(0, 0.1, 1.0)))
    steps = [step for step in range(100) if times.due(step, fixed=False)]
    assert steps[0] == 22  # sqrt(2 * 0.4 s * 600 s)


def test_after_going_back_it_counts_from_there() -> None:
    times = CopyTimes(3)
    times.ordered(30)
    times.ordered(10)
    times.heard(1.0, reports(CopyReport(10, 0.0, 0.0)))
    assert [times.due(step, fixed=False) for step in (12, 13)] == [False, True]


def test_where_the_pipeline_must_run_empty_only_the_number_decides() -> None:
    times = CopyTimes(5)
    times.ordered(0)
    assert [step for step in range(12) if times.due(step, fixed=True)] == [0, 5, 10]


def test_none_at_all() -> None:
    times = CopyTimes(None)
    times.heard(1.0, reports(None))
    assert not times.due(1000, fixed=False)
    assert not times.due(0, fixed=True)
