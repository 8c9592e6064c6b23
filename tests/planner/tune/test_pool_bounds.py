"""Bounds are never above what simulation says, and bytes are those of the memory model."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import ModelGraph, Node
from raypipe.planner.partition.answer import cut_at
from raypipe.planner.partition.fit import memory_of
from raypipe.planner.partition.limits import Limits
from raypipe.planner.search.replay import equal_messages_s
from raypipe.planner.tune.pool import all_cuts
from raypipe.planner.tune.pool_bounds import cut_costs, least_s, stage_bytes
from raypipe.planner.tune.predict import costs_of, hops_of, stages_of
from raypipe.planner.tune.request import Request
from raypipe.planner.tune.resolve import memory_model, spec_of

REQUEST = Request(None, None, (), 64, None, num_samples=1000)


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
    request = dataclasses.replace(REQUEST, schedule=schedule, slack=3 if schedule == "slack" else None)
    model, cuts = memory_model(request, stages, count, size), all_cuts(graph, stages)
    assert cuts is not None
    costs = cut_costs(graph, cluster, cuts, size)
    depths = range(stages, 0, -1)
    in_flight, sets = (np.array([of(d) for d in depths]) for of in (model.in_flight, model.activation_sets))
    nbytes = stage_bytes(costs, model, in_flight, sets, np.array([model.message_slots]))
    bounds_s = least_s(costs, count, in_flight, splits=request.kind.splits_backward)
    limits = Limits(num_stages=stages, memory=model)
    for cut in range(len(cuts)):
        partition = cut_at(graph, cluster, limits, costs.positions[cut].tolist(), "test")
        expected = costs_of(stages_of(graph, partition, cluster, limits), hops_of(partition, cluster, size))
        found = costs.of(cut)
        for name in ("forward_s", "backward_s", "forward_occupancy_s", "backward_latency_s"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name))
        first = int(costs.first[cut])
        assert found.backward_weight_s[first:] == pytest.approx(expected.backward_weight_s[first:])
        assert nbytes[cut].tolist() == [stage.total_bytes for stage in memory_of(graph, partition, model)]
        step_s = equal_messages_s(spec_of(request, stages, count, first), found)
        assert bounds_s[cut] <= step_s
