"""Replays of replicated plans against what can be worked out by hand, and the planner's plan for VGG-16."""

from __future__ import annotations

import math

import pytest

from jobs.bench.vs_dp import bench
from jobs.bench.vs_dp.replay import Hosts, Stage, all_reduce_s, period_s, warm_up
from jobs.bench.vs_dp.vgg16 import vgg16
from raypipe.planner.schedule.asynchronous import continuous
from raypipe.planner.schedule.lower import lower
from raypipe.planner.simulate.serial import Costs
from raypipe.planner.tune import step_of

pytestmark = pytest.mark.core
FREE = Hosts(4, math.inf, math.inf)


def stages(*counts: int, forward_s: float = 1.0, backward_s: float = 2.0) -> list[Stage]:
    """Without bytes; each stage takes as long per replica as there are replicas, so that all keep step."""
    found, device = [], 0
    for count in counts:
        found.append(Stage(tuple(range(device, device + count)), count * forward_s, count * backward_s, 0.0))
        device += count
    return found


def test_vgg16_has_its_parameters_and_operations() -> None:
    graph = vgg16(1.0)
    assert sum(node.param_bytes for node in graph.nodes) == 4 * 138_357_544  # as torchvision counts them
    assert sum(node.forward_s for node in graph.nodes) / bench.BATCH == pytest.approx(2 * 15.47e9, rel=1e-3)
    assert next(node for node in graph.nodes if node.name == "pool17").cut_bytes == 4 * 25088


@pytest.mark.parametrize(
    ("counts", "ahead", "noam"),
    [((15, 1), [1, 0], 2), ((2, 1, 1), [1, 1, 0], 2), ((1, 1, 1, 1), [3, 2, 1, 0], 4), ((3, 2), [1, 0], 2)],
)
def test_warm_ups(counts: tuple[int, ...], ahead: list[int], noam: int) -> None:
    found = stages(*counts)
    assert [warm_up(found, s) for s in range(len(counts))] == ahead
    assert ahead[0] + 1 == noam == math.ceil(sum(counts) / counts[0])


@pytest.mark.parametrize("counts", [(1,), (1, 1), (1, 1, 1), (2, 1), (15, 1), (2, 1, 1), (16,)])
def test_stages_that_keep_step_take_their_seconds(counts: tuple[int, ...]) -> None:
    assert period_s(stages(*counts), FREE) == pytest.approx(3.0)


def test_a_straight_pipeline_is_the_simulators() -> None:
    given = [Stage((s,), f, b, 0.0, 1.0) for s, (f, b) in enumerate([(1.0, 2.5), (1.5, 2.0), (0.5, 3.5)])]
    costs = Costs((1.0, 1.5, 0.5), (2.5, 2.0, 3.5), forward_latency_s=(1.25,) * 2, backward_latency_s=(1.25,) * 2)
    step_s = step_of(lower(continuous("pipedream", 3, 4, 1)), costs)[0]
    assert period_s(given, Hosts(4, 1 / 1.25, math.inf), rounds=400) == pytest.approx(step_s / 4, rel=0.01)


def test_data_parallelism_hides_its_sums_behind_the_backward() -> None:
    hosts = Hosts(2, 100.0, 10.0)
    assert all_reduce_s(60.0, range(4), hosts) == pytest.approx(0.6 + 6.0)
    assert all_reduce_s(60.0, range(2), hosts) == pytest.approx(0.6)
    assert all_reduce_s(60.0, [0], hosts) == 0.0
    whole = Stage((0, 1, 2, 3), 1.0, 2.0, 60.0)
    assert period_s([whole], hosts) == pytest.approx((1.0 + 6.6) / 4)
    assert period_s([whole._replace(sync_bytes=6.0)], hosts) == pytest.approx((1.0 + 2.0) / 4)


def test_messages_wait_for_the_way_into_a_host() -> None:
    """Four in front on two hosts, one behind on a third: four messages of 2 s enter it per round, one after another."""
    front = Stage((0, 1, 2, 3), 1.0, 1.0, 0.0)
    behind = Stage((4,), 0.1, 0.1, 0.0, 20.0)
    assert period_s([front, behind], Hosts(2, math.inf, 10.0)) >= 2.0 * (1 - 1e-9)


@pytest.mark.slow
def test_the_planner_finds_15_1_and_it_runs_as_promised() -> None:
    graph = vgg16(15e12)
    plan, ours_s, parallel_s, unhidden_s = bench.seconds_of(graph, bench.BETWEEN_GBIT)
    assert plan.replicas == (15, 1)
    assert plan.stages[1].first_node == "linear0"
    assert ours_s == pytest.approx(plan.bottleneck_s, rel=0.05)
    assert 2 * ours_s < parallel_s < unhidden_s


@pytest.mark.slow
def test_the_rate_for_a_speedup_gives_it() -> None:
    graph = vgg16(15e12)
    gbit = bench.gbit_for(graph, 3.0)
    _, ours_s, parallel_s, _ = bench.seconds_of(graph, gbit)
    assert parallel_s / ours_s == pytest.approx(3.0, rel=0.03)
