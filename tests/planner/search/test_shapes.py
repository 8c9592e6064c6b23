"""Replicas that are left to the planner: every shape is compared, and what is given is kept."""

from __future__ import annotations

import dataclasses

import pytest

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, ComputeDevice, Link
from raypipe.ir.communication import CodecCost
from raypipe.ir.graph import ModelGraph, link_nodes
from raypipe.ir.plan import Candidate, Plan
from raypipe.ir.profile import Profile
from raypipe.planner.cost.tolerance import EVEN
from raypipe.planner.search import Decision, decide, plan_of
from raypipe.planner.search.compare_shapes import shapes
from raypipe.planner.search.cut_costs import MOST_CUTS, cuts_into
from raypipe.planner.search.cut_search import ShapeSearch
from raypipe.planner.search.predict import schedule_step_s, seconds_of
from raypipe.planner.search.problem import Problem
from raypipe.planner.search.request import microbatches
from raypipe.planner.search.schedule_settings import spec_of
from raypipe.viz.plan_text import candidate_lines
from tests.planner.search.test_choose import MIB, REQUEST, chain, op, rented
from tests.planner.search.test_every_shape import drawn

OPEN = dataclasses.replace(REQUEST, replicas=None, minibatch_size=12, num_workers=4)


def test_every_shape_of_few_workers_once() -> None:
    """The picture of the module, and 2^(n - 1) compositions of n workers less the one without replicas."""
    found = shapes(4, 3)
    assert sorted(found) == sorted(
        [(2,), (3,), (4,), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (1, 1, 2), (1, 2, 1), (2, 1, 1)]
    )
    assert len(shapes(8, 8)) == sum(2 ** (n - 1) - 1 for n in range(1, 9))
    assert shapes(4, 3, num_stages=1) == [(4,), (3,), (2,)]
    assert all(max(shape) == 2 for shape in shapes(8, 8, most_each=2))
    assert {(15, 1), (2, 1, 1), (16,), (4, 4, 4, 4)} <= set(shapes(16, 9))


def test_more_workers_only_add_shapes() -> None:
    for workers in range(1, 20):
        assert set(shapes(workers, 6)) < set(shapes(workers + 1, 6))


def test_a_long_graph_is_cut_between_places_that_share_it_out() -> None:
    graph = ModelGraph(tuple(op(i, output=64 if i % 10 == 9 else 4096) for i in range(200)))
    cuts = cuts_into(graph, 3)
    assert cuts is not None
    assert len(cuts) <= MOST_CUTS
    assert set(range(10, 200, 10)) <= set(cuts[:, 1:-1].flatten().tolist()), "where least crosses"
    assert cuts_into(ModelGraph((op(0), op(1))), 3) is None


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "pipedream"])
def test_no_step_is_shorter_than_its_bound(schedule: str) -> None:
    """Of whole and of split backwards, whose parts for parameters lie beside what goes down."""
    codecs = (CodecCost("int8", 4.0, 2e-8, 3e-8), CodecCost("bf16", 2.0, 1e-10, 1e-10))
    request = dataclasses.replace(OPEN, schedule=schedule, recompute=False, codecs=codecs)
    for seed, shape in ((2, (3, 1)), (8, (2, 2)), (0, (2, 1))):
        profile = drawn(seed).profile
        nodes = tuple(dataclasses.replace(node, backward_weight_s=node.forward_s / 3) for node in profile.graph.nodes)
        profile = dataclasses.replace(profile, graph=ModelGraph(nodes))
        cluster = rented(4, gbit_s=10.0, latency_s=1e-4)
        search = ShapeSearch(Problem(request, profile, cluster, described=True))
        asked = search._options.request(shape)
        for cell in search._cells(shape, MOST_CUTS):
            placed = search._placed(*cell)
            for cut, bound_s in enumerate(placed.least_s(request.kind)):
                spec = spec_of(asked, len(shape), placed.number, int(placed.costs.first[cut]))
                assert bound_s <= schedule_step_s(spec, placed.of(cut))
        found = search.best(shape)
        assert found is not None
        assert found.prediction.step_s == pytest.approx(seconds_of(found)), "what is compared is what is predicted"


def heavy_end(parameters: int) -> Profile:
    """Four operations with the seconds, a fifth with the parameters: PipeDream's reason for 3-1."""
    nodes = [op(i, milliseconds=3.0, output=64 << 10) for i in range(4)]
    graph = ModelGraph((*nodes, op(4, milliseconds=3.0, params=parameters)))
    return Profile(graph, 4, tuple((b, graph.busy_s * b / 4) for b in (1, 2, 4, 8)))


def decided(profile: Profile, gbit_s: float, **more: object) -> Decision:
    request = dataclasses.replace(OPEN, minibatch_size=48, num_workers=None, **more)  # type: ignore[arg-type]
    return decide(request, profile, rented(4, gbit_s=gbit_s, latency_s=1e-4))


