"""Plans of the same stages with other numbers of replicas."""

from __future__ import annotations

import pytest

from raypipe.errors import PlanError
from raypipe.ir.plan import Plan
from raypipe.ir.segment import RowsKey
from raypipe.planner.partition.chain import equal_parameters
from raypipe.planner.regroup import counts_for, left, regrouped, with_spares
from raypipe.planner.rows import rows_for
from raypipe.planner.tune import Request
from raypipe.planner.tune.replicas import groups_of
from raypipe.planner.tune.unprofiled import make_plan
from tests.planner.partition_cases import chain_of


def plan_of(replicas: tuple[int, ...], lanes: int) -> Plan:
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
    assert with_spares(tuple(groups_of(counts)), wanted, spares) == found


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
    plan = plan_of((3, 2), 6)
    found = regrouped(plan, counts)
    assert found.partition.replicas == found.schedule.wiring.replicas == counts
    assert found.schedule.wiring.lanes == 6
    assert (found.partition.cuts, found.microbatch_size) == (plan.partition.cuts, plan.microbatch_size)
    assert regrouped(found, (3, 2)) == plan
    for key in (RowsKey(6), RowsKey(2), RowsKey(6, training=False)):
        assert rows_for(found, key).num_workers == sum(counts)
