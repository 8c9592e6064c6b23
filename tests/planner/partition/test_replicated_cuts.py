"""Cuts for stages of several workers, which share the seconds and sum the gradients of their parameters."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, Device, Link
from raypipe.ir.graph import ModelGraph
from raypipe.planner.partition.antichain import antichain
from raypipe.planner.partition.limits import Limits
from raypipe.planner.partition.prefix_sum import prefix_sum
from tests.planner.partition_cases import NEAR, TICK, assignments, graphs, limits, period_of


@st.composite
def groups(draw: st.DrawFn) -> tuple[Cluster, tuple[float, ...]]:
    """Devices that stand for several workers each, and what a byte of parameters costs these to sum."""
    counts = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    devices = tuple(Device(f"stage {i}", speed=float(count)) for i, count in enumerate(counts))
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
