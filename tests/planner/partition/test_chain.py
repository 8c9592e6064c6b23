"""Cutting by parameters: as good as trying every cut, and refusals that say what to change."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import PlanError
from raypipe.ir.graph import ModelGraph, Node
from raypipe.planner.partition.chain import equal_parameters, split_before


def _graph(costs: list[int], cuts: list[int | None] | None = None) -> ModelGraph:
    cuts = cuts or [1] * len(costs)
    return ModelGraph(
        tuple(
            Node(f"op{i}", f"layers.{i // 2}", (), cost, cut)
            for i, (cost, cut) in enumerate(zip(costs, cuts, strict=True))
        )
    )


@given(st.data())
def test_no_cut_has_a_smaller_largest_stage_or_less_traffic_at_equal_size(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=8))
    cuts = data.draw(st.lists(st.none() | st.integers(1, 5), min_size=len(costs), max_size=len(costs)))
    num_stages = data.draw(st.integers(1, 4))
    graph = _graph(costs, cuts)
    weights = costs if any(costs) else [1] * len(costs)

    def score(positions: tuple[int, ...]) -> tuple[int, int]:
        bounds = [0, *positions, len(costs)]
        stages = [sum(weights[a:b]) for a, b in pairwise(bounds)]
        return max(stages), sum(cuts[p - 1] or 0 for p in positions)

    def fair(positions: tuple[int, ...]) -> bool:  # every stage has something to hold
        bounds = [0, *positions, len(costs)]
        return all(sum(weights[a:b]) for a, b in pairwise(bounds))

    possible = [p for p in combinations(graph.cut_positions(), num_stages - 1) if fair(p)]
    if not possible:
        with pytest.raises(PlanError, match="at most"):
            equal_parameters(graph, num_stages)
        return
    found = equal_parameters(graph, num_stages)
    assert score(found.cuts) == min(map(score, possible))
    assert found.stages[0].start == 0
    assert found.stages[-1].stop == len(costs)
    assert all(a.stop == b.start for a, b in pairwise(found.stages))


def test_stages_say_what_they_hold_and_receive() -> None:
    partition = equal_parameters(_graph([4, 0, 4, 4], [7, 5, 6, None]), 3)
    assert partition.cuts == (2, 3)  # the cut after op1 carries 5 bytes, the one after op0 would carry 7
    assert [(s.param_bytes, s.input_bytes, s.first_node) for s in partition.stages] == [
        (4, 0, "op0"),
        (4, 5, "op2"),
        (4, 6, "op3"),
    ]


def test_split_points_begin_stages() -> None:
    graph = _graph([1] * 6)
    assert split_before(graph, ["layers.1", "layers.2"]).cuts == (2, 4)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["layers.4"], r"cannot be cut before 'layers\.4'"),  # inside a tied knot
        (["layer.1"], r"'layer.1', which no operation belongs to. Near names: .*layers.1"),
        (["layers.2", "layers.1"], "'layers.1' out of order"),
        (["layers.0"], "cannot be cut before 'layers.0'"),
    ],
)
def test_impossible_split_points_are_refused_by_name(modules: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        split_before(_graph([1] * 10, [1] * 7 + [None] + [1] * 2), modules)
