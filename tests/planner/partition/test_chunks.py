"""Several stages per worker: who holds what, memory that the stages of a worker share, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, ComputeDevice, Link
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Plan, smallest_bubble
from raypipe.ir.profile import Profile
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.partition.chunks import in_chunks, stages_by_worker
from raypipe.planner.partition.costs import Limits
from raypipe.planner.partition.fit import memory_of
from raypipe.planner.partition.prefix_sum import prefix_sum
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.search import Request, decide, make_partition, make_plan, plan_of, timeline_of
from raypipe.planner.search.workers import settled_workers
from raypipe.planner.simulator import Costs, simulate
from tests.planner.partition_cases import TICK, chain_of, graphs, node
from tests.planner.search.test_choose import MIB, REQUEST, chain, rented
from tests.planner.test_row_memory import CHUNKED

V = (0, 1, 1, 0)
INTERLEAVED = dataclasses.replace(REQUEST, schedule="interleaved", minibatch_size=64)


def asked(kind: str = "interleaved", **values: object) -> Request:
    return dataclasses.replace(INTERLEAVED, schedule=kind, **values)


def bytes_by_worker(plan: Plan) -> list[int]:
    assert plan.prediction is not None
    held = [stage.memory_bytes for stage in plan.prediction.stages]
    return [sum(held[s] for s in stages) for stages in stages_by_worker(plan.schedule.wiring.placement)]


# How many stages on how many workers.


@pytest.mark.parametrize(
    ("stages", "workers", "devices", "expected"),
    [
        (None, 4, None, (8, 4)),
        (None, None, None, (4, 2)),
        (6, None, None, (6, 3)),
        (6, 2, None, (6, 2)),
        (4, 4, None, (4, 4)),
        (1, None, None, (1, 1)),
        (3, 1, None, (3, 1)),
        (None, None, 3, (6, 3)),
        (6, None, 3, (6, 3)),
        (6, None, 4, (6, 3)),
        (9, None, 4, (9, 3)),
        (4, None, 4, (4, 4)),
    ],
)
def test_stages_and_workers_follow_from_each_other(
    stages: int | None, workers: int | None, devices: int | None, expected: tuple[int, int]
) -> None:
    found = settled_workers(asked(num_stages=stages, num_workers=workers), 20, devices)
    assert (found.num_stages, found.num_workers) == expected
    assert settled_workers(found, 20) == found


def test_other_schedules_are_left_alone() -> None:
    request = asked("1f1b", num_stages=3, num_workers=2)
    assert settled_workers(request, 1) is request


def test_split_points_say_how_many_stages() -> None:
    request = asked(split_points=("layers.3", "layers.6", "layers.9"), num_workers=2)
    assert settled_workers(request, 12).num_stages == 4
    plan = plan_of(decide(request, chain(12)))
    assert plan.partition.cuts == (3, 6, 9)
    assert plan.schedule.wiring.placement == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("kind", "values", "devices", "words"),
    [
        ("interleaved", {"num_stages": 5}, None, ["num_stages=5", "make it 6", "num_workers"]),
        ("interleaved", {"num_stages": 5, "num_workers": 2}, None, ["num_stages=5 for num_workers=2", "the stages 6"]),
        ("interleaved", {"num_stages": 2, "num_workers": 4}, None, ["num_stages=2", "the stages 8, or num_workers=1"]),
        ("interleaved", {"num_stages": 7}, 3, ["num_stages=7 for 3 devices", "the stages 9"]),
        ("interleaved", {"num_stages": 2}, 4, ["num_stages=2 for 4 devices", "the stages 8"]),
        ("interleaved", {"split_points": ("a", "b")}, None, ["the split points make 3", "make it 4"]),
        ("zb-v", {"num_stages": 6, "num_workers": 2}, None, ["two stages on every worker", "4, or num_workers=3"]),
        ("zb-v", {"num_stages": 5}, None, ["'zb-v'", "num_stages=5", "make it 6", "interleaved"]),
        ("interleaved", {"num_workers": 8}, None, ["num_stages=16", "12 at most", "num_stages=12 and num_workers=6"]),
        ("interleaved", {}, 8, ["num_stages=16", "12 at most", "schedule='1f1b'"]),
    ],
)
def test_stages_that_cannot_be_shared_out_are_refused_by_number(
    kind: str, values: dict[str, object], devices: int | None, words: list[str]
) -> None:
    with pytest.raises(PlanError) as caught:
        settled_workers(asked(kind, **values), 12, devices)
    for word in words:
        assert word in str(caught.value)


# Plans.


def test_the_table_names_worker_stages_and_their_sum() -> None:
    plan = plan_of(decide(asked(num_workers=2, memory_limit_bytes=80 * MIB), chain(12)))
    lines = plan.explain().splitlines()[5:]
    assert lines[0].startswith("plan: 4 stages on 2 workers, schedule interleaved v=2, ")
    assert lines[1].split()[:2] == ["stage", "worker"]
    assert [line.split()[:2] for line in lines[2:6]] == [["0", "0"], ["1", "1"], ["2", "0"], ["3", "1"]]
    memory = next(line for line in lines if line.startswith("memory: "))
    assert memory.startswith(f"memory: worker 0 is fullest with at most {max(bytes_by_worker(plan)) / MIB:.1f} MiB: ")
    assert "stage 0 " in memory
    assert "stage 2 " in memory
    assert "worker 1 (stages 1 and 3) computes longest" in str(plan)


def test_a_plan_without_a_profile_shows_its_workers_too() -> None:
    request = asked(partitioner="parameters", num_workers=2, minibatch_size=None)
    plan = make_plan(request, make_partition(chain(8).graph, request), 0)
    assert (plan.partition.num_stages, plan.num_microbatches) == (4, 16)
    assert plan.schedule.wiring.placement == (0, 1, 0, 1)
    assert "workers are idle at least 3% of a step" in plan.explain()
    assert Plan.from_json(plan.to_json()) == plan
    few = dataclasses.replace(request, num_workers=4, num_microbatches=2)
    assert make_plan(few, make_partition(chain(8).graph, few), 0).notes == (
        "2 micro-batches for 8 stages on 4 workers leave workers idle 56% of the time; num_microbatches=16 would "
        "leave 9%.",
    )
    with pytest.raises(PlanError, match="num_stages=18, but the model can be cut into 8 at most"):
        make_partition(chain(8).graph, dataclasses.replace(request, num_workers=9))


def test_one_stage_on_each_worker_is_noted() -> None:
    plan = plan_of(decide(asked(num_workers=2, num_stages=2), chain(8)))
    assert any("num_stages=4 would leave workers less idle" in note for note in plan.notes)
    assert plan_of(decide(asked(num_workers=2), chain(8))).notes == ()


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 12))
def test_the_smallest_bubble_is_the_simulators_with_equal_stages(workers: int, chunks: int, rounds: int) -> None:
    for count in {rounds * workers, min(rounds, workers)}:
        lowered = lower(schedule_of(ScheduleSpec("interleaved", count, chunks=chunks), workers * chunks))
        found = simulate(lowered, Costs.uniform(workers * chunks)).bubble_fraction
        assert smallest_bubble(workers * chunks, workers, count) == pytest.approx(found, abs=1e-9)


def test_links_count_between_workers_only() -> None:
    one = plan_of(decide(asked(num_workers=1, num_stages=3), chain(6)))
    assert one.prediction is not None
    assert {(hop.latency_s, hop.occupancy_s) for hop in one.prediction.hops} == {(0.0, 0.0)}
    assert one.prediction.bubble_fraction == pytest.approx(0.0, abs=1e-9)
    slow = plan_of(decide(asked(), chain(12), rented(2, gbit_s=1, latency_s=5e-3)))
    assert slow.prediction is not None
    assert slow.prediction.bound.startswith("workers wait for messages: without them the step would take ")


def test_a_cluster_of_more_devices_is_used_from_its_beginning() -> None:
    devices = tuple(ComputeDevice(f"gpu{i}", speed=1.0 + i) for i in range(4))
    plan = plan_of(decide(asked(num_stages=6), chain(12), Cluster(devices, (Link(1e9, 1e-5),))))
    assert plan.prediction is not None
    assert [s.devices[0] for s in plan.prediction.stages] == ["gpu0", "gpu1", "gpu2"] * 2
    nodes = [stage.stop - stage.start for stage in plan.partition.stages]
    assert nodes[2] > nodes[0], "a faster device gets more"


# Memory.


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHUNKED)
@settings(max_examples=60, deadline=None)
@given(graph=graphs(most=12, chain=True), workers=st.integers(1, 3), data=st.data())
def test_the_stages_of_a_worker_keep_its_limit_together(
    kind: str, graph: ModelGraph, workers: int, data: st.DataObject
) -> None:
    chunks = data.draw(st.integers(1, 3)) if kind == "interleaved" else 2
    request = asked(
        kind,
        num_stages=workers * chunks,
        num_workers=workers,
        minibatch_size=data.draw(st.sampled_from([4, 6, 8])),
        memory_limit_bytes=data.draw(st.none() | st.integers(20, 600)),
        reserve_bytes=data.draw(st.sampled_from([0, 5])),
    )
    caps = data.draw(st.lists(st.none() | st.integers(20, 600), min_size=workers, max_size=workers))
    devices = tuple(ComputeDevice(f"gpu{i}", 1.0 + i % 2, cap, f"host{i // 2}") for i, cap in enumerate(caps))
    cluster = data.draw(st.sampled_from([None, Cluster(devices, (Link(), Link(1e6, 1e-3)))]))
    points = tuple((b, graph.busy_s * (b + 1) / 3) for b in (1, 2, 4)) if data.draw(st.booleans()) else ()
    try:
        decision = decide(request, Profile(graph, 2, points), cluster)
    except PlanError:
        return  # the refusals have tests of their own
    plan = plan_of(decision)
    placement, stages = plan.schedule.wiring.placement, plan.partition.stages
    assert [stage.devices for stage in stages] == [(worker,) for worker in placement]
    held = [m.total_bytes for m in memory_of(graph, plan.partition, decision.limits.memory)]
    assert held == [stage.memory_bytes for stage in stages]
    for worker, used in enumerate(bytes_by_worker(plan)):
        limits = [request.memory_limit_bytes, *([caps[worker]] if cluster else [])]
        assert all(limit is None or used <= limit for limit in limits)
    assert sorted(i for s in stages for i in plan.partition.nodes_of(s)) == list(range(len(graph.nodes)))
    assert plan.prediction is not None
    assert plan.prediction.one_f_one_b_s is None
    assert timeline_of(plan).makespan_s == pytest.approx(plan.prediction.step_s)
    again = Plan.from_json(plan.to_json())
    assert (again, str(again)) == (plan, str(plan))


def test_a_worker_over_its_limit_is_refused_with_its_stages_and_bytes() -> None:
    request = asked(num_workers=2, num_microbatches=8)
    need = max(bytes_by_worker(plan_of(decide(request, chain(4)))))
    assert bytes_by_worker(plan_of(decide(dataclasses.replace(request, memory_limit_bytes=need), chain(4))))
    with pytest.raises(PlanError) as caught:
        decide(dataclasses.replace(request, memory_limit_bytes=need - MIB), chain(4))
    text = str(caught.value)
    for words in (
        f"Worker 0 needs {need / MIB:.1f} MiB for its stages 0 and 2, 1.0 MiB more than its limit of ",
        "at 0F3 (weights x 1 1.0 MiB",
        "at 2F1 (weights x 1 1.0 MiB",
        "such as '1f1b'",
        "The least that would do with 8 micro-batches of 8 and interleaved: 2 workers of ",
    ):
        assert words in text, text


def test_a_cut_moves_where_an_even_one_is_too_much_for_a_worker() -> None:
    """Equal seconds, but one node keeps most of the bytes: its worker has little else."""
    graph = chain_of([4, 4, 4, 4, 4, 4], params=10, kept=0)
    nodes = [dataclasses.replace(node, param_bytes=100 if i == 0 else 10) for i, node in enumerate(graph.nodes)]
    request = asked(num_workers=2, num_microbatches=4, minibatch_size=4, optimizer_factor=0.0)
    profile = Profile(ModelGraph(tuple(nodes)), 1)
    free = plan_of(decide(request, profile))
    limit = max(bytes_by_worker(free)) - 1
    assert max(bytes_by_worker(free)) == bytes_by_worker(free)[0]
    cluster = Cluster.uniform(2, memory_bytes=limit)
    tight = plan_of(decide(request, profile, cluster))
    assert [stage.stop - stage.start for stage in tight.partition.stages] != [1, 2, 2, 1]
    assert max(bytes_by_worker(tight)) <= limit


def test_what_crosses_between_stages_of_one_worker_costs_nothing() -> None:
    """The only way to cut four nodes into four stages, where much goes from the second to the third."""
    graph = ModelGraph(tuple(node(i, 4, cut=1000 if i == 1 else 0) for i in range(4)))
    cluster, limits = Cluster.uniform(2, bandwidth_bytes_s=1.0), Limits(num_stages=4)
    there_and_back, in_turns = (in_chunks(prefix_sum, homes)(graph, cluster, limits) for homes in (V, (0, 1, 0, 1)))
    assert there_and_back.bottleneck_s == pytest.approx(4 * TICK)
    assert in_turns.bottleneck_s == pytest.approx(2 * 1000.0)
