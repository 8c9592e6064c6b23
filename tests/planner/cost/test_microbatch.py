"""Seconds by micro-batch size, and the explanation of the number of micro-batches."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from raypipe.errors import PlanError
from raypipe.ir.plan import CurvePoint
from raypipe.planner.cost.microbatch import EPSILON, StageTime, all_sizes, divisors, explain_number, fit_stage_time


def line(sigma_s: float, overhead: float) -> StageTime:
    return fit_stage_time({b: sigma_s * (b + overhead) for b in (1, 2, 4, 8)})


@pytest.mark.slow
@given(st.floats(1e-6, 10.0), st.floats(0.0, 50.0))
def test_a_line_is_found_again(sigma, overhead):
    found = line(sigma, overhead)
    assert found.sigma_s == pytest.approx(sigma, rel=1e-6)
    assert found.overhead_samples == pytest.approx(overhead, rel=1e-6, abs=1e-6)
    assert found.is_straight


@pytest.mark.slow
@given(st.dictionaries(st.integers(1, 64), st.floats(1e-4, 10.0), min_size=2, max_size=6))
def test_any_measurement_gives_a_usable_time(measured):
    found = fit_stage_time(measured)
    assert found.sigma_s > 0
    assert 0 <= found.overhead_samples < math.inf
    if not found.is_straight:  # then the points themselves are the answer
        assert all(found.seconds(b) == pytest.approx(t) for b, t in measured.items())


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.sampled_from(["", "", "memory", "model"])), min_size=1, max_size=12),
    st.data(),
)
def test_a_choice_names_the_bound_that_excludes_a_faster_number(points: list[tuple[int, str]], data: st.DataObject):
    curve = [CurvePoint(n, -(-64 // n), float(step), refused) for n, (step, refused) in enumerate(points, 1)]
    allowed = [point for point in curve if not point.refused]
    assume(allowed)
    chosen = min(allowed, key=lambda point: point.predicted_s)
    found = explain_number(curve, chosen.num_microbatches, 64, line(1e-3, 1.0))
    best_s = min(point.predicted_s for point in curve)
    assert (found.decided_by != "simulation") == (best_s < chosen.predicted_s)
    if found.decided_by != "simulation":
        assert any(p.refused == found.decided_by and p.predicted_s == best_s for p in curve)
    assert found.low <= found.optimum <= found.high
    for point in curve:
        if point.predicted_s <= best_s * (1 + EPSILON):
            assert found.low <= point.num_microbatches <= found.high
    assert found.reason.startswith(f"{chosen.num_microbatches} micro-batch")


@given(st.integers(1, 400))
def test_every_number_of_micro_batches_leaves_no_empty_one(minibatch: int) -> None:
    sizes = all_sizes(minibatch)
    assert {n for n, b in sizes} == {math.ceil(minibatch / b) for b in range(1, minibatch + 1)}
    assert all((n - 1) * b < minibatch <= n * b for n, b in sizes)
    assert divisors(minibatch) == [n for n in range(1, minibatch + 1) if minibatch % n == 0]


@pytest.mark.parametrize(
    ("measured", "text"), [({1: 0.1}, "measure two sizes or more"), ({1: 0.1, 2: 0.0}, "each above 0 s")]
)
def test_refusals_say_what_to_change(measured: dict[int, float], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        fit_stage_time(measured)
