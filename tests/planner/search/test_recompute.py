"""Which stages run their forwards again: those that were asked for; where memory decides, as few as that takes."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, ComputeDevice, Link
from raypipe.ir.plan import Plan
from raypipe.ir.profile import Profile
from raypipe.planner.cost.memory import MemoryModel
from raypipe.planner.partition.costs import Limits
from raypipe.planner.partition.fit import memory_of
from raypipe.planner.partition.prefix_sum import prefix_sum
from raypipe.planner.search import Decision, Request, decide, plan_of
from tests.planner.partition_cases import TICK, chain_of
from tests.planner.specs import spec_for

KIB = 1024
REQUEST = Request(3, 3, (), 8, 8, num_samples=1000, schedule="1f1b", optimizer_factor=0.0, recompute=None)


def profile(ticks: list[int], kept: int = 100 * KIB) -> Profile:
    return Profile(chain_of(ticks, params=KIB, kept=kept, cut=KIB), 1, ())


def needs(decision: Decision) -> list[int]:
    return [stage.memory_bytes for stage in decision.prediction.stages]


def decided(limit: int | None = None, ticks: tuple[int, ...] = (4,) * 6, **changes: object) -> Decision:
    request = dataclasses.replace(REQUEST, memory_limit_bytes=limit, **changes)
    return decide(request, profile(list(ticks)))


def test_without_a_limit_nothing_is_computed_twice() -> None:
    assert decided().request.recomputed(3) == (False,) * 3


def test_only_the_stages_that_would_not_fit_otherwise() -> None:
    """Of equal stages of 1F1B the first holds three micro-batches, the next two."""
    first, second, last = needs(decided(partitioner="parameters"))
    assert first > second > last
    assert decided(first, partitioner="parameters").request.recomputed(3) == (False,) * 3
    found = decided(first - 1, partitioner="parameters")
    assert found.request.recomputed(3) == (True, False, False)
    assert max(needs(found)) <= first - 1
    assert decided(second - 1, partitioner="parameters").request.recomputed(3) == (True, True, False)
    plan = plan_of(found)
    assert plan.recompute == (True, False, False)
    assert dict(plan.reasons)["recompute"] == (
        "stage 0 runs its forward again in the backward, for memory would not hold the activations otherwise, or steps "
        "would take longer"
    )
    assert "twice" in plan.explain()
    assert Plan.from_json(plan.to_json()) == plan


def test_its_backward_takes_its_forward_longer() -> None:
    with_all, without = (decided(recompute=r, partitioner="parameters") for r in (True, False))
    assert [s.start for s in with_all.partition.stages] == [s.start for s in without.partition.stages]
    for again, once in zip(with_all.prediction.stages, without.prediction.stages, strict=True):
        assert again.backward_s == pytest.approx(once.backward_s + once.forward_s)
        assert (again.recompute, once.recompute) == (True, False)
    ratio = with_all.prediction.step_s / without.prediction.step_s  # forwards take as long as backwards here
    assert ratio == pytest.approx(1.5, rel=0.01)


def test_what_the_user_said_of_a_stage_is_kept() -> None:
    first = needs(decided())[0]
    found = decided(first - 1, recompute=(None, False, True))
    assert found.request.recomputed(3) == (True, False, True)
    with pytest.raises(PlanError, match=r"^Stage 0 needs"):
        decided(first - 1, recompute=(False, None, None), partitioner="parameters")


def test_what_does_not_fit_either_way_is_refused_with_the_numbers_of_the_thriftiest() -> None:
    with pytest.raises(PlanError, match="computed again"):
        decided(100 * KIB)


def test_a_cut_knows_which_stages_take_longer() -> None:
    """Ten equal operations on two stages, the first of which computes a third of its work twice: 4 x 6 and 6 x 4."""
    graph, cluster = chain_of([4] * 10), Cluster((ComputeDevice("a"), ComputeDevice("b")), (Link(),))
    for recompute, first in (((True, False), 4), (False, 5), ((False, True), 6)):
        memory = MemoryModel(spec_for("1f1b", 2, 8), recompute=recompute)
        found = prefix_sum(graph, cluster, Limits(2, memory))
        assert found.stages[1].start == first
    assert found.bottleneck_s == pytest.approx(6 * 4 * TICK)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=3, max_size=7),
    st.sampled_from(["1f1b", "gpipe", "slack", "zb-h1", "auto"]),
    st.integers(150, 900),
)
def test_what_is_decided_fits_and_without_it_nothing_did(ticks: list[int], schedule: str, limit_kib: int) -> None:
    asked = {"ticks": tuple(ticks), "schedule": schedule, "num_stages": 2, "num_workers": 2}
    try:
        found = decided(limit_kib * KIB, **asked)
    except PlanError:
        for recompute in itertools.product((False, True), repeat=2):
            with pytest.raises(PlanError):
                decided(limit_kib * KIB, **asked, recompute=recompute)
        return
    memory = memory_of(found.graph, found.partition, found.limits.memory)
    assert [m.total_bytes for m in memory] == needs(found)
    assert max(needs(found)) <= limit_kib * KIB
    for stage, again in enumerate(found.request.recomputed(2)):
        if again:  # and is needed for this cut and schedule
            fewer = tuple(s != stage and r for s, r in enumerate(found.request.recomputed(2)))
            bare = dataclasses.replace(found.limits.memory, recompute=fewer)
            assert memory_of(found.graph, found.partition, bare)[stage].total_bytes > limit_kib * KIB
