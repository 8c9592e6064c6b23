"""What is left to the planner is decided within every limit, and what the user said is kept."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, ComputeDevice, Link
from raypipe.ir.graph import ModelGraph, Node, link_nodes
from raypipe.ir.plan import Plan
from raypipe.ir.profile import Profile
from raypipe.planner.cost.memory import MemoryModel
from raypipe.planner.partition.costs import Limits
from raypipe.planner.partition.fit import memory_of
from raypipe.planner.search import Decision, Request, decide, plan_of, profile_table, timeline_of
from raypipe.planner.search.refusal import least_bytes
from tests.planner.partition_cases import chain_of, clusters, cut_at, graphs
from tests.planner.specs import spec_for

GOLDEN = Path(__file__).parents[1] / "golden"
REQUEST = Request(None, None, (), None, None, num_samples=1000)
MIB = 1 << 20


def op(index: int, *, milliseconds: float = 1.0, params: int = MIB, kept: int = 1 << 16, output: int = 4096) -> Node:
    third = milliseconds / 3e3
    return Node(
        f"op{index}", f"layers.{index}", (), params, output, third, third, third,
        activation_bytes=kept, output_bytes=output, source="measured",
    )  # fmt: skip


def chain(size: int, **of: float) -> Profile:
    """Seconds at 4 samples, and a curve that agrees: t(b) = total (b + 2) / 6."""
    graph = ModelGraph(tuple(op(i, **of) for i in range(size)))
    return Profile(graph, 4, tuple((b, graph.busy_s * (b + 2) / 6) for b in (1, 2, 4, 8)))


def rented(count: int, *, memory: int | None = None, gbit_s: float = math.inf, latency_s: float = 0.0) -> Cluster:
    between = Link(gbit_s * 1e9 / 8, latency_s)
    return Cluster.hosts(count, 1, inside=Link(), between=between, device=ComputeDevice("gpu", 1.0, memory))


@st.composite
def requests(draw: st.DrawFn) -> Request:
    minibatch = draw(st.sampled_from([6, 8, 12]))
    return dataclasses.replace(
        REQUEST,
        minibatch_size=minibatch,
        num_stages=draw(st.none() | st.integers(1, 3)),
        num_microbatches=draw(st.none() | st.sampled_from([1, 2, 6] if minibatch != 8 else [1, 2, 4, 8])),
        schedule=draw(st.sampled_from(["auto", "1f1b", "gpipe", "kfkb", "slack"])),
        partitioner=draw(st.sampled_from(["auto", "prefix_sum", "antichain"])),
        memory_limit_bytes=draw(st.none() | st.integers(20, 400)),
        optimizer_factor=draw(st.sampled_from([0.0, 2.0])),
        num_samples=draw(st.integers(12, 48)),
        least_microbatch=draw(st.integers(1, 3)),
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(graphs(), clusters(), requests(), st.booleans())
def test_a_plan_keeps_every_limit_and_every_word_of_the_request(
    graph: ModelGraph, cluster: Cluster, request: Request, curve: bool
) -> None:
    points = tuple((b, graph.busy_s * (b + 1) / 3) for b in (1, 2, 4)) if curve else ()
    try:
        decision = decide(request, Profile(graph, 2, points), cluster)
    except PlanError:
        return  # the refusals have tests of their own
    plan = plan_of(decision)
    stages, prediction = plan.partition.stages, plan.prediction
    assert prediction is not None
    assert sorted(i for s in stages for i in plan.partition.nodes_of(s)) == list(range(len(graph.nodes)))
    assert request.num_stages in (None, len(stages))
    assert plan.minibatch_size == request.minibatch_size
    if request.num_microbatches is not None:
        assert plan.num_microbatches == request.num_microbatches
    else:
        assert request.takes(plan.minibatch_size, plan.microbatch_size)
    if request.schedule not in ("auto", "slack", "kfkb"):
        assert plan.schedule.kind == request.schedule
    for stage, promised in zip(
        memory_of(graph, plan.partition, decision.limits.memory), prediction.stages, strict=True
    ):
        assert stage.total_bytes == promised.memory_bytes
        assert promised.limit_bytes is None or promised.memory_bytes <= promised.limit_bytes
        assert request.memory_limit_bytes is None or promised.memory_bytes <= request.memory_limit_bytes
    used = [device for s in stages for device in s.devices]
    assert len(used) == len(set(used)) <= len(cluster.devices)
    drawn_s = timeline_of(plan).makespan_s
    if plan.schedule.wiring.norm_per_stage:  # two steps that overlap
        assert prediction.step_s * (1 - 1e-9) <= drawn_s
    else:
        assert drawn_s == pytest.approx(prediction.step_s, rel=1e-9)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.explain() == plan.explain()  # so every number of the table is in the JSON
    earlier = {**json.loads(plan.to_json()), "transport": "tcp"}  # of an earlier release
    assert Plan.from_json(json.dumps(earlier)) == plan


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=7), st.integers(1, 4), st.sampled_from([0.1, 1.0, 10.0]))
def test_no_other_number_of_stages_is_predicted_to_be_faster(ticks: list[int], workers: int, gbit_s: float) -> None:
    graph = chain_of(ticks, params=8, kept=2, cut=100_000)
    profiled = Profile(graph, 4, tuple((b, graph.busy_s * (b + 1) / 5) for b in (1, 2, 4)))
    cluster = rented(workers, gbit_s=gbit_s)
    request = dataclasses.replace(REQUEST, minibatch_size=8)
    free = decide(request, profiled, cluster)
    for stages in range(1, min(workers, len(ticks)) + 1):
        given_so_many = decide(dataclasses.replace(request, num_stages=stages), profiled, cluster)
        assert free.prediction.step_s <= given_so_many.prediction.step_s * 1.0051


def test_nothing_offered_is_two_stages() -> None:
    decision = decide(REQUEST, chain(12))
    assert decision.partition.num_stages == 2
    assert dict(decision.reasons)["stages"].startswith("2 stages by default")


def test_more_stages_than_workers_are_refused_by_number() -> None:
    with pytest.raises(PlanError, match="4 stages, but scaling_config offers 2 workers"):
        decide(dataclasses.replace(REQUEST, num_workers=2, num_stages=4), chain(12))


def test_split_points_are_kept_and_get_their_seconds() -> None:
    request = dataclasses.replace(REQUEST, split_points=("layers.3",))
    plan = plan_of(decide(request, chain(12)))
    assert plan.partition.cuts == (3,)
    assert plan.prediction is not None
    assert plan.prediction.stages[1].busy_s == pytest.approx(3 * plan.prediction.stages[0].busy_s)


def test_equal_parameters_stay_what_they_are_under_a_limit() -> None:
    graph = ModelGraph(tuple(op(i, milliseconds=1 + 9 * (i == 0), params=MIB) for i in range(8)))
    request = dataclasses.replace(REQUEST, partitioner="parameters", num_stages=2, memory_limit_bytes=1 << 30)
    assert decide(request, Profile(graph, 4)).partition.cuts == (4,)
    assert decide(dataclasses.replace(request, partitioner="auto"), Profile(graph, 4)).partition.cuts != (4,)
    with pytest.raises(PlanError, match=r"Stage 0 needs .* at 0F"):
        decide(dataclasses.replace(request, memory_limit_bytes=10 * MIB), Profile(graph, 4))


def branching() -> ModelGraph:
    """a feeds two arms of three; in their own order the arms take turns."""
    nodes = [op(0), *(op(i, output=1 << 20) for i in range(1, 7)), op(7)]
    edges = [(0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 7), (6, 7)]
    return link_nodes(nodes, edges)


def test_auto_takes_another_order_only_where_that_is_faster() -> None:
    found = {}
    for name in ("auto", "prefix_sum", "antichain"):
        request = dataclasses.replace(REQUEST, partitioner=name, num_stages=3, num_microbatches=4)
        found[name] = decide(request, Profile(branching(), 8), rented(3, gbit_s=8 * 8 * 2)).partition
    assert found["auto"].bottleneck_s == min(p.bottleneck_s for p in found.values())
    plain = decide(dataclasses.replace(REQUEST, num_stages=3), chain(12)).partition
    assert plain.order == ()
    assert plain.reason.endswith("found by comparing all cuts by simulation")


def test_memory_decides_the_micro_batches_and_says_so() -> None:
    request = dataclasses.replace(REQUEST, minibatch_size=64, num_stages=4)
    free = decide(request, chain(8, kept=MIB))
    limit = 9 * MIB + (free.partition.stages[0].memory_bytes - 9 * MIB) // 4
    tight = decide(dataclasses.replace(request, memory_limit_bytes=limit), chain(8, kept=MIB))
    assert tight.num_microbatches > free.num_microbatches
    assert tight.prediction.decided_by == "memory"
    assert "would be faster but do not fit into memory" in dict(tight.reasons)["micro-batches"]
    assert {point.refused for point in tight.prediction.curve} == {"", "memory"}
    assert all(stage.memory_bytes <= limit for stage in tight.prediction.stages)


def test_slack_goes_before_a_plan_is_refused() -> None:
    """Of four nodes none can move to another stage."""
    request = dataclasses.replace(REQUEST, minibatch_size=8, num_microbatches=8, num_stages=4)
    with_slack = decide(request, chain(4, kept=MIB))
    assert with_slack.request.schedule == "slack"
    limit = with_slack.prediction.stages[0].memory_bytes - 1
    assert decide(dataclasses.replace(request, memory_limit_bytes=limit), chain(4, kept=MIB)).request.schedule == "1f1b"


@pytest.mark.slow
def test_a_refusal_names_stage_action_numbers_and_what_would_do() -> None:
    request = dataclasses.replace(REQUEST, minibatch_size=8)
    with pytest.raises(PlanError) as caught:
        decide(request, chain(12), rented(2, memory=10 * MIB))
    text = str(caught.value)
    for words in ("stage ", "10.0 MiB", "weights x 1", "1f1b", "workers of 10.0 MiB", "2 workers of "):
        assert words in text, text
    number = int(text.split(" workers of 10.0 MiB")[0].split()[-1])
    assert decide(request, chain(12), rented(number, memory=10 * MIB)).partition.num_stages <= number
    with pytest.raises(PlanError):
        decide(request, chain(12), rented(number - 1, memory=10 * MIB))


def test_given_micro_batches_that_do_not_fit_name_the_nearest_plan() -> None:
    request = dataclasses.replace(REQUEST, minibatch_size=64, num_microbatches=2, num_stages=4)
    with pytest.raises(PlanError, match=r"The nearest plan that fits: schedule 1f1b, 64 micro-batches of 1, 4 stages"):
        decide(dataclasses.replace(request, memory_limit_bytes=20 * MIB), chain(8, kept=MIB))


def test_slow_links_get_slack_where_they_are_slow_and_assumed_ones_change_nothing() -> None:
    request = dataclasses.replace(REQUEST, minibatch_size=64, num_microbatches=32, num_stages=2)
    assert decide(request, chain(2)).request.slack == 2
    slow = decide(request, chain(2), rented(2, latency_s=2e-3))
    assert isinstance(slow.request.slack, int)
    assert slow.request.slack > 2
    assert slow.prediction.one_f_one_b_s is not None
    assert slow.prediction.one_f_one_b_s > slow.prediction.step_s * 1.5
    asked = decide(dataclasses.replace(request, schedule="1f1b"), chain(2), rented(2, latency_s=2e-3))
    assert asked.prediction.one_f_one_b_s is None
    assert asked.prediction.bound.startswith("stages wait for messages")


@given(st.integers(1, 30), st.integers(1, 90), st.integers(1, 40), st.integers(1, 5))
def test_a_model_takes_what_no_cut_of_an_epoch_makes_too_small(
    minibatch: int, samples: int, size: int, least: int
) -> None:
    """Two mini-batches of the epoch are compared with their cuts: a whole one and the last one."""
    request = dataclasses.replace(REQUEST, num_samples=samples, least_microbatch=least)
    epoch = [range(samples)[at : at + minibatch] for at in range(0, samples, minibatch)]
    too_small = [
        part
        for whole in (range(minibatch), *epoch)
        for at in range(0, len(whole), size)
        if len(part := whole[at : at + size]) < min(least, len(whole))
    ]
    assert request.takes(minibatch, size) == (not too_small)
    smallest = request.smallest_microbatch(minibatch)
    assert request.takes(minibatch, smallest)
    assert not any(request.takes(minibatch, smaller) for smaller in range(1, smallest))


@pytest.mark.parametrize("schedule", ["auto", "1f1b", "2bw", "pipedream"])
@pytest.mark.parametrize("replicas", [1, (2, 1)])
def test_nothing_too_small_is_left_of_an_epoch(schedule: str, replicas: int | tuple[int, int]) -> None:
    """27 samples in mini-batches of 24: micro-batches of 2 would leave a single one."""
    request = dataclasses.replace(
        REQUEST, minibatch_size=24, num_stages=2, num_samples=27, schedule=schedule, least_microbatch=2,
        replicas=replicas, memory_limit_bytes=None,
    )  # fmt: skip
    decision = decide(request, chain(4))
    assert request.takes(24, decision.microbatch_size)


@settings(max_examples=60, deadline=None)
@given(
    graphs(), st.sampled_from(["gpipe", "1f1b", "slack", "kfkb"]), st.integers(1, 3), st.integers(1, 6), st.booleans()
)
def test_the_least_bytes_are_those_of_the_fullest_stage_of_the_best_cut(
    graph: ModelGraph, schedule: str, size: int, count: int, recompute: bool
) -> None:
    places = graph.cut_positions()
    most = min(3, len(places) + 1)
    model = MemoryModel(spec_for(schedule, 3, count, group_size=2, slack=2), size, recompute=recompute)
    for stages, found in enumerate(least_bytes(graph, model, most), 1):
        cluster, limits = Cluster.uniform(stages), Limits(num_stages=stages, memory=model)
        cuts = itertools.combinations(places, stages - 1)
        partitions = [cut_at(graph, cluster, limits, [0, *cut, len(graph.nodes)]) for cut in cuts]
        assert found == min(max(m.total_bytes for m in memory_of(graph, each, model)) for each in partitions)


@pytest.mark.parametrize("seed", range(4))
def test_a_refusal_names_the_least_memory_with_which_a_plan_is_found(seed: int) -> None:
    drawn = random.Random(seed)
    nodes = [
        op(i, params=drawn.randrange(1, 9) * MIB, kept=drawn.randrange(1, 9) << 18, output=drawn.randrange(1, 9) << 17)
        for i in range(7)
    ]
    graph = ModelGraph(tuple(nodes))
    profile = Profile(graph, 4, tuple((b, graph.busy_s * (b + 2) / 6) for b in (1, 2, 4, 8)))
    request = dataclasses.replace(REQUEST, minibatch_size=8, recompute=drawn.choice([False, None]))
    with pytest.raises(PlanError) as caught:
        decide(request, profile, rented(3, memory=20 * MIB))
    named = float(re.search(r"3 workers of ([\d.]+) MiB", str(caught.value))[1])
    assert decide(request, profile, rented(3, memory=int((named + 0.06) * MIB)))
    with pytest.raises(PlanError):
        decide(request, profile, rented(3, memory=int((named - 0.06) * MIB)))


def test_a_profile_reads_back_and_as_a_table() -> None:
    profiled = chain(3)
    assert Profile.from_json(profiled.to_json()) == profiled
    text = profile_table(profiled)
    assert "whole model, 3 operations" in text
    assert "micro-batch of 4; seconds measured" in text
    assert "b samples take about 500 us x (b + 2), at most 0% beside" in text
    with pytest.raises(PlanError, match="not a saved profile"):
        Profile.from_json("{}")


def test_the_table_of_a_described_cluster() -> None:
    decision = decide(
        dataclasses.replace(REQUEST, minibatch_size=32),
        chain(6, output=1 << 18),
        rented(3, memory=64 * MIB, gbit_s=25, latency_s=2e-5),
    )
    assert plan_of(decision).explain() + "\n" == (GOLDEN / "plan_3_workers.txt").read_text()


@settings(max_examples=5, deadline=None)
@given(st.integers(2, 6), st.integers(1, 3))
def test_a_long_chain_gets_a_cut_of_all_its_nodes(factor: int, workers: int) -> None:
    decision: Decision = decide(dataclasses.replace(REQUEST, num_workers=workers), chain(401 + factor))
    assert decision.partition.stages[-1].stop == 401 + factor
    assert all(a.stop == b.start for a, b in itertools.pairwise(decision.partition.stages))