@pytest.mark.slow
def test_data_parallelism_where_links_are_quick_and_replicated_stages_where_parameters_are_many() -> None:
    quick = decided(chain(5, params=MIB // 4), 100.0)
    assert quick.partition.replicas == (4,)
    assert dict(quick.reasons)["replicas"].startswith("data parallelism on 4 workers")
    slow = decided(heavy_end(64 * MIB), 10.0)
    assert slow.partition.replicas == (3, 1)
    assert slow.partition.stages[1].first_node == "op4"
    assert "replicated stages on 3-1 workers, " in dict(slow.reasons)["replicas"]
    straight = decided(chain(12, params=64 * MIB), 0.1)
    assert straight.partition.replicas == (1, 1, 1, 1)
    assert straight.request.num_lanes(4) == 1, "plain PyTorch's order, for nothing is replicated"


@pytest.mark.slow
def test_the_plan_has_the_table_and_keeps_it() -> None:
    plan = plan_of(decided(heavy_end(64 * MIB), 10.0, memory_limit_bytes=264 * MIB))
    (chosen,) = [each for each in plan.candidates if each.chosen]
    others = [each for each in plan.candidates if not each.chosen]
    assert chosen.workers == plan.partition.replicas == (1, 1, 1)
    assert plan.prediction is not None
    assert chosen.step_s == pytest.approx(plan.prediction.step_s)
    assert all(each.refused or each.step_s * (1 + EVEN) >= chosen.step_s for each in others)
    refused = {each.workers: each.refused for each in others}
    assert refused[4,] == "stage 0 would need 272.3 MiB of 264.0 MiB"
    assert not refused[3, 1], "three micro-batches in three lanes are one sum of gradients on its last stage"
    text = str(plan)
    assert "candidates:\n  workers  kind" in text
    assert text.count("<- chosen") == 1
    again = Plan.from_json(plan.to_json())
    assert again.candidates == plan.candidates
    assert str(again) == text


def test_what_changes_buffers_stays_on_a_stage_of_one_worker() -> None:
    profile = chain(5, params=MIB // 4)
    found = decided(profile, 100.0, changing=(0,))
    assert len(found.partition.replicas) > 1
    assert found.partition.replicas[0] == 1
    everywhere = decided(profile, 100.0, changing=(0, 1, 2, 3, 4))
    assert max(everywhere.partition.replicas) == 1
    refused = {each.workers: each.refused for each in everywhere.candidates}
    assert refused[4,] == "a stage with several workers would change buffers in every forward"


@pytest.mark.slow
def test_what_is_given_is_kept() -> None:
    profile = chain(6)
    assert decided(profile, 10.0, num_stages=2).partition.num_stages == 2
    assert max(decided(profile, 100.0, lanes=2, schedule="1f1b").partition.replicas) == 2
    one_lane = decided(profile, 100.0, lanes=1, schedule="1f1b")
    assert max(one_lane.partition.replicas) == 1
    given = decided(profile, 100.0, num_microbatches=3)
    assert given.num_microbatches == 3
    for replicas in (None, (3, 1)):
        with pytest.raises(PlanError, match=r"stage . needs .* and \S+ offers"):
            decided(profile, 10.0, memory_limit_bytes=1000, num_stages=2, replicas=replicas)


def test_a_graph_with_branches_is_cut_in_another_order_with_replicas() -> None:
    """Two branches in turn: in the nodes' own order no cut leaves the parameters of both to the stage of one worker."""
    heavy = {1: 48 * MIB, 3: 48 * MIB}
    nodes = [op(i, milliseconds=3.0, output=256, params=heavy.get(i, 1 << 10)) for i in range(6)]
    graph = link_nodes(nodes, ((0, 1), (0, 2), (2, 3), (2, 4), (0, 4), (4, 5), (3, 5), (1, 5)))
    profile = Profile(graph, 4, tuple((b, graph.busy_s * b / 4) for b in (1, 2, 4, 8)))
    own = decided(profile, 10.0, replicas=(2, 1), num_stages=2, partitioner="prefix_sum")
    other = decided(profile, 10.0, replicas=(2, 1), num_stages=2, partitioner="antichain")
    assert other.prediction.step_s < own.prediction.step_s * 0.8
    order = other.partition.order
    assert {1, 3} <= set(order[other.partition.stages[1].start :])
    free = decided(profile, 10.0, num_stages=2)
    assert free.prediction.step_s <= other.prediction.step_s


def test_the_table_of_shapes() -> None:
    rows = [
        Candidate((3, 1), 0.0412, 53 * MIB, 6, 8, chosen=True),
        Candidate((4,), 0.058, int(61.5 * MIB), 4, 12),
        Candidate((1, 1, 1, 1), 0.0913, int(40.1 * MIB), 8, 6),
        Candidate((2, 2), refused="stage 1 would need 80.1 MiB of 64.0 MiB"),
    ]
    assert candidate_lines(rows) == [
        "candidates:",
        "  workers  kind               micro-batches     step    memory",
        "      3-1  replicated stages         6 of 8  41.2 ms  53.0 MiB  <- chosen",
        "        4  data parallelism         4 of 12    58 ms  61.5 MiB  41% longer",
        "  1-1-1-1  pipeline                  8 of 6  91.3 ms  40.1 MiB  2.2 times as long",
        "      2-2  replicated stages              -        -         -  stage 1 would need 80.1 MiB of 64.0 MiB",
    ]


def test_hosts_that_are_far_from_each_other_keep_replicas_inside() -> None:
    """Two levels of bandwidth: devices are taken in the cluster's order, and a stage pays for its slowest pair."""
    devices = tuple(ComputeDevice(f"gpu{i}", host=f"host{i // 2}") for i in range(4))
    cluster = Cluster(devices, (Link(1e10), Link(1e7)))
    profile = chain(4, params=4 * MIB, output=64)
    request = dataclasses.replace(OPEN, minibatch_size=48, num_workers=None)
    found = decide(request, profile, cluster)
    assert found.partition.replicas != (4,)
    for stage in found.partition.stages:
        assert len({devices[i].host for i in stage.devices}) == 1
    assert microbatches(found.request, found.partition.num_stages)[0] == 48
