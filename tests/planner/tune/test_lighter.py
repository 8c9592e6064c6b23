"""Plans in which a worker that ran out of memory holds less."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import PlanError
from raypipe.ir.plan import Plan
from raypipe.ir.profile import Profile
from raypipe.planner.partition.fit import memory_of
from raypipe.planner.tune import ASSUMED_LINK, Request, decide, plan_of
from raypipe.planner.tune.again import calibrated, in_force, line_of, planned_seconds
from raypipe.planner.tune.lighter import LESS, lighter
from tests.planner.partition_cases import chain_of

COUNT = 8


def request_of(stages: int, **fields: object) -> Request:
    made = Request(stages, stages, (), COUNT, COUNT, num_samples=1000)
    return replace(made, **fields)  # type: ignore[arg-type]


def plan_and_profile(ticks: list[int], request: Request) -> tuple[Plan, Profile]:
    profile = Profile(chain_of(ticks, params=1000, kept=1000), microbatch_size=1)
    return plan_of(decide(request, profile)), profile


def held(request: Request, profile: Profile, plan: Plan, worker: int) -> int:
    """Bytes that the plan counts for a worker."""
    assert plan.spec is not None
    now = in_force(request.with_schedule(plan.spec), profile, plan, line_of(plan, None, ASSUMED_LINK))
    return memory_of(now.graph, now.partition, now.limits.memory)[worker].total_bytes


def test_the_thriftiest_schedule_that_may_be_taken_comes_first() -> None:
    request = request_of(2)
    plan, profile = plan_and_profile([4] * 8, request)
    assert str(plan.spec) == "slack r=2, M=8, overlap"
    found = lighter(request, profile, plan, line_of(plan, None, ASSUMED_LINK), 0, 0)
    assert found.request.schedule == "1f1b"
    assert found.partition.cuts == plan.partition.cuts  # one micro-batch less is enough
    assert found.reasons == (("memory", "made again, as worker 0 ran out of memory: it holds 24.6 KiB at most now"),)


def test_who_asked_for_a_schedule_keeps_it_and_layers_move() -> None:
    request = request_of(2, schedule="gpipe")
    plan, profile = plan_and_profile([4] * 8, request)
    found = lighter(request, profile, plan, line_of(plan, None, ASSUMED_LINK), 1, 0)
    assert found.request.schedule == "gpipe"
    assert found.partition.cuts != plan.partition.cuts
    assert found.partition.stages[1].stop - found.partition.stages[1].start < 4


def test_what_it_held_counts_where_that_is_less_than_planned() -> None:
    request = request_of(2, schedule="1f1b")
    plan, profile = plan_and_profile([4] * 8, request)
    line = line_of(plan, None, ASSUMED_LINK)
    need = held(request, profile, plan, 0)
    assert lighter(request, profile, plan, line, 0, need // 2).cluster.devices[0].memory_bytes == int(
        LESS * (need // 2)
    )
    assert lighter(request, profile, plan, line, 0, 5 * need).cluster.devices[0].memory_bytes == int(LESS * need)


def test_where_nothing_holds_less_worker_bytes_and_fields_are_named() -> None:
    request = request_of(2, schedule="1f1b")
    plan, profile = plan_and_profile([4, 4], request)
    words = r"Worker 0 was planned to hold 5.9 KiB, and no other cut .* 5.3 KiB at most\. .*smaller micro-batches"
    with pytest.raises(PlanError, match=words):
        lighter(request, profile, plan, line_of(plan, None, ASSUMED_LINK), 0, 0)


def test_where_no_other_cut_does_its_stage_computes_forwards_again() -> None:
    request = request_of(2, schedule="1f1b", recompute=None)
    plan, profile = plan_and_profile([4, 4], request)
    assert plan.recompute == (False, False)
    line = line_of(plan, None, ASSUMED_LINK)
    found = lighter(request, profile, plan, line, 0, 0)
    made = plan_of(found)
    assert (made.recompute, found.partition.cuts) == ((True, False), plan.partition.cuts)
    assert held(request, profile, made, 0) <= LESS * held(request, profile, plan, 0)
    never = replace(request, recompute=(False, None))
    with pytest.raises(PlanError, match=r"^Worker 0 was planned to hold"):
        lighter(never, profile, plan, line, 0, 0)


def test_a_stage_that_computes_again_is_measured_with_both_of_its_forwards() -> None:
    request = request_of(2, schedule="1f1b", recompute=(True, False))
    plan, profile = plan_and_profile([4] * 8, request)
    planned_s = planned_seconds(profile, plan)
    assert planned_s == pytest.approx([stage.busy_s for stage in plan.prediction.stages])  # type: ignore[union-attr]
    measured_s = (2 * planned_s[0], planned_s[1])
    assert planned_seconds(calibrated(profile, plan, measured_s, (1.0, 1.0)), plan) == pytest.approx(measured_s)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=6, max_size=12), st.integers(2, 4), st.data())
def test_each_failure_leaves_less_until_nothing_is_left(ticks: list[int], stages: int, data: st.DataObject) -> None:
    request = request_of(stages)
    plan, profile = plan_and_profile(ticks, request)
    line, worker = line_of(plan, None, ASSUMED_LINK), data.draw(st.integers(0, stages - 1))
    before = held(request, profile, plan, worker)
    for _ in range(100):
        try:
            found = lighter(request, profile, plan, line, worker, data.draw(st.sampled_from([0, 10**9])))
        except PlanError:
            return
        made = plan_of(found)
        after = held(request, profile, made, worker)
        assert after <= LESS * before
        assert (made.num_microbatches, made.microbatch_size) == (plan.num_microbatches, plan.microbatch_size)
        assert [stage.devices for stage in made.partition.stages] == [(at,) for at in range(stages)]
        plan, line, before = made, found.cluster, after
    raise AssertionError("a worker holds something")
