"""Graph of a model: what crosses a cut, JSON there and back, refusals."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import PlanError
from raypipe.ir.graph import ModelGraph, Node, link_nodes
from tests.planner.partition_cases import graphs


@pytest.mark.slow
@given(graphs(most=8, together=True) | graphs(most=8, chain=True))
def test_json_there_and_back(graph: ModelGraph) -> None:
    assert ModelGraph.from_json(graph.to_json()) == graph


@pytest.mark.slow
@given(graphs(most=8, together=True), st.data())
def test_a_cut_carries_every_output_that_is_still_used_once(graph: ModelGraph, data: st.DataObject) -> None:
    position = data.draw(st.integers(1, len(graph.nodes)))
    live = {a for a, b in graph.edges or () if a < position <= b}
    parted = any(a < position <= b for a, b in graph.together)
    expected = None if parted else sum(graph.nodes[a].output_bytes for a in live)
    assert graph.nodes[position - 1].cut_bytes == expected


def test_a_skip_connection_crosses_every_cut_that_it_jumps_over() -> None:
    nodes = [Node(f"op{i}", "", (), 0, None, 1.0, output_bytes=size) for i, size in enumerate([5, 3, 2])]
    graph = link_nodes(nodes, [(0, 1), (1, 2), (0, 2)])
    assert [node.cut_bytes for node in graph.nodes] == [5, 8, 0]
    assert link_nodes(nodes, [(0, 1), (1, 2)], [(0, 1)]).cut_positions() == (2,)


def test_seconds_add_up() -> None:
    graph = ModelGraph((Node("a", "", (), 0, 0, 1.0, 2.0, 4.0), Node("b", "", (), 0, 0, 0.5)))
    assert (graph.nodes[0].backward_s, graph.nodes[0].busy_s, graph.busy_s) == (6.0, 7.0, 7.5)


@pytest.mark.parametrize("pair", [(1, 0), (0, 0), (0, 2), (-1, 1)])
def test_edges_go_forward(pair: tuple[int, int]) -> None:
    nodes = (Node("a", "", (), 0, 0), Node("b", "", (), 0, 0))
    with pytest.raises(PlanError, match=f"joins positions {pair[0]} and {pair[1]} of 2 nodes"):
        ModelGraph(nodes, (pair,))


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", json.dumps({"format": 1, "nodes": [{}], "edges": None}), '{"format": 9}']
)
def test_what_is_no_graph_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="format 9" if "9" in text else "not a saved model graph"):
        ModelGraph.from_json(text)
