"""Replication against every contiguous replicated plan of 200 small chains: one and two levels, memory limits included.

A plan on two levels is written out, and judged by the problem's words alone:

    ( nodes 0-2 on 1 host: 0-1 x 1 worker, 2 x 1 worker ) ( nodes 3-4 on 2 hosts: 3-4 x 2 workers )

An outer stage takes whole hosts, which share its micro-batches; inside each host it is a pipeline again, of the same
shape, whose stages have one worker or several. Or hosts are forgotten: all devices on one level with the slowest link.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, Device, Link
from raypipe.ir.graph import ModelGraph
from raypipe.planner.memory import MemoryModel
from raypipe.planner.partition.hierarchical import hierarchical
from raypipe.planner.partition.limits import Limits
from tests.planner.partition_cases import NEAR, node, stage_bytes
from tests.planner.specs import spec_for

CHAINS = 200
RATES = (math.inf, 2048.0, 1024.0, 1024.0)

Part = tuple[int, int, int]
"""(first node, node behind the last, workers or hosts)."""


@dataclass(frozen=True)
class Case:
    """A chain, hosts of devices, and what may be used of them."""

    graph: ModelGraph
    hosts: int
    per_host: int
    inside: float
    between: float
    memory_bytes: int | None
    memory: MemoryModel

    def cluster(self) -> Cluster:
        device = Device(memory_bytes=self.memory_bytes)
        if self.hosts == 1:
            return Cluster.uniform(self.per_host, memory_bytes=self.memory_bytes, bandwidth_bytes_s=self.inside)
        return Cluster.hosts(
            self.hosts, self.per_host, inside=Link(self.inside), between=Link(self.between), device=device
        )


def case(seed: int) -> Case:
    """One level where the seed is even, two where it is odd."""
    drawn = random.Random(seed)
    size = drawn.randint(1, 7)
    heavy = drawn.choice([0, 40])  # on the last node, as in VGG: then one stage on all devices is a poor plan
    nodes = [
        node(
            i,
            drawn.randint(1, 9),
            params=drawn.choice([0, 0, 1, 3]) + heavy * (i == size - 1),
            kept=drawn.randint(0, 3),
            cut=drawn.choice([None, 0, 0, 1, 2, 5]),
        )
        for i in range(size)
    ]
    kind = drawn.choice(["gpipe", "1f1b", "kfkb", "slack", "pipedream", "2bw"])
    spec = spec_for(kind, 8, drawn.choice([1, 3, 5]), group_size=2, slack=2)
    hosts = 1 if seed % 2 == 0 else drawn.randint(2, 3)
    return Case(
        ModelGraph(tuple(nodes)),
        hosts,
        drawn.randint(1, 4) if hosts == 1 else drawn.randint(1, 2),
        drawn.choice(RATES),
        drawn.choice(RATES),
        drawn.choice([None, drawn.randint(10, 60), drawn.randint(50, 500)]),
        MemoryModel(spec, microbatch_size=drawn.randint(1, 2)),
    )


def pipelines(graph: ModelGraph, first: int, last: int, most: int) -> Iterator[tuple[Part, ...]]:
    """Every cut of nodes [first, last) with every number of workers for each part, at most so many in all."""
    places = [p for p in graph.cut_positions() if first < p < last]
    for parts in range(1, min(most, last - first) + 1):
        for cuts in itertools.combinations(places, parts - 1):
            for counts in itertools.product(range(1, most + 1), repeat=parts):
                if sum(counts) <= most:
                    yield tuple(
                        (a, b, n) for (a, b), n in zip(itertools.pairwise((first, *cuts, last)), counts, strict=True)
                    )


def seconds(given: Case, first: int, last: int) -> float:
    return sum(n.busy_s for n in given.graph.nodes[first:last])


def crossing_s(given: Case, place: int, rate: float) -> float:
    """Of a cut: a micro-batch's activations and their gradients."""
    cut = given.graph.nodes[place - 1].cut_bytes
    assert cut is not None
    return 2 * cut * given.memory.microbatch_size / rate


def all_reduce_s(given: Case, first: int, last: int, count: int, rate: float) -> float:
    """Of a round of one micro-batch for each of so many: all of them send and receive (count - 1) / count."""
    return 2 * (count - 1) / count * sum(n.param_bytes for n in given.graph.nodes[first:last]) / rate


