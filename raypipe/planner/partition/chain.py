"""Cut a chain of nodes into stages of about equal parameters, or at given modules.

The largest stage is as small as possible; among such cuts the one with the least traffic is taken. Seconds and memory
are not considered, so a stage with few parameters may still be the slowest.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence

from raypipe.errors import PlanError
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition, Stage


def equal_parameters(graph: ModelGraph, num_stages: int) -> Partition:
    """Find the partition whose largest stage has the fewest parameter bytes.

    Of all positions with the same parameter bytes before them, only the one with the least traffic may be a cut.
    Dynamic programming over these positions takes O(S p^2) for S stages and p operations with parameters. A model
    without parameters is cut by the number of nodes.

    Raises:
        PlanError: more stages than places to cut.
    """
    costs = [node.param_bytes for node in graph.nodes]
    if not any(costs):
        costs = [1] * len(costs)
    before = [0]
    for cost in costs:
        before.append(before[-1] + cost)
    places: dict[int, int] = {}  # bytes before the cut -> the position with the least traffic
    for position in graph.cut_positions():
        done = before[position]
        if 0 < done < before[-1] and (done not in places or _traffic(graph, position) < _traffic(graph, places[done])):
            places[done] = position
    if len(places) < num_stages - 1:
        raise PlanError(
            f"{num_stages} stages need {num_stages - 1} places to cut, but the model has {len(places)} between its "
            "operations with parameters; activations and others without parameters do not count, for a stage of them "
            f"alone would have nothing to train. Set num_stages to at most {len(places) + 1}."
        )
    positions = _least_worst([places[done] for done in sorted(places)], before, graph, num_stages)
    worst = max(stop - start for start, stop in _spans(positions, before))
    share = worst * num_stages / before[-1] - 1
    unit = "parameters" if any(node.param_bytes for node in graph.nodes) else "operations"
    return _partition(graph, positions, f"stages of about equal {unit}, the largest {share:.0%} above the mean")


def _traffic(graph: ModelGraph, position: int) -> int:
    return graph.nodes[position - 1].cut_bytes or 0


def _spans(positions: Sequence[int], before: Sequence[int]) -> list[tuple[int, int]]:
    bounds = [0, *(before[p] for p in positions), before[-1]]
    return list(itertools.pairwise(bounds))


def _least_worst(places: list[int], before: list[int], graph: ModelGraph, num_stages: int) -> list[int]:
    """Choose cuts among ``places`` by dynamic programming, with one more stage per round.

    best[j] is (largest stage, traffic, cuts) for the nodes before places[j].

    Args:
        places: positions that may be cut, ascending.
        before: parameter bytes before each position of the graph.
    """
    ends = [*places, len(graph.nodes)]
    best: list[tuple[int, int, list[int]] | None] = [(before[end], 0, []) for end in ends]
    for _ in range(num_stages - 1):
        following: list[tuple[int, int, list[int]] | None] = []
        for j, end in enumerate(ends):
            candidates = [
                (
                    max(option[0], before[end] - before[ends[i]]),
                    option[1] + _traffic(graph, ends[i]),
                    [*option[2], ends[i]],
                )
                for i in range(j)
                if (option := best[i]) is not None
            ]
            following.append(min(candidates) if candidates else None)
        best = following
    answer = best[-1]
    assert answer is not None
    return answer[2]


def split_before(graph: ModelGraph, modules: Sequence[str]) -> Partition:
    """Cut a graph so that a new stage begins at the first operation of each of these modules.

    Args:
        modules: dotted names as in named_modules(); a name also stands for everything inside it.

    Raises:
        PlanError: a module does not exist, is out of order, or cannot begin a stage; names the module.
    """
    possible = set(graph.cut_positions())
    positions: list[int] = []
    for name in modules:
        members = [i for i, n in enumerate(graph.nodes) if n.module == name or n.module.startswith(f"{name}.")]
        if not members:
            known = list(dict.fromkeys(node.module for node in graph.nodes if node.module))
            near = difflib.get_close_matches(name, known, n=3)
            raise PlanError(
                f"partitioner names {name!r}, which no operation belongs to. Near names: {near or known[:5]}."
            )
        position = members[0]
        if position not in possible:
            raise PlanError(
                f"The model cannot be cut before {name!r}: nothing that can travel is complete there (an in-place "
                "operation, a tuple, or the very beginning). Choose a neighbouring module."
            )
        if positions and position <= positions[-1]:
            raise PlanError(f"partitioner names {name!r} out of order: it runs before {modules[len(positions) - 1]!r}.")
        positions.append(position)
    return _partition(graph, positions, "cut as set by PipelineConfig.partitioner")


def _partition(graph: ModelGraph, positions: Sequence[int], reason: str) -> Partition:
    bounds = [0, *positions, len(graph.nodes)]
    stages = []
    for index in range(len(bounds) - 1):
        start, stop = bounds[index], bounds[index + 1]
        nodes = graph.nodes[start:stop]
        stages.append(
            Stage(
                index=index,
                start=start,
                stop=stop,
                first_node=nodes[0].name,
                last_node=nodes[-1].name,
                param_bytes=sum(node.param_bytes for node in nodes),
                input_bytes=_traffic(graph, start) if start else 0,
            )
        )
    return Partition(tuple(stages), reason)
