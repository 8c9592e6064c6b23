"""Search over all cuts and orders of devices: bounds, bytes, and no richer cluster is slower."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from raypipe.errors import PlanError
from raypipe.ir.cluster import DUPLEX, Cluster, ComputeDevice, Link
from raypipe.ir.graph import ModelGraph, Node
from raypipe.ir.profile import Profile
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.cost.columns import workspace_bytes
from raypipe.planner.cost.memory import resident_of
from raypipe.planner.cost.tolerance import EVEN
from raypipe.planner.partition.costs import Limits
from raypipe.planner.partition.fit import fits_within, memory_of
from raypipe.planner.replay import equal_messages_s
from raypipe.planner.schedule import schedule_of
from raypipe.planner.search import Request, decide
from raypipe.planner.search.cut_costs import MOST_CUTS, stage_bytes, total_bytes
from raypipe.planner.search.cut_search import ShapeSearch
from raypipe.planner.search.predict import costs_of, hops_of, stages_of
from raypipe.planner.search.problem import Problem
from raypipe.planner.search.schedule_settings import memory_model, spec_of
from raypipe.planner.simulator import Costs
from tests.planner.partition_cases import cut_at

MIB = 1 << 20
REQUEST = Request(None, None, (), 16, None, num_samples=1000, clips=True)
Devices = tuple[list[float], list[int | None], list[str], list[Link]]
"""Speeds, memory and hosts of devices, and the links inside a host and between hosts."""


def chain(drawn: random.Random, nodes: int, memory: int = MIB) -> Profile:
    """Draw a chain of operations whose seconds grow with the samples of a micro-batch, beside a constant."""
    made = []
    for i in range(nodes):
        third, kept, output = drawn.uniform(0.001, 0.01), drawn.randrange(1, 5) << 17, drawn.randrange(1, 9) << 15
        made.append(
            Node(
                f"op{i}", "", (), drawn.randrange(1, 9) * memory, output, third, 1.2 * third, 0.8 * third,
                activation_bytes=kept, output_bytes=output, source="measured",
            )
        )  # fmt: skip
    graph, constant = ModelGraph(tuple(made)), drawn.choice([0.5, 2.0, 4.0])
    return Profile(graph, 1, tuple((b, graph.busy_s * (b + constant) / (1 + constant)) for b in (1, 2, 4, 8)))


def devices(drawn: random.Random, count: int, memory: int | None) -> Devices:
    """Draw devices on one or two hosts: all equal, or with speeds, memory and hosts of their own."""
    equal, bandwidth = drawn.random() < 0.3, 10 ** drawn.uniform(7.5, 10)
    speeds = [1.0 if equal else drawn.choice([0.5, 1.0, 2.0]) for _ in range(count)]
    limits = [None if memory is None else int(memory * (1.0 if equal else drawn.uniform(0.7, 1.5))) for _ in speeds]
    hosts = ["a" if equal else drawn.choice("ab") for _ in range(count)]
    return speeds, limits, hosts, [Link(4 * bandwidth, 1e-5), Link(bandwidth, drawn.choice([5e-5, 1e-3]))]


def step_s(request: Request, profile: Profile, of: Devices) -> float:
    speeds, limits, hosts, links = of
    every = enumerate(zip(speeds, limits, hosts, strict=True))
    cluster = Cluster(tuple(ComputeDevice(f"gpu{i}", *each) for i, each in every), tuple(links))
    try:
        return decide(request, profile, cluster).prediction.step_s
    except PlanError:
        return math.inf


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 40))])
def test_a_richer_cluster_is_never_slower(seed: int) -> None:
    """More bandwidth, less latency, more memory, another device: equal and unlike devices, recompute and replicas."""
    drawn = random.Random(seed)
    profile, memory = chain(drawn, drawn.randint(4, 8)), drawn.choice([None, 30 * MIB, 60 * MIB])
    request = dataclasses.replace(
        REQUEST, recompute=drawn.choice([False, False, None]), replicas=drawn.choice([1, 1, None])
    )
    speeds, limits, hosts, links = poor = devices(drawn, drawn.randint(2, 4), memory)
    worse = random.Random(-seed - 1)  # numbers of its own, so that the others stay as they are
    links[1] = dataclasses.replace(links[1], duplex=worse.choice(DUPLEX), latency_occupies_wire=worse.random() < 0.5)
    richer: dict[str, Devices] = {
        "bandwidth": (
            speeds,
            limits,
            hosts,
            [dataclasses.replace(x, bandwidth_bytes_s=3 * x.bandwidth_bytes_s) for x in links],
        ),
        "latency": (speeds, limits, hosts, [dataclasses.replace(x, latency_s=x.latency_s / 10) for x in links]),
        "memory": (speeds, [limit and int(1.2 * limit) for limit in limits], hosts, links),
        "device": ([*speeds, 1.0], [*limits, limits[0]], [*hosts, hosts[-1]], links),
    }
    full = [dataclasses.replace(link, duplex="full") for link in links]
    ahead = [dataclasses.replace(link, latency_occupies_wire=False) for link in links]
    richer |= {"duplex": (speeds, limits, hosts, full), "wire": (speeds, limits, hosts, ahead)}
    poor_s = step_s(request, profile, poor)
    for what, rich in richer.items():
        assert step_s(request, profile, rich) <= poor_s * (1 + EVEN), what


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 30))])
def test_no_plan_on_three_unlike_devices_is_quicker(seed: int) -> None:
    """Brute force over numbers of micro-batches, orders of devices, cuts, kinds of schedules and slack."""
    drawn = random.Random(seed)
    profile = chain(drawn, drawn.randint(5, 7), memory=0)
    _, _, hosts, links = devices(drawn, 3, None)
    speeds = drawn.sample([0.5, 1.0, 2.0], 3)
    problem = Problem(REQUEST, profile, Cluster((ComputeDevice(),)), described=True)
    quickest_s = math.inf
    for count, stages in itertools.product((1, 2, 4, 8, 16), (1, 2, 3)):
        nodes, size = problem.at(16 // count).nodes, 16 // count
        slacks = itertools.product((1, 2, 3, 4), repeat=stages - 1)
        specs = [ScheduleSpec("1f1b", count)]
        specs += [ScheduleSpec(kind, count, slack=r) for r in slacks for kind in ("slack", "zb-h1") if stages > 1]
        for order in itertools.permutations(range(3), stages):
            for cut in itertools.combinations(range(1, len(nodes)), stages - 1):
                costs = _costs(nodes, cut, size, [speeds[i] for i in order], [hosts[i] for i in order], links)
                quickest_s = min(quickest_s, *(equal_messages_s(spec, costs) for spec in specs))
    assert step_s(REQUEST, profile, (speeds, [None] * 3, hosts, links)) <= quickest_s * 1.01


def _costs(
    nodes: Sequence[Node], cut: Sequence[int], size: int, speeds: Sequence[float], hosts: Sequence[str],
    links: Sequence[Link],
) -> Costs:  # fmt: skip
    """Compute the costs of a cut whose stages are on devices with these speeds and hosts."""
    parts = [nodes[start:stop] for start, stop in itertools.pairwise((0, *cut, len(nodes)))]
    forward, inputs, weights = (
        tuple(sum(getattr(node, name) for node in part) / speed for part, speed in zip(parts, speeds, strict=True))
        for name in ("forward_s", "backward_input_s", "backward_weight_s")
    )
    inputs, weights = (0.0, *inputs[1:]), (inputs[0] + weights[0], *weights[1:])  # nothing is before the first stage
    hops = [links[a != b] for a, b in itertools.pairwise(hosts)]
    held = tuple(nodes[at - 1].cut_bytes * size / link.bandwidth_bytes_s for at, link in zip(cut, hops, strict=True))
    late = tuple(link.latency_s for link in hops)
    backward = tuple(map(sum, zip(inputs, weights, strict=True)))
    return Costs(
        forward_s=forward, backward_s=backward, backward_input_s=inputs, backward_weight_s=weights,
        forward_latency_s=late, backward_latency_s=late, forward_occupancy_s=held, backward_occupancy_s=held,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("count", [1, 2, 5])
def test_no_plan_is_quicker_than_the_bound_of_its_shape(count: int, seed: int) -> None:
    drawn = random.Random(seed)
    profile = Profile(graph_of(drawn), 8)
    cluster = Cluster(tuple(ComputeDevice(f"gpu{i}", drawn.choice([0.4, 1.0])) for i in range(3)), (Link(1e9, 1e-5),))
    request = dataclasses.replace(BOUND_REQUEST, num_microbatches=count, schedule=drawn.choice(["auto", "1f1b"]))
    search = ShapeSearch(Problem(request, profile, cluster, described=True))
    for stages in (1, 2, 3):
        best = search.best((1,) * stages)
        assert best is not None
        assert search.at_least_s((1,) * stages) <= best.prediction.step_s


def needy_chain(drawn: random.Random, nodes: int) -> Profile:
    """Draw a chain of which some operations need temporary bytes while they run."""
    profile = chain(drawn, nodes)
    made = [
        dataclasses.replace(node, workspace=((drawn.randrange(16) * MIB, 0),)) if drawn.random() < 0.4 else node
        for node in profile.graph.nodes
    ]
    return dataclasses.replace(profile, graph=ModelGraph(tuple(made)))


@pytest.mark.parametrize("schedule", ["auto", "zb-h1"])
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 40))])
def test_a_plan_holds_what_its_rows_do_within_the_limits(schedule: str, seed: int) -> None:
    drawn = random.Random(seed)
    profile = needy_chain(drawn, drawn.randint(4, 7))
    cluster = Cluster(tuple(ComputeDevice(f"gpu{i}", 1.0, drawn.randrange(20, 50) * MIB) for i in range(3)))
    request = dataclasses.replace(REQUEST, num_stages=3, schedule=schedule, recompute=drawn.choice([False, None]))
    try:
        found = decide(request, profile, cluster)
    except PlanError:
        return
    model, limits = found.limits.memory, found.limits
    assert fits_within(found.partition, found.graph, cluster, limits, model)
    assert resident_of(schedule_of(model.spec, 3)).in_flight == tuple(map(model.in_flight, (3, 2, 1)))


@pytest.mark.parametrize("seed", range(6))
def test_every_stage_of_a_cut_defers_as_many_weight_gradients_as_fit(seed: int) -> None:
    drawn = random.Random(seed)
    profile, request = needy_chain(drawn, 6), dataclasses.replace(REQUEST, num_stages=3, num_microbatches=8)
    cluster = Cluster(tuple(ComputeDevice(f"gpu{i}", 1.0, drawn.randrange(12, 50) * MIB) for i in range(3)))
    search = ShapeSearch(Problem(request, profile, cluster, described=True))
    cell = search._cells((1, 1, 1), MOST_CUTS)[0]
    placed, caps = search._placed(*cell), search._options.caps(cell[0])

    def fits(cut: int, asked: Request) -> bool:
        stages = itertools.pairwise(placed.costs.positions[cut].tolist())
        workspace = [workspace_bytes(profile.graph, range(*stage), placed.size) for stage in stages]
        return bool((total_bytes(placed.take(np.array([cut])), asked) + workspace <= caps).all())

    for slack, full in ((1, (0, 1, 2)), ((1, 3), (0, 1, 4))):
        asked = dataclasses.replace(request, schedule="zb-h1", slack=slack)
        for cut, chosen in enumerate(search._options.with_lag(placed, [asked] * len(placed.forward_s))):
            thriftiest = chosen.thriftiest(3)
            if not chosen.lag:
                assert fits(cut, chosen) or not fits(cut, thriftiest)
                continue
            assert fits(cut, chosen)
            assert not fits(cut, asked)
            for stage in range(3):
                lag = (*chosen.lag[:stage], chosen.lag[stage] + 1, *chosen.lag[stage + 1 :])
                assert chosen.lag[stage] == full[stage] or not fits(cut, dataclasses.replace(chosen, lag=lag))


@pytest.mark.parametrize("count", [8, 256])
@pytest.mark.parametrize("replicas", [1, (2, 1)])
def test_weight_gradients_are_deferred_in_full_if_memory_allows_it(count: int, replicas: int | tuple[int, ...]) -> None:
    """Also if weight gradients take no time. With the least memory in which a plan fits, none are deferred."""
    node = Node(
        "", "", (), MIB, 8, 0.01, 0.01, 0.0 if count == 8 else 0.01, activation_bytes=4 * MIB, source="measured"
    )
    graph = ModelGraph(tuple(dataclasses.replace(node, name=f"op{i}") for i in range(4)))
    request = dataclasses.replace(
        REQUEST, schedule="zb-h1", num_stages=2, minibatch_size=count, num_microbatches=count, replicas=replicas,
        partitioner="parameters",
    )  # fmt: skip

    def plan(memory: int) -> ScheduleSpec:
        cluster = Cluster(tuple(ComputeDevice(f"gpu{i}", 1.0, memory) for i in range(2 if replicas == 1 else 3)))
        return decide(request, Profile(graph, 1), cluster).limits.memory.spec

    assert plan(1 << 40).lag == ()
    least = next(memory for memory in range(8 * MIB, 48 * MIB, MIB) if can(plan, memory))
    assert plan(least).lag == (0, 0)


def can(plan: Callable[[int], ScheduleSpec], memory: int) -> bool:
    try:
        plan(memory)
    except PlanError:
        return False
    return True


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
    link = Link(drawn.choice([3e3, 3e4, 3e6]), drawn.choice([0.0, 0.3]), drawn.choice(DUPLEX), drawn.random() < 0.5)
    cluster = Cluster(Cluster.uniform(stages).devices, (link,))
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
        partition = cut_at(graph, cluster, limits, placed.costs.positions[cut].tolist())
        expected = costs_of(stages_of(graph, partition, cluster, limits), hops_of(partition, cluster, size))
        found = placed.of(cut)
        for name in ("forward_s", "backward_s", "forward_occupancy_s", "backward_latency_s"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name))
        assert found.half_duplex == expected.half_duplex == (link.duplex == "half",) * (stages - 1)
        first = int(placed.costs.first[cut])
        assert found.backward_weight_s[first:] == pytest.approx(expected.backward_weight_s[first:])
        assert nbytes[cut].tolist() == [stage.total_bytes for stage in memory_of(graph, partition, model)]
        step_s = equal_messages_s(spec_of(request, stages, count, first), found)
        assert bounds_s[cut] <= step_s
