"""Replication on levels of bandwidth against PipeDream's recurrence, written out, and against every choice."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, Device, Link
from raypipe.ir.graph import ModelGraph
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.memory import MemoryModel
from raypipe.planner.partition.hierarchical import hierarchical
from raypipe.planner.partition.limits import Limits
from raypipe.planner.partition.prefix_sum import prefix_sum
from tests.planner.partition_cases import NEAR, chain_of, graphs, in_flight, limits, node, stage_bytes

RATES = st.sampled_from([math.inf, 4096.0, 1024.0, 256.0])


def all_reduce_s(graph: ModelGraph, first: int, last: int, replicas: int, rate: float) -> float:
    """Each replica sends (m - 1)/m of the weights and receives as many."""
    weights = sum(n.param_bytes for n in graph.nodes[first:last])
    return 2 * (replicas - 1) / replicas * weights / rate


def recurrence(graph: ModelGraph, levels: list[tuple[int, float]], update_interval: int = 1) -> float:
    """A^L(0..N, m_L) as in the paper, with at most all of a component's parts in use, no memory limits."""
    size = len(graph.nodes)

    @functools.cache
    def pipeline(level: int, i: int, j: int, m: int, copies: int) -> float:
        if level == 0:
            return sum(n.busy_s for n in graph.nodes[i:j])
        best = min(stage(level, i, j, n, copies) for n in range(1, m + 1))
        for s in range(i + 1, j):
            if (crossing := graph.nodes[s - 1].cut_bytes) is not None:
                traffic = 2 * crossing / levels[level - 1][1]
                for n in range(1, m):
                    front = pipeline(level, i, s, m - n, copies)
                    best = min(best, max(front, traffic, stage(level, s, j, n, copies)))
        return best

    @functools.cache
    def stage(level: int, i: int, j: int, m: int, copies: int) -> float:
        inner = levels[level - 2][0] if level > 1 else 1
        sync = all_reduce_s(graph, i, j, m, levels[level - 1][1]) * m / max(update_interval / copies, m)
        return max(pipeline(level - 1, i, j, inner, copies * m), sync) / m

    return pipeline(len(levels), 0, size, levels[-1][0], 1)


def hosts(sizes: list[int], rates: list[float]) -> Cluster:
    """A regular tree: sizes from the innermost level out."""
    outer = itertools.product(*(range(size) for size in reversed(sizes)))
    return Cluster(
        tuple(Device("/".join(map(str, path)), host="/".join(map(str, path[:-1]))) for path in outer),
        tuple(Link(rate) for rate in rates),
    )


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(graphs(most=8, chain=True), st.integers(1, 4), RATES, st.sampled_from([1, 8]))
def test_one_level_equals_the_recurrence(graph, count, rate, update_interval):
    found = hierarchical(graph, hosts([count], [rate]), Limits(update_interval=update_interval))
    assert found.bottleneck_s == pytest.approx(recurrence(graph, [(count, rate)], update_interval), rel=NEAR, abs=1e-11)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    graphs(most=7, chain=True),
    st.lists(st.integers(2, 3), min_size=2, max_size=3),
    st.lists(RATES, min_size=3, max_size=3),
)
def test_levels_equal_the_recurrence(graph, sizes, rates):
    levels = list(zip(sizes, rates, strict=False))
    found = hierarchical(graph, hosts(sizes, rates[: len(sizes)]), Limits())
    flat = [(math.prod(sizes), min(rate for _, rate in levels))]
    expected = min(recurrence(graph, levels), recurrence(graph, flat))
    assert found.bottleneck_s == pytest.approx(expected, rel=NEAR, abs=1e-11)


def compositions(total: int, parts: int):
    """Positive numbers, in order, that add up to at most ``total``."""
    return (c for c in itertools.product(range(1, total + 1), repeat=parts) if sum(c) <= total)