def inner_s(given: Case, plan: tuple[Part, ...]) -> float:
    """Seconds per micro-batch of a pipeline inside a host."""
    stages = (
        max(seconds(given, a, b), all_reduce_s(given, a, b, workers, given.inside)) / workers for a, b, workers in plan
    )
    return max(*stages, *(crossing_s(given, a, given.inside) for a, _, _ in plan[1:]), 0.0)


def fits(given: Case, stages: list[Part]) -> bool:
    """Whether every worker holds its stage, with ceil(workers from it to the end / its replicas) micro-batches."""
    if given.memory_bytes is None:
        return True
    counts = [count for _, _, count in stages]
    return all(
        stage_bytes(given.graph, list(range(a, b)), given.memory, math.ceil(sum(counts[s:]) / count))
        <= given.memory_bytes
        for s, (a, b, count) in enumerate(stages)
    )


def best_of_all(given: Case) -> float:
    """The least seconds per micro-batch; infinite where nothing fits."""
    best = math.inf
    size = len(given.graph.nodes)
    flat = given
    if given.hosts > 1:
        rate = min(given.between, given.inside if given.per_host > 1 else math.inf)
        flat = dataclasses.replace(given, hosts=1, per_host=given.hosts * given.per_host, inside=rate)
    for plan in pipelines(flat.graph, 0, size, flat.per_host):
        if (found := inner_s(flat, plan)) < best and fits(flat, list(plan)):
            best = found
    if given.hosts == 1:
        return best
    inside = functools.cache(lambda a, b: list(pipelines(given.graph, a, b, given.per_host)))
    for outer in pipelines(given.graph, 0, size, given.hosts):
        cuts_s = max((crossing_s(given, a, given.between) for a, _, _ in outer[1:]), default=0.0)
        for inner in itertools.product(*(inside(a, b) for a, b, _ in outer)):
            worst = cuts_s
            for (a, b, hosts), plan in zip(outer, inner, strict=True):
                shared = max(inner_s(given, plan), all_reduce_s(given, a, b, hosts, given.between))
                worst = max(worst, shared / hosts)
            stages = [
                (a, b, hosts * workers)
                for (_, _, hosts), plan in zip(outer, inner, strict=True)
                for a, b, workers in plan
            ]
            if worst < best and fits(given, stages):
                best = worst
    return best


def compare(given: Case) -> str:
    """What the best plan is made of, or that there is "none"."""
    expected, limits = best_of_all(given), Limits(memory=given.memory)
    if math.isinf(expected):
        with pytest.raises(PlanError):
            hierarchical(given.graph, given.cluster(), limits)
        return "none"
    found = hierarchical(given.graph, given.cluster(), limits)
    assert found.bottleneck_s == pytest.approx(expected, rel=NEAR, abs=1e-11)
    several = max(found.replicas) > 1, found.num_stages > 1
    return "found, replicas and stages" if all(several) else "found"


@pytest.mark.slow
def test_no_plan_is_better() -> None:
    cases = {seed: case(seed) for seed in range(CHAINS)}
    found = {seed: compare(given) for seed, given in cases.items()}
    # What the cases are made of: with fewer of these, less would be shown than the name says.
    for levels in (0, 1):
        of_level = [seed for seed in found if seed % 2 == levels]
        assert sum(found[seed] != "none" for seed in of_level) >= 50
        assert sum(found[seed] == "none" for seed in of_level) >= 5
        assert sum(cases[seed].memory_bytes is not None for seed in of_level) >= 40
        assert sum(found[seed] == "found, replicas and stages" for seed in of_level) >= 8


def test_the_best_of_a_chain_that_can_be_worked_out() -> None:
    """Hosts of two devices: 12 ticks with few weights on two hosts, 3 ticks with many on the other."""
    nodes = (node(0, 6, cut=None), node(1, 6, cut=0), node(2, 3, params=10**6, cut=0))
    given = Case(ModelGraph(nodes), 3, 2, math.inf, 1024.0, None, MemoryModel())
    assert best_of_all(given) == pytest.approx(3 / 1024)
