"""Solvers against every assignment, and against each other."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, ComputeDevice, Link
from raypipe.ir.graph import ModelGraph, link_nodes
from raypipe.ir.plan import Partition
from raypipe.planner.partition.antichain import antichain
from raypipe.planner.partition.costs import Limits, least_feasible
from raypipe.planner.partition.prefix_sum import prefix_sum
from tests.planner.partition_cases import (
    NEAR,
    TICK,
    assignments,
    brute_force,
    chain_of,
    clusters,
    graphs,
    limits,
    node,
    period_of,
)


def solve(solver, graph: ModelGraph, cluster: Cluster, bounds: Limits) -> tuple[float, Partition | None]:
    """(period, partition), infinite where the solver refuses."""
    try:
        found = solver(graph, cluster, bounds)
    except PlanError:
        return math.inf, None
    return found.bottleneck_s, found


def check_valid(graph: ModelGraph, cluster: Cluster, bounds: Limits, found: Partition) -> None:
    """Every node in one stage, edges forward, limits kept, and the period is what it says."""
    order = found.order or tuple(range(len(graph.nodes)))
    assert sorted(order) == list(range(len(graph.nodes)))
    assert [s.start for s in found.stages] == [0, *(s.stop for s in found.stages[:-1])]
    assert found.stages[-1].stop == len(graph.nodes)
    assert all(s.start < s.stop for s in found.stages)
    stage_of = [0] * len(order)
    for stage in found.stages:
        for i in found.nodes_of(stage):
            stage_of[i] = stage.index
    assert all(stage_of[a] <= stage_of[b] for a, b in graph.edges or ())
    assert all(stage_of[a] == stage_of[b] for a, b in graph.together)
    places = tuple(stage.devices[0] for stage in found.stages)
    assert len(set(places)) == len(places)
    assert found.bottleneck_s == pytest.approx(period_of(graph, cluster, bounds, tuple(stage_of), places), rel=NEAR)


CHAINS, DAGS = graphs(chain=True), graphs(together=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solver", "drawn", "in_order"), [(prefix_sum, CHAINS, True), (prefix_sum, DAGS, True), (antichain, DAGS, False)]
)
@settings(max_examples=80, deadline=None)
@given(st.data(), clusters(), limits())
def test_no_cut_is_better(solver, drawn, in_order, data, cluster, bounds):
    """Of all cuts of the nodes in their own order, or of all assignments of them."""
    graph = data.draw(drawn)
    period, found = solve(solver, graph, cluster, bounds)
    assert period == pytest.approx(brute_force(graph, cluster, bounds, in_order=in_order), rel=NEAR)
    if found:
        check_valid(graph, cluster, bounds, found)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(graphs(most=24, chain=True), clusters(), limits())
def test_both_agree_on_chains(graph, cluster, bounds):
    assert solve(antichain, graph, cluster, bounds)[0] == pytest.approx(
        solve(prefix_sum, graph, cluster, bounds)[0], rel=NEAR
    )


def test_a_graph_that_branches_too_much_is_refused_with_the_way_out() -> None:
    graph = link_nodes([node(i, 1) for i in range(14)], [])
    with pytest.raises(PlanError, match=r"more than 1000 states.*prefix_sum"):
        antichain(graph, Cluster.uniform(2), Limits(max_states=1000))


def test_a_graph_without_seconds_is_refused() -> None:
    with pytest.raises(PlanError, match="profile the model first"):
        prefix_sum(chain_of([0, 0]), Cluster.uniform(2), Limits())


def test_too_many_stages_are_refused_with_the_most_there_can_be() -> None:
    with pytest.raises(PlanError, match=r"1 places to cut, and the cluster 4 devices. Set num_stages to at most 2"):
        prefix_sum(chain_of([1, 1]), Cluster.uniform(4), Limits(3))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "most_s"), [(1_000, 0.1), (10_000, 2.0)])
def test_long_chains_are_planned_in_time(size: int, most_s: float) -> None:
    """The bound of the requirement, in processor seconds, so that other work on the machine does not count."""
    ticks = [1 + (i * 7919) % 97 for i in range(size)]
    graph, cluster = chain_of(ticks, params=8, kept=8, cut=64), Cluster.uniform(8, memory_bytes=10**9)
    spent = []
    for _ in range(3):
        begin_s = time.process_time()
        prefix_sum(graph, cluster, Limits(8))
        spent.append(time.process_time() - begin_s)
    assert min(spent) < most_s


@st.composite
def groups(draw: st.DrawFn) -> tuple[Cluster, tuple[float, ...]]:
    """Devices that stand for several workers each, and what a byte of parameters costs these to sum."""
    counts = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    devices = tuple(ComputeDevice(f"stage {i}", speed=float(count)) for i, count in enumerate(counts))
    rate = draw(st.sampled_from([0.0, 0.25, 1.0, 4.0])) * TICK
    link = Link(draw(st.sampled_from([math.inf, 1024.0])))
    return Cluster(devices, (link,)), tuple(2 * (count - 1) / count * rate for count in counts)


def best_s(graph: ModelGraph, cluster: Cluster, bounds: Limits, *, in_order: bool) -> float:
    """The least period over every assignment of nodes to these stages."""
    places = tuple(range(len(cluster.devices)))
    found = math.inf
    for stage_of in assignments(graph, len(places), in_order=in_order):
        plain_s = period_of(graph, cluster, bounds, stage_of, places)
        for stage, rate in enumerate(bounds.sync_s_per_byte):
            nodes = [graph.nodes[i] for i, s in enumerate(stage_of) if s == stage]
            busy_s = sum(node.busy_s for node in nodes) / cluster.devices[stage].speed
            plain_s = max(plain_s, busy_s + rate * sum(node.param_bytes for node in nodes))
        found = min(found, plain_s)
    return found


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(graphs(together=True), groups(), limits(exact=False), st.booleans())
def test_no_other_cut_with_these_workers_is_better(
    graph: ModelGraph, workers: tuple[Cluster, tuple[float, ...]], bounds: Limits, in_order: bool
) -> None:
    cluster, rates = workers
    asked = dataclasses.replace(bounds, num_stages=len(cluster.devices), in_order=True, sync_s_per_byte=rates)
    try:
        found_s = (prefix_sum if in_order else antichain)(graph, cluster, asked).bottleneck_s
    except PlanError:
        found_s = math.inf
    assert found_s == pytest.approx(best_s(graph, cluster, asked, in_order=in_order), rel=NEAR)


@given(st.integers(-50, 5_000), st.integers(0, 5_000), st.integers(0, 300), st.integers(0, 300), st.booleans())
def test_the_least_is_found(lowest: int, more: int, leap: int, slack: int, told: bool) -> None:
    """With hints of any quality: ``leap`` short of the truth on one side, ``slack`` over it on the other."""
    highest = lowest + more
    threshold = lowest + (more * 2) // 3
    asked: list[int] = []

    def probe(number: int) -> int | None:
        asked.append(number)
        return number if number >= threshold else None

    hints = {
        "following": lambda number: max(number + 1, threshold - leap),
        "enough": lambda number: min(number, threshold + slack),
    }
    assert least_feasible(probe, lowest, highest, **(hints if told else {})) == (threshold, threshold)
    assert all(lowest <= number <= highest for number in asked)
    assert least_feasible(lambda number: None, lowest, highest, **(hints if told else {})) is None
