"""More memory, more bandwidth or one more device never makes a small plan's predicted step slower."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, Device, Link
from raypipe.ir.graph import ModelGraph, Node
from raypipe.ir.profile import Profile
from raypipe.planner.tune import Request, decide

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
        tuple(Device(f"gpu{i}", 1.0, memory_mib * MIB) for i in range(devices)), (Link(gbit_s / 8 * 1e9, 1e-4),)
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
