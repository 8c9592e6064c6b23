"""Groups of nodes: every sum is kept, what is grouped is whole, and a cut between groups is a cut between nodes."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import PlanError
from raypipe.ir.coarse import group_nodes, module_groups
from raypipe.ir.graph import ModelGraph, Node, link_nodes

SUMS = (
    "param_bytes", "forward_s", "backward_input_s", "backward_weight_s", "activation_bytes", "frozen_bytes",
    "buffer_bytes",
)  # fmt: skip


@st.composite
def graphs(draw: st.DrawFn) -> ModelGraph:
    size = draw(st.integers(1, 9))
    small = st.integers(0, 9)
    nodes = [
        Node(
            f"op{i}", draw(st.sampled_from(["a.b", "a.c", "d", ""])), (f"p{i}",), draw(small), None,
            draw(small) / 8, draw(small) / 8, draw(small) / 8, draw(small), draw(small), draw(small), draw(small),
            "measured",
        )
        for i in range(size)
    ]  # fmt: skip
    pairs = list(itertools.combinations(range(size), 2))
    some = st.sets(st.sampled_from(pairs), max_size=2 * size) if pairs else st.just(set())
    few = st.sets(st.sampled_from(pairs), max_size=2) if pairs else st.just(set())
    return link_nodes(nodes, sorted(draw(some)), sorted(draw(few)), sorted(draw(few)))


def reachable(graph: ModelGraph) -> dict[int, set[int]]:
    """By node, what depends on it."""
    pairs = {*(graph.edges or ()), *graph.together, *graph.before}
    below: dict[int, set[int]] = {}
    for i in reversed(range(len(graph.nodes))):
        below[i] = set().union(*({b} | below[b] for a, b in pairs if a == i))
    return below


@pytest.mark.slow
@given(graphs(), st.data())
def test_any_grouping_keeps_every_sum_or_is_refused(graph: ModelGraph, data: st.DataObject) -> None:
    size = len(graph.nodes)
    labels = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    if cyclic(graph, labels):
        with pytest.raises(PlanError, match="is not convex"):
            group_nodes(graph, labels)
        return
    coarse = group_nodes(graph, labels)
    for name in SUMS:
        assert sum(getattr(n, name) for n in coarse.graph.nodes) == pytest.approx(
            sum(getattr(n, name) for n in graph.nodes)
        )
    assert sorted(itertools.chain.from_iterable(coarse.members)) == list(range(size))
    below = reachable(graph)
    for members in coarse.members:
        assert len({labels[i] for i in members}) == 1
        for a, b in itertools.combinations(members, 2):  # convex: nothing between two members is outside
            assert all(c in members for c in below[a] if b in below[c])
    cuts, order = coarse.expand(range(1, len(coarse.members)))
    place = {at: i for i, at in enumerate(order or range(size))}
    assert all(place[a] < place[b] for a, b in (*(graph.edges or ()), *graph.before))
    assert len(set(cuts)) == len(coarse.members) - 1


def cyclic(graph: ModelGraph, labels: list[int]) -> bool:
    """Whether groups depend on each other in a circle, found by taking away what waits for nothing."""
    left = set(labels)
    pairs = {(labels[a], labels[b]) for a, b in (*(graph.edges or ()), *graph.together, *graph.before)}
    pairs = {(a, b) for a, b in pairs if a != b}
    while free := {x for x in left if not any(b == x and a in left for a, b in pairs)}:
        left -= free
    return bool(left)


@pytest.mark.slow
@given(graphs(), st.sampled_from([None, 1, 2]))
def test_runs_of_a_module_are_always_whole(graph: ModelGraph, depth: int | None) -> None:
    """And a cut between them costs what the fine graph says."""
    labels = module_groups(graph, depth)
    coarse = group_nodes(graph, labels)
    assert [len(m) for m in coarse.members] == [len(list(run)) for _, run in itertools.groupby(labels)]
    assert coarse.expand(()) == ((), ())
    ends = list(itertools.accumulate(len(m) for m in coarse.members))
    assert [n.cut_bytes for n in coarse.graph.nodes] == [graph.nodes[end - 1].cut_bytes for end in ends]
    assert coarse.expand(coarse.graph.cut_positions())[0] == tuple(p for p in graph.cut_positions() if p in ends)
    for a, b in coarse.graph.together:
        assert a != b


@pytest.mark.slow
@given(graphs())
def test_a_group_per_node_changes_nothing(graph: ModelGraph) -> None:
    assert group_nodes(graph, range(len(graph.nodes))).graph == dataclasses.replace(
        graph, nodes=tuple(dataclasses.replace(n) for n in graph.nodes)
    )


@pytest.mark.slow
@given(graphs())
def test_a_graph_survives_its_text(graph: ModelGraph) -> None:
    assert ModelGraph.from_json(graph.to_json()) == graph


def test_layers_of_a_small_net() -> None:
    """conv and its norm with the counter of batches, a sum between modules, and the head."""
    names = ["conv", "norm", "norm", "", "", "head"]
    nodes = [Node(f"op{i}", name, (), 1, None, output_bytes=8) for i, name in enumerate(names)]
    graph = link_nodes(nodes, [(0, 2), (2, 3), (0, 4), (3, 4), (4, 5)], (), [(0, 1), (1, 2)])
    coarse = group_nodes(graph, module_groups(graph))
    assert [n.name for n in coarse.graph.nodes] == ["op0", "op1...op2", "op3...op4", "op5"]
    assert coarse.graph.edges == ((0, 1), (1, 2), (0, 2), (2, 3))
    assert coarse.graph.before == ((0, 1),)
    assert [n.cut_bytes for n in coarse.graph.nodes] == [8, 16, 8, 0]
    assert coarse.expand((1, 3)) == ((1, 5), ())


def test_a_path_that_comes_back_is_refused() -> None:
    nodes = [Node(name, "", (), 0, None) for name in "abc"]
    with pytest.raises(PlanError, match=r"'a' \.\.\. 'c' is not convex"):
        group_nodes(link_nodes(nodes, [(0, 1), (1, 2)]), [0, 1, 0])


def test_labels_must_match() -> None:
    with pytest.raises(PlanError, match="2 labels for 1 nodes"):
        group_nodes(ModelGraph((Node("a", "", (), 0, None),)), [0, 1])


def test_groups_in_another_order_say_how_to_run_the_nodes() -> None:
    """Two branches, one group each: the groups' members are not runs."""
    nodes = [Node(f"op{i}", "", (), 0, None, output_bytes=2 + i) for i in range(4)]
    graph = link_nodes(nodes, [(0, 2), (1, 3)])
    coarse = group_nodes(graph, [0, 1, 0, 1])
    assert coarse.members == ((0, 2), (1, 3))
    assert coarse.expand((1,)) == ((2,), (0, 2, 1, 3))
    assert coarse.expand((1,), (1, 0)) == ((2,), (1, 3, 0, 2))
