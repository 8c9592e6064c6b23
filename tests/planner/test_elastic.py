"""Elastic runs: when a run waits, begins, grows and requests workers, and its numbers of replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypipe.config.ray import WorkerRange
from raypipe.errors import PlanError
from raypipe.ir.plan import Plan
from raypipe.ir.segment import RowsKey
from raypipe.planner.elastic import (
    LEAST_GAIN,
    MOST_PAUSED,
    Gain,
    Shape,
    begins_with,
    counts_for,
    gain_of,
    left,
    move_seconds,
    pays,
    regrouped,
    rest_steps,
    shape_of,
    target_workers,
    with_spares,
)
from raypipe.planner.partition.chain import equal_parameters
from raypipe.planner.schedule.replicas import Replicas
from raypipe.planner.search import Request
from raypipe.planner.search.make_plan import make_plan
from raypipe.planner.segments import rows_for
from tests.planner.partition_cases import chain_of

REQUEST = Request(
    num_stages=None, num_workers=None, split_points=(), minibatch_size=8, num_microbatches=4, num_samples=64
)


@pytest.mark.parametrize(
    ("workers", "wanted", "begins"),
    [
        (WorkerRange(2, 5), 4, {0: 0, 1: 0, 2: 2, 3: 3, 4: 4, 5: 4, 6: 4}),
        (WorkerRange(4, 8), 2, {2: 2}),  # more than the plan uses is not waited for
        (WorkerRange(4, 16), 16, {0: 0, 4: 4, 12: 12, 8: 8, 16: 16}),  # Ray's own example, one worker on each node
    ],
)
def test_a_run_begins_with_what_is_there(workers: WorkerRange, wanted: int, begins: dict[int, int]) -> None:
    assert {there: begins_with(workers, wanted, there) for there in begins} == begins


def test_workers_are_requested_up_to_the_range() -> None:
    assert target_workers(WorkerRange(2, 5), 4, spare=True) == 5
    assert target_workers(WorkerRange(2, 5), 4, spare=False) == 4
    assert target_workers(WorkerRange(4, 8), 2, spare=False) == 4  # which were asked for by the user


@pytest.mark.parametrize(
    ("now_s", "then_s", "measured_s", "left", "worth"),
    [
        (1.0, 0.5, 0.0, 100, True),
        (1.0, 0.5, 0.0, 7, False),  # 3.5 s gained, which is less than twice the move
        (1.0, 0.5, 10.0, 1, True),  # steps take ten times what was predicted, and so does the gain
        (1.0, 0.99, 0.0, 10**9, False),  # within what a prediction is off by
        (1.0, 1.5, 0.0, 100, False),
        (1.0, 0.5, 0.0, 0, False),
    ],
)
def test_growing_pays_where_the_rest_of_the_run_gains_more_than_the_move_takes(
    now_s: float, then_s: float, measured_s: float, left: int, worth: bool
) -> None:
    assert pays(gain_of(now_s, then_s, measured_s, 2.0, left), LEAST_GAIN) is worth


def test_a_move_that_was_measured_counts_instead_of_the_assumption() -> None:
    assert move_seconds(2e9) == 12.0
    assert move_seconds(2e9, last_s=0.8) == 0.8


PIPEDREAM = {"num_stages": 2, "replicas": (3, 1)}


@pytest.mark.parametrize(
    ("asked", "there", "shape"),
    [
        ({}, 3, Shape(None, 3)),
        ({"num_stages": 4}, 3, Shape(3, 3)),
        ({"num_stages": 4}, 9, Shape(4, 9)),  # of which five are spares
        ({"split_points": ("a", "b")}, 2, Shape(2, 2)),
        ({"split_points": ("a", "b")}, 5, Shape(3, 5)),
        ({"schedule": "interleaved"}, 3, Shape(None, 3)),
        ({"schedule": "interleaved", "num_stages": 8}, 3, Shape(8, 2)),
        ({"schedule": "interleaved", "num_stages": 8}, 16, Shape(8, 8)),
        ({"schedule": "interleaved", "num_stages": 7}, 3, Shape(7, 1)),
        ({"schedule": "zb-v", "num_stages": 8}, 3, Shape(6, 3)),
        ({"schedule": "zb-v", "num_stages": 8}, 9, Shape(8, 4)),
        *(
            (PIPEDREAM, there, shape)
            for there, shape in enumerate(
                (Shape(1, 1), Shape(2, 2, (1, 1)), Shape(2, 3, (2, 1)), Shape(2, 4, (3, 1)), Shape(2, 5, (3, 1))), 1
            )
        ),
        ({"num_stages": 4, "schedule": "zb-v", "replicas": 3, "num_workers": 6}, 5, Shape(4, 4, 2)),
        ({"num_stages": 4, "schedule": "zb-v", "replicas": 3, "num_workers": 6}, 1, Shape(2, 1)),
        ({"replicas": None}, 3, Shape(None, 3, None)),
        ({"replicas": None, "num_stages": 4}, 3, Shape(3, 3, None)),
    ],
)
def test_stages_follow_the_workers_up_to_what_was_asked_for(asked: dict[str, object], there: int, shape: Shape) -> None:
    assert shape_of(replace(REQUEST, **asked), there) == shape  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gain", "least", "worth"),
    [
        (Gain(1.0, 0.875, 100, 6.25), 0.03, True),  # 12.5 s against 6.25 s, twice
        (Gain(1.0, 0.875, 100, 6.26), 0.03, False),
        (Gain(1.0, 0.875, 99, 6.25), 0.03, False),
        (Gain(1.0, 0.98, 1_000_000, 0.0), 0.03, False),  # a small gain is none however many steps are left
        (Gain(1.0, 0.97, 1_000_000, 0.0), 0.03 - 1e-9, True),
        (Gain(1.0, 1.0, 100, 0.0), 0.0, False),
        (Gain(1.0, 1.1, 100, 0.0), -1.0, False),
        (Gain(0.0, 0.0, 100, 0.0), 0.03, False),
    ],
)
def test_a_move_must_earn_its_pause_twice_in_the_steps_that_are_left(gain: Gain, least: float, worth: bool) -> None:
    assert pays(gain, least) is worth


def test_pauses_stay_a_small_part_of_the_time() -> None:
    pause_s, step_s = 2.0, 0.3
    assert rest_steps(pause_s, step_s) * step_s >= pause_s / MOST_PAUSED
    assert rest_steps(pause_s, 0.0) == 0


def plan_with(replicas: tuple[int, ...], lanes: int) -> Plan:
    request = Request(len(replicas), None, (), 12, 6, 60, "1f1b", replicas=replicas, lanes=lanes)
    return make_plan(request, equal_parameters(chain_of([1] * 8, params=4), len(replicas)), 0)


@pytest.mark.parametrize(
    ("wanted", "workers", "found"),
    [
        ((2, 1), 3, (2, 1)),
        ((2, 1), 2, (1, 1)),
        ((2, 1), 1, None),
        ((2, 3, 2), 5, (2, 2, 1)),
        ((4, 1), 9, (4, 1)),
    ],
)
def test_replicas_for_fewer_workers(wanted: tuple[int, ...], workers: int, found: tuple[int, ...] | None) -> None:
    assert counts_for(wanted, workers, tuple((stage,) for stage in range(len(wanted)))) == found


@pytest.mark.parametrize(
    ("counts", "wanted", "spares", "found"),
    [
        ((1, 1), (2, 1), 1, (2, 1)),
        ((1, 1), (2, 1), 3, (2, 1)),
        ((2, 1), (3, 3), 2, (3, 2)),
        ((2, 2), (3, 3), 1, (3, 2)),
        ((1, 1), (), 2, (1, 1)),
    ],
)
def test_spares_go_where_most_replicas_are_missing(
    counts: tuple[int, ...], wanted: tuple[int, ...], spares: int, found: tuple[int, ...]
) -> None:
    assert with_spares(Replicas(counts).homes(len(counts)), wanted, spares) == found


def test_who_is_left_of_each_stage() -> None:
    assert left(((0, 1), (2,), (3, 4)), {0, 2}) == ((1,), (), (3, 4))


V = (0, 1), (2, 3), (2, 3), (0, 1)
"""Two replicas of two workers that hold two stages each."""


def test_workers_with_several_stages_are_lost_and_come_back_one_of_each() -> None:
    assert left(V, {1}) == ((0,), (2,))
    assert left(V, {1, 2}) == ((0,), (3,))
    assert left(V, {2, 3}) == ((), ())
    assert [counts_for((2, 2), workers, V) for workers in (1, 2, 3, 4, 9)] == [None, (1, 1), (1, 1), (2, 2), (2, 2)]
    alone = (0,), (1,), (1,), (0,)
    assert [with_spares(alone, (2, 2), spares) for spares in (0, 1, 2, 5)] == [(1, 1), (1, 1), (2, 2), (2, 2)]
    request = Request(4, 4, (), 12, 6, 60, "zb-v", replicas=2)
    plan = make_plan(request, equal_parameters(chain_of([1] * 8, params=4), 4), 0)
    assert plan.schedule.wiring.homes == V
    found = regrouped(plan, (1, 1))
    assert found.schedule.wiring.homes == alone
    assert [stage.devices for stage in found.partition.stages] == list(alone)
    assert regrouped(found, (2, 2)) == plan


def test_an_asynchronous_run_keeps_its_replicas() -> None:
    request = Request(2, None, (), 12, 6, 60, "pipedream", replicas=(2, 1))
    plan = make_plan(request, equal_parameters(chain_of([1] * 8, params=4), 2), 0)
    assert regrouped(plan, (2, 1)).schedule == plan.schedule
    with pytest.raises(PlanError, match=r"schedule='pipedream' the numbers of replicas, 2-1, decide how old"):
        regrouped(plan, (1, 1))


@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (1, 2), (3, 3)])
def test_other_numbers_of_replicas_keep_stages_and_lanes(counts: tuple[int, ...]) -> None:
    plan = plan_with((3, 2), 6)
    found = regrouped(plan, counts)
    assert found.partition.replicas == found.schedule.wiring.replicas == counts
    assert found.schedule.wiring.lanes == 6
    assert (found.partition.cuts, found.microbatch_size) == (plan.partition.cuts, plan.microbatch_size)
    assert regrouped(found, (3, 2)) == plan
    for key in (RowsKey(6), RowsKey(2), RowsKey(6, training=False)):
        assert rows_for(found, key).num_workers == sum(counts)
