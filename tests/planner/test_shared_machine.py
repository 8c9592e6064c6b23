"""What workers on one machine cost each other counts in the seconds of a plan, by the number that it takes."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.ir.cluster import Cluster, Device, Link
from raypipe.ir.profile import Profile
from raypipe.planner.tune import Decision, Request, decide
from raypipe.planner.tune.sizes import shared_by
from tests.planner.partition_cases import chain_of

REQUEST = Request(None, 3, (), 16, 4, num_samples=100)


def profile(*crowd: tuple[int, float]) -> Profile:
    graph = chain_of([2, 3, 4, 3, 2, 4])
    points = tuple((b, graph.busy_s * (b + 1) / 5) for b in (1, 2, 4))
    small = (1, tuple(node.busy_s / 2 for node in graph.nodes))
    large = (8, tuple(node.busy_s * 1.8 for node in graph.nodes))
    return Profile(graph, 4, points, small=small, large=large, crowd=crowd)


def decided(found: Profile, **changes: object) -> Decision:
    return decide(dataclasses.replace(REQUEST, **changes), found)  # type: ignore[arg-type]


def busy_s(decision: Decision) -> float:
    """Of all stages, one micro-batch."""
    return sum(stage.busy_s for stage in decision.prediction.stages)


@given(st.floats(1.0, 4.0), st.integers(2, 4))
def test_all_seconds_grow_by_the_same_factor(factor: float, workers: int) -> None:
    before = profile((workers, factor))
    after = shared_by(before, workers)
    assert after.graph.busy_s == pytest.approx(factor * before.graph.busy_s)
    for (size, seconds), (same, then_s) in zip(after.seconds_by_size, before.seconds_by_size, strict=True):
        assert (size, seconds) == (same, pytest.approx(factor * then_s))
    for one, other in ((after.small, before.small), (after.large, before.large)):
        assert one is not None
        assert other is not None
        assert one == (other[0], pytest.approx([factor * seconds for seconds in other[1]]))
    assert [(n.name, n.param_bytes) for n in after.graph.nodes] == [(n.name, n.param_bytes) for n in before.graph.nodes]


def test_numbers_in_between_lie_on_a_line() -> None:
    known, alone_s = profile((2, 1.1), (6, 1.5)), profile().graph.busy_s
    found = [shared_by(known, workers).graph.busy_s / alone_s for workers in (1, 2, 4, 6, 9)]
    assert found == pytest.approx([1.0, 1.1, 1.3, 1.5, 1.5])
    assert shared_by(profile(), 5) == profile()


@pytest.mark.parametrize(("stages", "factor"), [(1, 1.0), (2, 1.25), (3, 1.5)])
def test_a_plan_takes_the_seconds_of_its_own_number_of_workers(stages: int, factor: float) -> None:
    alone, shared = (decided(found, num_stages=stages) for found in (profile(), profile((2, 1.25), (3, 1.5))))
    assert shared.partition.cuts == alone.partition.cuts
    assert busy_s(shared) == pytest.approx(factor * busy_s(alone))
    assert "machine" not in dict(alone.reasons)
    assert dict(shared.reasons)["machine"].endswith("computes as long: 2 at once: 1.25, 3 at once: 1.50")


def test_workers_count_and_not_their_stages() -> None:
    """Four stages of interleaved 1F1B on two workers; and whatever replicas take of four."""
    for changes, factor in (({"schedule": "interleaved", "num_workers": 2, "num_stages": 4}, 2.0),
                            ({"partitioner": "hierarchical", "num_workers": 4}, 3.0)):  # fmt: skip
        alone, shared = (decided(found, **changes) for found in (profile(), profile((2, 2.0), (4, 3.0))))
        assert busy_s(shared) == pytest.approx(factor * busy_s(alone))


def test_workers_that_only_share_what_one_had_are_not_taken() -> None:
    """Three that are each four times as slow are worth nothing."""
    assert decided(profile()).partition.num_stages == 3
    one = decided(profile((2, 2.5), (3, 4.0)))
    assert one.partition.num_stages == 1
    assert "3 at once: 4.00" in dict(one.reasons)["machine"]


def test_a_described_cluster_has_speeds_of_its_own() -> None:
    cluster = Cluster.hosts(3, 1, inside=Link(), between=Link(), device=Device("gpu"))
    alone, shared = (
        decide(dataclasses.replace(REQUEST, num_workers=None, num_stages=3), found, cluster)
        for found in (profile(), profile((3, 1.5)))
    )
    assert shared.prediction == alone.prediction