def every_choice(graph: ModelGraph, count: int, memory_bytes: int | None, rate: float, bounds: Limits) -> float:
    """Equal devices on one level: every cut with every number of replicas."""
    best = math.inf
    size = len(graph.nodes)
    for parts in range(1, min(count, size) + 1):
        for cuts in itertools.combinations(graph.cut_positions(), parts - 1):
            ends = [0, *cuts, size]
            for replicas in compositions(count, parts):
                worst = 0.0
                for s, (first, last) in enumerate(itertools.pairwise(ends)):
                    depth = math.ceil(sum(replicas[s:]) / replicas[s])
                    need = stage_bytes(graph, list(range(first, last)), bounds.memory, depth)
                    if memory_bytes is not None and need > memory_bytes:
                        worst = math.inf
                    busy = sum(n.busy_s for n in graph.nodes[first:last])
                    sync = all_reduce_s(graph, first, last, replicas[s], rate)
                    crossing = (
                        (graph.nodes[last - 1].cut_bytes or 0) * bounds.memory.microbatch_size if last < size else 0
                    )
                    worst = max(worst, max(busy, sync) / replicas[s], 2 * crossing / rate)
                best = min(best, worst)
    return best


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    graphs(most=6, chain=True),
    st.integers(1, 4),
    st.none() | st.integers(4, 30) | st.integers(10, 60),
    RATES,
    limits(exact=False),
)
def test_one_level_with_memory_is_the_best_of_every_choice(graph, count, memory_bytes, rate, bounds):
    cluster = Cluster.uniform(count, memory_bytes=memory_bytes, bandwidth_bytes_s=rate)
    expected = every_choice(graph, count, memory_bytes, rate, bounds)
    if math.isinf(expected):
        with pytest.raises(PlanError, match="nearest one, stage"):
            hierarchical(graph, cluster, bounds)
        return
    found = hierarchical(graph, cluster, bounds)
    assert found.bottleneck_s == pytest.approx(expected, rel=NEAR, abs=1e-11)
    assert all(
        memory_bytes is None or s.memory_bytes - messages(found, s, bounds) <= memory_bytes for s in found.stages
    )


def messages(found, stage, bounds: Limits) -> int:
    """Bytes of the boundary messages, which the solvers leave to ``fit``."""
    after = found.stages[stage.index + 1].input_bytes if stage.index + 1 < found.num_stages else 0
    workers = [max(1, len(s.devices)) for s in found.stages]
    depth = math.ceil(sum(workers[stage.index :]) / workers[stage.index])
    slots, held = bounds.memory.message_slots, in_flight(bounds.memory, depth)
    return bounds.memory.microbatch_size * (stage.input_bytes * (slots + held) + after * slots)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    graphs(most=12, chain=True),
    st.integers(1, 3),
    st.integers(1, 3),
    st.none() | st.integers(20, 90),
    RATES,
    RATES,
    limits(exact=False),
)
def test_without_replicas_it_is_the_straight_pipeline(
    graph, num_hosts, per_host, memory_bytes, inside, between, bounds
):
    inside = max(inside, between)  # a level with slower links inside would be left out by the straight solver too
    device = Device(memory_bytes=memory_bytes)
    cluster = Cluster.hosts(num_hosts, per_host, inside=Link(inside), between=Link(between), device=device)
    straight = Limits(memory=bounds.memory, max_replicas=1)
    try:
        expected = prefix_sum(graph, cluster, straight).bottleneck_s
    except PlanError:
        with pytest.raises(PlanError):
            hierarchical(graph, cluster, straight)
        return
    assert hierarchical(graph, cluster, straight).bottleneck_s == pytest.approx(expected, rel=NEAR)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    graphs(most=10, chain=True),
    st.lists(
        st.builds(Device, speed=st.sampled_from([0.5, 1.0]), memory_bytes=st.none() | st.just(50)),
        min_size=2,
        max_size=4,
    ),
    RATES,
    limits(exact=False),
)
def test_one_more_device_never_makes_it_worse(graph, rows, rate, bounds):
    def period(devices: list[Device]) -> float:
        try:
            return hierarchical(graph, Cluster(tuple(devices), (Link(rate),)), bounds).bottleneck_s
        except PlanError:
            return math.inf

    assert period(rows) <= period(rows[1:]) * (1 + NEAR)


def test_plain_data_parallelism_where_it_wins() -> None:
    """Many seconds, few weights: what PipeDream's table shows for ResNet-50."""
    graph = chain_of([7, 1, 5, 2], params=1, cut=900)
    found = hierarchical(graph, Cluster.uniform(4, bandwidth_bytes_s=1e6), Limits())
    assert [s.devices for s in found.stages] == [(0, 1, 2, 3)]
    assert found.bottleneck_s == pytest.approx(graph.busy_s / 4)
    assert "plain data parallelism" in found.reason


