"""The journal keeps the last records, and tells everybody what is new since they asked last."""

from __future__ import annotations

import pytest

from raypipe.ir.report import StepRecord
from raypipe.runtime.run import journal
from raypipe.runtime.run.journal import Journal

pytestmark = pytest.mark.engine


def record(step: int, loss: float = 0.5) -> StepRecord:
    return StepRecord(step, 8, loss, 1.0, 0.25, 0.1, 0.0, 2)


def test_who_asks_late_is_told_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "KEPT_RECORDS", 5)
    told = Journal("digits", "runs/digits")
    told.resumed([record(step) for step in range(3)], 3, "step_0000003", "from step_0000003")
    assert [r.step for r in told.news(0, 0.0).records] == [0, 1, 2]
    for step in range(3, 13):
        told.step(record(step), ())
    news = told.news(3, 0.0)
    assert [r.step for r in news.records] == [8, 9, 10, 11, 12]
    assert (news.end, news.status.step) == (13, 13)
    assert told.news(13, 0.0).records == []
    assert [r.step for r in told.news(11, 0.0).records] == [11, 12]


def test_who_counted_another_driver_s_records_is_told_all_of_these() -> None:
    told = Journal("digits", "runs/digits")
    told.step(record(7), ())
    assert [r.step for r in told.news(500, 0.0).records] == [7]
