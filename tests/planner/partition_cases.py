"""Small random problems, and references for them that share no code with the solvers.

A reference knows the problem's words only: every node in one stage, edges forward, no stage empty, a device per
stage, and the slowest stage or cut decides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from hypothesis import strategies as st

from raypipe.ir.cluster import Cluster, ComputeDevice, Link
from raypipe.ir.graph import ModelGraph, Node, link_nodes
from raypipe.ir.plan import Partition
from raypipe.planner.cost.columns import columns_of
from raypipe.planner.cost.memory import MemoryModel
from raypipe.planner.partition.answer import Piece, make_answer
from raypipe.planner.partition.costs import Limits
from tests.planner.specs import spec_for

TICK = 1 / 1024  # seconds; a whole number of picoseconds
NEAR = 1e-9


def node(index: int, ticks: int, *, params: int = 0, kept: int = 0, output: int = 0, cut: int | None = 0) -> Node:
    return Node(
        f"op{index}",
        "",
        (),
        params,
        cut,
        ticks * TICK / 2,
        ticks * TICK / 4,
        ticks * TICK / 4,
        activation_bytes=kept,
        output_bytes=output,
    )


def chain_of(ticks: list[int], **bytes_of: int) -> ModelGraph:
    return ModelGraph(tuple(node(i, t, **bytes_of) for i, t in enumerate(ticks)))


@st.composite
def graphs(draw: st.DrawFn, most: int = 6, *, chain: bool = False, together: bool = False) -> ModelGraph:
    """DAGs in execution order, up to six branches wide; as a chain, with places where no cut is possible."""
    size = draw(st.integers(1, most))
    small = st.integers(0, 9)
    ticks = draw(st.lists(small, min_size=size, max_size=size).filter(any))
    rows = [(t, draw(st.integers(0, 3)), draw(st.integers(0, 3)), draw(small)) for t in ticks]
    if chain:
        cuts = draw(st.lists(st.integers(0, 9) | st.none(), min_size=size, max_size=size))
        return ModelGraph(
            tuple(
                node(i, t, params=p, kept=k, cut=c) for i, ((t, p, k, _), c) in enumerate(zip(rows, cuts, strict=True))
            )
        )
    nodes = [node(i, t, params=p, kept=k, output=o) for i, (t, p, k, o) in enumerate(rows)]
    pairs = list(itertools.combinations(range(size), 2))
    edges = draw(st.sets(st.sampled_from(pairs), max_size=2 * size)) if pairs else set()
    # Without this a third of all graphs would be single nodes side by side.
    edges |= {(draw(st.integers(max(0, i - 6), i - 1)), i) for i in range(1, size) if draw(st.booleans())}
    joined = draw(st.sets(st.sampled_from(pairs), max_size=1)) if together and pairs else set()
    return link_nodes(nodes, sorted(edges), sorted(joined))


def devices(memory: st.SearchStrategy[int | None] | None = None) -> st.SearchStrategy[ComputeDevice]:
    caps = memory if memory is not None else st.none() | st.integers(5, 25) | st.integers(10, 60)
    return st.builds(
        ComputeDevice, speed=st.sampled_from([0.5, 1.0, 1.0, 3.0]), memory_bytes=caps, host=st.sampled_from("ab")
    )


@st.composite
def clusters(draw: st.DrawFn, most: int = 3) -> Cluster:
    found = draw(st.lists(devices(), min_size=1, max_size=most))
    rates = st.sampled_from([math.inf, 4096.0, 1024.0])
    return Cluster(tuple(found), (Link(draw(rates)), Link(draw(rates))))


@st.composite
def limits(draw: st.DrawFn, *, exact: bool = True) -> Limits:
    memory = MemoryModel(
        spec_for(
            draw(st.sampled_from(["gpipe", "1f1b", "kfkb", "slack", "pipedream", "2bw"])),
            8,  # no cut has more stages
            draw(st.sampled_from([1, 3, 5])),
            group_size=2,
            slack=2,
        ),
        microbatch_size=draw(st.integers(1, 2)),
    )
    return Limits(draw(st.none() | st.integers(1, 3)) if exact else None, memory)


# The references.


def in_flight(memory: MemoryModel, depth: int) -> int:
    """Written out again on purpose."""
    most = memory.spec.num_microbatches
    return {
        "gpipe": most,
        "1f1b": min(most, depth),
        "kfkb": min(most, 2 * depth),
        "slack": min(most, 2 * depth - 1),
        "pipedream": 2 * depth - 1,
        "2bw": 2 * depth - 1,
    }[memory.spec.kind]


def stage_bytes(graph: ModelGraph, nodes: list[int], memory: MemoryModel, depth: int) -> int:
    versions = {"pipedream": 2 * depth - 1, "2bw": 2}.get(memory.spec.kind, 1)
    params = sum(graph.nodes[i].param_bytes for i in nodes)
    kept = sum(graph.nodes[i].activation_bytes for i in nodes)
    return (versions + 3) * params + kept * in_flight(memory, depth) * memory.microbatch_size


def crossing_bytes(graph: ModelGraph, stage_of: tuple[int, ...], cut: int) -> int | None:
    """Per sample, between stage ``cut`` and the one after; None where it is no possible cut."""
    if graph.edges is None:
        return graph.nodes[max(i for i, stage in enumerate(stage_of) if stage <= cut)].cut_bytes
    live = {a for a, b in graph.edges if stage_of[a] <= cut < stage_of[b]}
    return sum(graph.nodes[a].output_bytes for a in live)


def assignments(graph: ModelGraph, num_stages: int, *, in_order: bool) -> Iterator[tuple[int, ...]]:
    """Stage by node: forward along edges, no stage empty; ``in_order`` cuts the nodes in their own order only."""
    size = len(graph.nodes)
    pairs = [(i, i + 1) for i in range(size - 1)] if in_order or graph.edges is None else graph.edges
    for stage_of in itertools.product(range(num_stages), repeat=size):
        if len(set(stage_of)) < num_stages or any(stage_of[a] > stage_of[b] for a, b in pairs):
            continue
        if all(stage_of[a] == stage_of[b] for a, b in graph.together):
            yield stage_of


def period_of(
    graph: ModelGraph, cluster: Cluster, bounds: Limits, stage_of: tuple[int, ...], places: tuple[int, ...]
) -> float:
    """Seconds of the slowest stage or cut; infinite where a limit is broken."""
    worst = 0.0
    for stage, place in enumerate(places):
        nodes = [i for i, s in enumerate(stage_of) if s == stage]
        device = cluster.devices[place]
        if device.memory_bytes is not None:
            need = stage_bytes(graph, nodes, bounds.memory, len(places) - stage)
            if need > device.memory_bytes:
                return math.inf
        worst = max(worst, sum(graph.nodes[i].busy_s for i in nodes) / device.speed)
        if stage + 1 < len(places):
            crossing = crossing_bytes(graph, stage_of, stage)
            if crossing is None:
                return math.inf
            same = device.host == cluster.devices[places[stage + 1]].host
            rate = cluster.links[0 if same else 1].bandwidth_bytes_s
            worst = max(worst, 2 * crossing * bounds.memory.microbatch_size / rate)
    return worst


def brute_force(graph: ModelGraph, cluster: Cluster, bounds: Limits, *, in_order: bool) -> float:
    """The least period over every assignment of nodes to stages and of stages to devices."""
    most = len(cluster.devices)
    return min(
        (
            period_of(graph, cluster, bounds, stage_of, places)
            for size in ([bounds.num_stages] if bounds.num_stages else range(1, most + 1))
            for stage_of in assignments(graph, size, in_order=in_order)
            for places in itertools.permutations(range(most), size)
        ),
        default=math.inf,
    )


def cut_at(graph: ModelGraph, cluster: Cluster, bounds: Limits, positions: Sequence[int]) -> Partition:
    """The partition with given cuts (first node of each stage, and the number of nodes), with stage s on device s."""
    busy_s, pieces = columns_of(graph).busy_s, []
    for device, (start, stop) in enumerate(itertools.pairwise(positions)):
        seconds = float(busy_s[start:stop].sum()) / cluster.devices[device].speed
        crossing = graph.nodes[start - 1].cut_bytes or 0 if start else 0
        pieces.append(Piece(range(start, stop), (device,), seconds, crossing))
    return make_answer(graph, cluster, bounds, pieces, max(piece.period_s for piece in pieces), "a test")
