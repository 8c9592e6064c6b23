"""Search over all cuts and orders of devices: bounds, bytes, and no richer cluster is slower."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, ComputeDevice, Link
from raypipe.ir.graph import ModelGraph, Node
from raypipe.ir.profile import Profile
from raypipe.planner.partition.answer import cut_at
from raypipe.planner.partition.costs import Limits
from raypipe.planner.partition.fit import memory_of
from raypipe.planner.replay import equal_messages_s
from raypipe.planner.search import Request, decide
from raypipe.planner.search.cut_costs import MOST_CUTS, stage_bytes
from raypipe.planner.search.predict import costs_of, hops_of, stages_of
from raypipe.planner.search.problem import Problem
from raypipe.planner.search.request_schedule import memory_model, spec_of
from raypipe.planner.search.shape_search import ShapeSearch

MIB = 1 << 20
REQUEST = Request(None, None, (), 48, None, num_samples=1000)
MEMORY_MIB, GBIT_S, DEVICES = (16, 32, 48), (0.3, 3.0), (2, 4)


def chain(drawn: random.Random) -> Profile:
    nodes = []
    for i in range(drawn.choice([4, 6, 7])):
        third, kept = drawn.choice([0.01, 0.02, 0.03]), drawn.choice([64, 256, 512]) << 10
        output = drawn.choice([16, 64, 256]) << 10
        nodes.append(
            Node(
                f"op{i}", "", (), drawn.choice([1, 2]) * MIB, output, third, third, third,
                activation_bytes=kept, output_bytes=output, source="measured",
            )
        )  # fmt: skip
    graph, overhead = ModelGraph(tuple(nodes)), drawn.choice([0.5, 2.0, 8.0])
    return Profile(graph, 8, tuple((b, graph.busy_s * (b + overhead) / (8 + overhead)) for b in (1, 2, 4, 8, 16)))


def step_s(request: Request, profile: Profile, memory_mib: int, gbit_s: float, devices: int) -> float:
    cluster = Cluster(
        tuple(ComputeDevice(f"gpu{i}", 1.0, memory_mib * MIB) for i in range(devices)), (Link(gbit_s / 8 * 1e9, 1e-4),)
    )
    try:
        return decide(request, profile, cluster).prediction.step_s
    except PlanError:
        return math.inf


@pytest.mark.parametrize(("seed", "schedule"), [(0, "auto"), (1, "auto"), (2, "1f1b")])
def test_a_richer_cluster_is_never_slower(seed: int, schedule: str) -> None:
    profile = chain(random.Random(seed))
    request = dataclasses.replace(REQUEST, schedule=schedule)
    grid = itertools.product(MEMORY_MIB, GBIT_S, DEVICES)
    steps_s = {each: step_s(request, profile, *each) for each in grid}
    assert min(steps_s.values()) < math.inf
    for poor, rich in itertools.permutations(steps_s, 2):
        if all(a <= b for a, b in zip(poor, rich, strict=True)):
            assert steps_s[rich] <= steps_s[poor] * 1.01, (poor, rich)


BOUND_REQUEST = Request(None, None, (), 64, None, num_samples=1000)


def graph_of(drawn: random.Random) -> ModelGraph:
    nodes = []
    for i in range(drawn.randint(3, 6)):
        forward_s, input_s, weight_s = (drawn.uniform(0.1, 1) for _ in range(3))
        params, frozen = drawn.randrange(1, 1000), drawn.random() < 0.3
        nodes.append(
            Node(
                f"op{i}", "", (), params, drawn.randrange(1, 9000), forward_s, input_s, weight_s,
                activation_bytes=drawn.randrange(1000), output_bytes=8, frozen_bytes=params if frozen else 0,
            )
        )  # fmt: skip
    return ModelGraph(tuple(nodes))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "kfkb", "slack", "zb-h1"])
@pytest.mark.parametrize("seed", range(6))
def test_cuts_cost_and_hold_what_they_do_one_by_one(schedule: str, seed: int) -> None:
    drawn = random.Random(seed)
    graph, stages, count, size = graph_of(drawn), drawn.randint(1, 3), drawn.randint(1, 9), drawn.randint(1, 4)
    cluster = Cluster.uniform(stages, bandwidth_bytes_s=drawn.choice([3e3, 3e4, 3e6]))
    request = dataclasses.replace(
        BOUND_REQUEST, schedule=schedule, slack=3 if schedule == "slack" else None, num_microbatches=count
    )
    model = memory_model(request, stages, count, size)
    search = ShapeSearch(Problem(request, Profile(graph, size), cluster, described=True))
    ((groups, cuts, _, _),) = search._cells((1,) * stages, MOST_CUTS)
    placed = search._placed(groups, cuts, count, size)
    depths = range(stages, 0, -1)
    in_flight, sets = (np.array([of(d) for d in depths]) for of in (model.in_flight, model.activation_sets))
    nbytes = stage_bytes(placed.costs, model, in_flight, sets, np.array([model.message_slots]))
    bounds_s = placed.least_s(request.kind, in_flight)
    limits = Limits(num_stages=stages, memory=model)
    for cut in range(len(cuts)):
        partition = cut_at(graph, cluster, limits, placed.costs.positions[cut].tolist(), "test")
        expected = costs_of(stages_of(graph, partition, cluster, limits), hops_of(partition, cluster, size))
        found = placed.of(cut)
        for name in ("forward_s", "backward_s", "forward_occupancy_s", "backward_latency_s"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name))
        first = int(placed.costs.first[cut])
        assert found.backward_weight_s[first:] == pytest.approx(expected.backward_weight_s[first:])
        assert nbytes[cut].tolist() == [stage.total_bytes for stage in memory_of(graph, partition, model)]
        step_s = equal_messages_s(spec_of(request, stages, count, first), found)
        assert bounds_s[cut] <= step_s
