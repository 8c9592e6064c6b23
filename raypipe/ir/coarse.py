"""A graph at a coarser grain: groups of nodes become one node each.

    conv2d | add_, batch_norm | relu | conv2d | ...       operations
      conv |     bn           | relu |  conv  | ...       layers: runs of operations of one module

Tables of the literature count layers, and solvers are faster on fewer nodes. A group must be convex: no path may
leave it and come back, or a stage could not run it as a whole. Seconds and bytes of the members are added. What is
lost: a group's output is all that leaves any of its members, even where a part of it is no longer needed.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from raypipe.errors import PlanError
from raypipe.ir.graph import ModelGraph, Node, link_nodes
from raypipe.ir.lines import Lines, lowered, pruned

__all__ = ["CoarseGraph", "group_nodes", "merge_nodes", "module_groups"]

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CoarseGraph:
    """A grouped graph with the way back.

    Attributes:
        graph: one node per group, in an order in which they can run.
        members: positions in the fine graph, by node.
    """

    graph: ModelGraph
    members: tuple[tuple[int, ...], ...]

    def expand(self, cuts: Sequence[int], order: Sequence[int] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(cuts, order) of the fine graph for those of this one; the order is empty where it is the fine graph's own.

        Args:
            cuts: positions between groups, in ``order`` where that is given.
        """
        groups = [self.members[i] for i in (order or range(len(self.members)))]
        fine = tuple(itertools.chain.from_iterable(groups))
        ends = [0, *itertools.accumulate(len(group) for group in groups)]
        return tuple(ends[cut] for cut in cuts), () if fine == tuple(range(len(fine))) else fine


def module_groups(graph: ModelGraph, depth: int | None = None) -> tuple[int, ...]:
    """A label per node: successive operations of the same module share it.

    Args:
        depth: count only so many parts of a module's dotted name; None for all, which is the leaf modules and the
            operations between them.
    """
    names = [node.module if depth is None else ".".join(node.module.split(".")[:depth]) for node in graph.nodes]
    changes = (int(a != b) for a, b in itertools.pairwise(names))
    return tuple(itertools.accumulate(changes, initial=0)) if names else ()


def group_nodes(graph: ModelGraph, groups: Sequence[Hashable]) -> CoarseGraph:
    """Contract a graph.

    Nodes that must share a stage may be in different groups; then their groups must share one.

    Args:
        groups: a label per node; nodes of one label become one node, named by the first and the last of them.

    Raises:
        PlanError: a group is not convex, or there is not one label per node.
    """
    if len(groups) != len(graph.nodes):
        raise PlanError(f"{len(groups)} labels for {len(graph.nodes)} nodes: give one group per node of the graph.")
    found: dict[Hashable, list[int]] = {}
    for position, label in enumerate(groups):
        found.setdefault(label, []).append(position)
    parts = list(found.values())
    group = {position: index for index, part in enumerate(parts) for position in part}
    chain = itertools.pairwise(range(len(graph.nodes))) if graph.edges is None else graph.edges
    order = _run_order(graph, parts, {(group[a], group[b]) for a, b in (*chain, *graph.together, *graph.before)})
    place = {index: at for at, index in enumerate(order)}
    members = tuple(tuple(parts[index]) for index in order)

    def between(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
        joined = dict.fromkeys((place[group[a]], place[group[b]]) for a, b in pairs)
        return tuple((a, b) for a, b in joined if a != b)

    nodes = _merged(graph, members, {position: place[index] for position, index in group.items()})
    together, before = between(graph.together), between(graph.before)
    if graph.edges is None:
        return CoarseGraph(ModelGraph(nodes, None, together, before), members)
    linked = link_nodes(nodes, between(graph.edges), together, before)
    if all(a < b for a, b in itertools.pairwise(itertools.chain.from_iterable(members))):
        linked = dataclasses.replace(linked, nodes=nodes)  # the fine graph knows to the byte what crosses
    return CoarseGraph(linked, members)


def _merged(graph: ModelGraph, members: Sequence[Sequence[int]], place: Mapping[int, int]) -> tuple[Node, ...]:
    """One node for each group; its output is that of all members that another group reads.

    Args:
        place: of each node's group.
    """
    leaving: list[set[int]] = [set() for _ in members]
    for a, b in graph.edges or ():
        if place[a] != place[b]:
            leaving[place[a]].add(a)
    return tuple(
        merge_nodes([graph.nodes[i] for i in part], sum(graph.nodes[i].output_bytes for i in out))
        for part, out in zip(members, leaving, strict=True)
    )


def _run_order(graph: ModelGraph, parts: list[list[int]], pairs: Iterable[Pair]) -> list[int]:
    """Groups in an order in which they can run, as near to that of their last nodes as can be."""
    waits: list[set[int]] = [set() for _ in parts]
    followers: list[set[int]] = [set() for _ in parts]
    for a, b in pairs:
        if a != b:
            waits[b].add(a)
            followers[a].add(b)
    ready = [(parts[i][-1], i) for i, needs in enumerate(waits) if not needs]
    heapq.heapify(ready)
    order = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for follower in followers[index]:
            waits[follower].discard(index)
            if not waits[follower]:
                heapq.heappush(ready, (parts[follower][-1], follower))
    if len(order) < len(parts):
        stuck = max((part for i, part in enumerate(parts) if i not in order), key=len)
        first, last = graph.nodes[stuck[0]].name, graph.nodes[stuck[-1]].name
        raise PlanError(
            f"The group of {first!r} ... {last!r} is not convex: a path leaves it, or one bound up with it, and comes "
            "back, so no stage could run it as a whole. Split the group where the path leaves it."
        )
    return order


def merge_nodes(nodes: Sequence[Node], output_bytes: int = 0) -> Node:
    """One node for all; ``cut_bytes`` as after the last of them.

    Args:
        output_bytes: of what leaves them, 0 for the last one's output.
    """
    first, last = nodes[0], nodes[-1]
    if len(nodes) == 1:
        return first
    modules = {node.module for node in nodes}
    sources = {node.source for node in nodes if node.source}
    return Node(
        name=f"{first.name}...{last.name}",
        module=_common(modules),
        param_names=tuple(dict.fromkeys(name for node in nodes for name in node.param_names)),
        param_bytes=sum(node.param_bytes for node in nodes),
        cut_bytes=last.cut_bytes,
        forward_s=sum(node.forward_s for node in nodes),
        backward_input_s=sum(node.backward_input_s for node in nodes),
        backward_weight_s=sum(node.backward_weight_s for node in nodes),
        activation_bytes=sum(node.activation_bytes for node in nodes),
        output_bytes=output_bytes or last.output_bytes,
        frozen_bytes=sum(node.frozen_bytes for node in nodes),
        buffer_bytes=sum(node.buffer_bytes for node in nodes),
        source="estimated" if "estimated" in sources else next(iter(sources), ""),
        workspace=_joint_workspace(nodes),
    )


def _joint_workspace(nodes: Sequence[Node]) -> Lines:
    """Above what all of them keep: when one's backward runs, those after it have let go of theirs."""
    after = 0
    lines: list[tuple[int, int]] = []
    for node in reversed(nodes):
        lines += lowered(node.workspace, after)
        after += node.activation_bytes
    return pruned(lines)


def _common(modules: set[str]) -> str:
    """The innermost module that all of them are in."""
    parts = [name.split(".") for name in modules]
    shared = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False))
    return ".".join(column[0] for column in shared)
