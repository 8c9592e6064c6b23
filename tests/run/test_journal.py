"""Journal: the newest records, and news for readers that wait."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from raypipe.ir.report import StepRecord
from raypipe.ir.timeline import Timeline
from raypipe.run import journal
from raypipe.run.journal import Journal

pytestmark = pytest.mark.engine


def record(step: int, loss: float = 0.5) -> StepRecord:
    return StepRecord(step, 8, loss, 1.0, 0.25, 0.1, 0.0, 2)


def test_a_late_reader_receives_the_records_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "KEPT_RECORDS", 5)
    run = Journal("digits", "runs/digits")
    run.resumed([record(step) for step in range(3)], 3, "step_0000003", "from step_0000003", ())
    assert [r.step for r in run.news(0, 0.0).records] == [0, 1, 2]
    for step in range(3, 13):
        run.step(record(step), (), ())
    news = run.news(3, 0.0)
    assert [r.step for r in news.records] == [8, 9, 10, 11, 12]
    assert (news.end, news.status.step) == (13, 13)
    assert run.news(13, 0.0).records == []
    assert [r.step for r in run.news(11, 0.0).records] == [11, 12]


def test_a_number_from_another_driver_receives_all_records() -> None:
    run = Journal("digits", "runs/digits")
    run.step(record(7), (), ())
    assert [r.step for r in run.news(500, 0.0).records] == [7]


def test_a_stop_request_wakes_waiting_readers() -> None:
    run = Journal("digits", "runs/digits")
    timer = threading.Timer(0.1, run.stopping, ("enough",))
    timer.start()
    status = run.news(0, 600.0).status
    assert (status.state, status.message) == ("stopping", "enough")
    timer.join()


def test_the_prediction_is_that_of_the_plan_in_force() -> None:
    run, first = Journal("digits", "runs/digits"), Timeline((), "simulated")
    assert run.predicted is None
    for predicted in (first, Timeline((), "simulated"), None, first):
        run.planned(SimpleNamespace(predicted=predicted))  # type: ignore[arg-type]
        assert run.predicted is predicted