def test_replicated_front_and_single_back_where_the_weights_are_at_the_end() -> None:
    """VGG's shape: convolutions take the time, the head holds the weights. The table's configuration is 15-1."""
    nodes = [node(i, 10, params=10, cut=100) for i in range(15)] + [node(15, 10, params=10**6, cut=0)]
    found = hierarchical(ModelGraph(tuple(nodes)), Cluster.uniform(16, bandwidth_bytes_s=1e6), Limits())
    assert [len(s.devices) for s in found.stages] == [15, 1]
    assert "workers by stage: 15, 1" in found.reason


def test_a_stage_may_take_a_part_of_the_hosts() -> None:
    """PipeDream's own table has 15-1 on four hosts of four, whose recurrence gives stages whole hosts."""
    nodes = [node(i, 10, params=10, cut=100) for i in range(15)] + [node(15, 10, params=10**6, cut=0)]
    cluster = Cluster.hosts(4, 4, inside=Link(1e7), between=Link(1e6))
    found = hierarchical(ModelGraph(tuple(nodes)), cluster, Limits())
    assert [len(s.devices) for s in found.stages] == [15, 1]


def test_a_number_of_stages_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"num_stages=2 cannot be kept"):
        hierarchical(chain_of([1, 1]), Cluster.uniform(2), Limits(2))


def test_micro_batches_in_flight_count_the_workers_behind() -> None:
    """Two replicas before one worker hold ceil(3 / 2) micro-batches each."""
    graph = ModelGraph((node(0, 20, kept=10, cut=0), node(1, 10, params=10**6, kept=10, cut=0)))
    memory = MemoryModel(ScheduleSpec("1f1b", num_microbatches=8), optimizer_factor=0.0)
    found = hierarchical(graph, Cluster.uniform(3, bandwidth_bytes_s=1e6), Limits(memory=memory))
    assert [len(s.devices) for s in found.stages] == [2, 1]
    assert found.stages[0].memory_bytes == 20


def test_more_replicas_hold_fewer_micro_batches_each() -> None:
    """A stage of one node keeps 10 bytes per micro-batch in flight: 3 alone before two workers, 1 as three replicas."""
    nodes = [node(i, 10, kept=10) for i in range(3)]
    memory = MemoryModel(ScheduleSpec("1f1b", num_microbatches=8))
    straight = hierarchical(ModelGraph(tuple(nodes)), Cluster.uniform(3), Limits(memory=memory, max_replicas=1))
    assert [s.memory_bytes for s in straight.stages] == [30, 20, 10]
    found = hierarchical(
        ModelGraph(tuple(nodes)), Cluster.uniform(3, memory_bytes=29), Limits(memory=memory, max_replicas=1)
    )
    assert found.num_stages == 2  # three stages would need 30 bytes
    replicated = hierarchical(ModelGraph(tuple(nodes)), Cluster.uniform(3, memory_bytes=30), Limits(memory=memory))
    assert [(len(s.devices), s.memory_bytes) for s in replicated.stages] == [(3, 30)]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(graphs(most=8, chain=True), st.integers(2, 3), st.integers(2, 3), st.integers(4, 60), RATES, limits(exact=False))
def test_limits_are_kept_on_hosts(graph, num_hosts, per_host, memory_bytes, between, bounds):
    device = Device(memory_bytes=memory_bytes)
    cluster = Cluster.hosts(num_hosts, per_host, inside=Link(), between=Link(between), device=device)
    try:
        found = hierarchical(graph, cluster, bounds)
    except PlanError:
        return
    assert all(s.memory_bytes - messages(found, s, bounds) <= memory_bytes for s in found.stages)
    used = [i for stage in found.stages for i in stage.devices]
    assert len(set(used)) == len(used)
    assert [s.start for s in found.stages] == [0, *(s.stop for s in found.stages[:-1])]
    assert found.stages[-1].stop == len(graph.nodes)


def test_replicas_share_the_micro_batches_in_flight() -> None:
    """2-1-1: each of the two in front holds ceil(4 / 2) = 2 micro-batches of 10^6 bytes, and not 3."""
    nodes = [node(0, 20, kept=10**6), node(1, 10, params=10**6), node(2, 10, params=10**6)]
    memory = MemoryModel(ScheduleSpec("1f1b", num_microbatches=8), optimizer_factor=0.0, gradient_factor=0.0)
    cluster = Cluster.uniform(4, bandwidth_bytes_s=1e6, memory_bytes=2 * 10**6)
    found = hierarchical(ModelGraph(tuple(nodes)), cluster, Limits(memory=memory))
    assert [(len(s.devices), s.memory_bytes) for s in found.stages] == [(2, 2 * 10**6), (1, 10**6), (1, 10**6)]
