"""Timelines: bubble and busy time, packed spans."""

from __future__ import annotations

import pickle

import pytest

from raypipe.ir.report import StepReport, merge_reports
from raypipe.ir.schedule import parse_action
from raypipe.ir.timeline import PackedSpans, Span, Timeline
from raypipe.planner.schedule.lower import lower
from raypipe.planner.schedule.sync import gpipe
from raypipe.planner.simulator import Costs, simulate


def _span(worker: int, action: str, start_s: float, end_s: float) -> Span:
    return Span(worker, parse_action(action), start_s, end_s)


TWO_STAGES = Timeline(
    (
        _span(0, "0F0", 10.0, 11.0),
        _span(1, "1RECV_F0", 10.0, 11.0),
        _span(1, "1F0", 11.0, 12.0),
        _span(1, "1B0", 12.0, 14.0),
        _span(0, "0B0", 14.0, 16.0),
    ),
    "measured",
)


def test_bubble_counts_only_compute() -> None:
    assert TWO_STAGES.makespan_s == 6.0
    assert TWO_STAGES.busy_s(1) == 3.0
    assert TWO_STAGES.bubble_fraction == pytest.approx(0.5)
    assert Timeline((), "simulated").bubble_fraction == 0.0


def _report(stage: int, start_s: float, end_s: float, busy_s: float, loss: float | None) -> StepReport:
    return StepReport(stage, 7, 32, loss, 1.5, start_s, end_s, busy_s, 0.0, (10, 20), 2 - stage)


def test_a_record_spans_from_the_end_of_the_step_before() -> None:
    reports = [_report(0, 1.0, 3.0, 1.0, None), _report(1, 1.1, 2.9, 1.5, 0.25)]
    record = merge_reports(reports, previous_end_s=0.5)
    assert (record.step, record.loss, record.grad_norm, record.peak_in_flight) == (7, 0.25, 1.5, 2)
    assert record.seconds == 2.5
    assert record.bubble_fraction == pytest.approx(0.5)
    assert record.link_bytes_per_s == pytest.approx(60 / 2.5)
    assert record.samples_per_s == pytest.approx(32 / 2.5)
    assert merge_reports(reports, previous_end_s=None).seconds == 2.0


def test_packed_spans_are_the_tuple_of_their_spans() -> None:
    spans = simulate(lower(gpipe(2, 2)), Costs.uniform(2)).spans
    assert isinstance(spans, PackedSpans)
    plain = tuple(spans)
    assert spans == plain
    assert plain == spans
    assert hash(spans) == hash(plain)
    assert (spans[0], spans[1:3]) == (plain[0], plain[1:3])
    assert spans != plain[1:]
    assert pickle.loads(pickle.dumps(spans)) == plain
    assert repr(spans) == f"<{len(plain)} spans>"
