"""The states of a DAG: every set of nodes that can have run, with what it has cost and what it keeps alive.

        a --> b --> d         {}  {a}  {ab}  {ac}  {abc}  {abcd}
         \\         ^
          `-> c ---'          augmented antichain of {ab}: a and b, for c still needs a; its cut is a's and b's bytes

A state is closed under predecessors. Its maximal nodes are an antichain; with every other node that something
outside still needs they are the *augmented* antichain (PipeDream's graph.py), whose outputs cross a cut made
here: each live tensor once, skip connections included. A chain has one state more than nodes; branches
multiply.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import PlanError
from raypipe.ir.graph import ModelGraph
from raypipe.planner.partition.costs import Ints

__all__ = ["States", "enumerate_states"]

WORD = 64


class States(NamedTuple):
    """All states in order of time, and of size where that is equal; the first is empty, the last is the whole graph.

    Attributes:
        members: by state, a number whose bit i says that node i has run.
        words: the same as an array, shape (states, words).
        time_ps: of the members.
        cut_bytes: per sample, of the augmented antichain.
        closed: no cut is possible here.
    """

    members: tuple[int, ...]
    words: NDArray[np.uint64]
    time_ps: Ints
    cut_bytes: Ints
    closed: NDArray[np.bool_]

    def sums(self, values: Ints) -> Ints:
        """By state, the sum of a value per node over the members."""
        bits = np.unpackbits(self.words.view(np.uint8), axis=1, bitorder="little", count=len(values))
        total = np.zeros(len(self.members), dtype=np.int64)
        # A column at a time: a product of the two would first make a copy of eight bytes per bit.
        for node in np.flatnonzero(values):
            total += bits[:, node] * values[node]
        return total


class _Wires(NamedTuple):
    """Neighbours and what they cost, by node; sets of nodes are numbers with a bit per node.

    Attributes:
        needs: nodes that must have run before.
        followers: nodes that need this one.
        users: nodes that read its output.
        reads: nodes whose output it reads.
        output_bytes: that stay alive until the last user has run.
        parted: pairs of ``together`` that begin here, less those that end here.
    """

    needs: list[int]
    followers: list[list[int]]
    users: list[int]
    reads: list[list[int]]
    output_bytes: list[int]
    parted: list[int]

    def growth(self, node: int, state: int) -> int:
        """Change of the cut's bytes when ``node`` has run and made ``state``."""
        freed = sum(self.output_bytes[used] for used in self.reads[node] if not self.users[used] & ~state)
        return (self.output_bytes[node] if self.users[node] else 0) - freed


def enumerate_states(graph: ModelGraph, time_ps: Ints, max_states: int) -> States:
    """Every state of the graph; without edges, the chain of its own order.

    The last node of a state in execution order is maximal, for edges go forward: without it the state is one
    too. So each is made exactly once, by adding to another a node that comes after all of its own.

    Raises:
        PlanError: there are more than ``max_states``.
    """
    wires, times = _wires(graph), time_ps.tolist()
    ready = sum(1 << i for i, needs in enumerate(wires.needs) if not needs)
    # (members, later nodes that can run next, time, live bytes, pairs that a cut would part)
    found = [(0, ready, 0, 0, 0)]
    for state, open_nodes, spent, crossing, parted in found:  # grows while it is walked
        while open_nodes:
            bit = open_nodes & -open_nodes
            open_nodes ^= bit  # the smaller ones stay out of the states that follow
            if len(found) >= max_states:
                raise PlanError(
                    f"The graph of {len(graph.nodes)} nodes has more than {max_states} states between its branches: "
                    "use partitioner='prefix_sum', which cuts the nodes in their own order, or raise Limits.max_states."
                )
            node, new = bit.bit_length() - 1, state | bit
            following = open_nodes
            for follower in wires.followers[node]:
                if not wires.needs[follower] & ~new:
                    following |= 1 << follower
            grown = crossing + wires.growth(node, new)
            found.append((new, following, spent + times[node], grown, parted + wires.parted[node]))
    return _arrays(graph, found)


def _arrays(graph: ModelGraph, found: list[tuple[int, int, int, int, int]]) -> States:
    found.sort(key=lambda row: (row[2], row[0].bit_count()))
    words = -(-len(graph.nodes) // WORD)
    raw = b"".join(row[0].to_bytes(words * WORD // 8, "little") for row in found)
    rows = np.array([row[2:] for row in found], dtype=np.int64)
    return States(
        tuple(row[0] for row in found),
        np.frombuffer(raw, dtype="<u8").reshape(-1, words),
        rows[:, 0],
        rows[:, 1],
        rows[:, 2] > 0,
    )


def _wires(graph: ModelGraph) -> _Wires:
    """Of the graph's edges and of the pairs that must stay together, for those too run one after the other."""
    size = len(graph.nodes)
    if graph.edges is None:  # a chain whose outputs are its cuts
        edges = [(i, i + 1) for i in range(size - 1)]
        outputs = [node.cut_bytes or 0 for node in graph.nodes]
        together = [(i, i + 1) for i, node in enumerate(graph.nodes[:-1]) if node.cut_bytes is None]
    else:
        edges, together = sorted(set(graph.edges)), list(graph.together)
        outputs = [node.output_bytes for node in graph.nodes]
    wires = _Wires([0] * size, [[] for _ in range(size)], [0] * size, [[] for _ in range(size)], outputs, [0] * size)
    for earlier, later in {*edges, *together, *graph.before}:
        wires.needs[later] |= 1 << earlier
        wires.followers[earlier].append(later)
    for earlier, later in edges:
        wires.users[earlier] |= 1 << later
        wires.reads[later].append(earlier)
    for earlier, later in together:
        wires.parted[earlier] += 1
        wires.parted[later] -= 1
    return wires
