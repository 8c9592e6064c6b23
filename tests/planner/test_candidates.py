"""Candidate schedules, and the choice among them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.candidates import ScheduleQuery, candidates, quickest, resident
from raypipe.planner.cost.memory import MemoryModel, resident_of
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.schedule.zero_bubble import full_lags
from raypipe.planner.simulator import Costs, makespan_s, simulate

STAGES, COUNT = 4, 16
ONES = (1,) * (STAGES - 1)


def asked(schedule: str, **more: object) -> ScheduleQuery:
    """Four equal stages, the middle hop slow."""
    found = ScheduleQuery(
        schedule=schedule,
        now=ScheduleSpec("1f1b", COUNT),
        busy_s=[3.0] * STAGES,
        round_trip_s=[0.0, 12.0, 0.0],
        fits=lambda spec: True,
        score=lambda spec: float(sum(spec.slack)),
    )
    return found._replace(**more)  # type: ignore[arg-type]


def test_slack_is_grown_where_the_round_trip_is_long() -> None:
    """P = (3 + 3 + 12) / (1 + r) on the slow hop comes down to 3 at r = 5; the runs around it need no more."""
    assert (1, 5, 1) in [spec.slack for spec in candidates(asked("slack"))]


@pytest.mark.parametrize("schedule", ["auto", "kfkb", "slack", "zb-h1", "1f1b"])
def test_candidates_fit_and_come_once(schedule: str) -> None:
    def fits(spec: ScheduleSpec) -> bool:
        return MemoryModel(spec).in_flight(STAGES) <= 7

    now = ScheduleSpec("kfkb", COUNT, group_size=2) if schedule == "kfkb" else ScheduleSpec("1f1b", COUNT)
    found = list(candidates(asked(schedule, now=now, fits=fits)))
    assert found
    assert all(map(fits, found))
    assert len(set(found)) == len(found)
    kinds = {"auto": {"1f1b", "slack", "zb-h1"}}.get(schedule, {schedule})
    assert {spec.kind for spec in found} == kinds


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["auto", "zb-h1"]), st.lists(st.integers(1, 9), min_size=STAGES, max_size=STAGES), st.booleans())
def test_peaks_are_within_any_limits(schedule: str, limits: list[int], replicas: bool) -> None:
    """By the simulator. No stage could defer more weight gradients, and all defer them in full where that fits."""
    now = ScheduleSpec("1f1b", 6, replicas=(2, 1, 1, 2), lanes=2) if replicas else ScheduleSpec("1f1b", 6)

    def fits(spec: ScheduleSpec) -> bool:
        held = resident_of(schedule_of(spec, STAGES)).in_flight
        return all(count <= limit for count, limit in zip(held, limits, strict=True))

    def score(spec: ScheduleSpec) -> float:
        return makespan_s(lower(schedule_of(spec, STAGES)), Costs.uniform(STAGES, 1.0, 2.0, 0.5))

    found = list(candidates(asked(schedule, now=now, fits=fits, score=score)))
    least = all(map(fits, [now])) if schedule == "auto" else fits(now.as_kind("zb-h1", slack=ONES, lag=(0,) * STAGES))
    assert bool(found) >= least
    for spec in found:
        peaks = simulate(lower(schedule_of(spec, STAGES)), Costs.uniform(STAGES)).peak_in_flight
        assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
        if not spec.lag:
            continue
        assert not fits(replace(spec, lag=()))
        for stage, full in enumerate(full_lags(spec.slack, spec.replicas or (1,) * STAGES)):
            more = (*spec.lag[:stage], spec.lag[stage] + 1, *spec.lag[stage + 1 :])
            assert spec.lag[stage] == full or not fits(replace(spec, lag=more))


def test_without_limits_all_weight_gradients_are_deferred_as_far_as_slack_allows() -> None:
    assert {spec.lag for spec in candidates(asked("auto"))} == {()}


def test_a_lag_is_searched_only_for_a_slack_that_is_tried() -> None:
    stages, asked_for = 12, list[ScheduleSpec]()

    def fits(spec: ScheduleSpec) -> bool:
        asked_for.append(spec)
        return all(MemoryModel(spec).in_flight(depth) <= depth + 4 for depth in range(1, stages + 1))

    query = asked("zb-h1", busy_s=[3.0] * stages, round_trip_s=[9.0] * (stages - 1), fits=fits)
    tried = [spec for spec in candidates(query) if spec.lag]
    assert tried
    searched = {spec.slack for spec in asked_for if any(spec.lag)}
    assert searched <= {spec.slack for spec in tried}


def test_the_least_slack_is_kept_everywhere() -> None:
    found = [spec.slack for spec in candidates(asked("slack", least_slack=2))]
    assert found
    assert min(map(min, found)) == 2


def test_split_backwards_are_left_out_while_nobody_knows_what_they_take() -> None:
    assert "zb-h1" not in {spec.kind for spec in candidates(asked("auto", split_backward=False))}


def test_of_equals_the_one_that_holds_least_is_taken() -> None:
    one, other = (ScheduleSpec("slack", COUNT, slack=(r,) * (STAGES - 1)) for r in (1, 3))

    def held(spec: ScheduleSpec) -> float:
        return resident(MemoryModel(spec), STAGES)

    assert quickest([other, one], lambda spec: 1.0 if spec == one else 0.999, held) == one
    assert quickest([other, one], lambda spec: 1.0 if spec == one else 0.9, held) == other
