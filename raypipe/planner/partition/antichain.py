"""Bottleneck-optimal partition of a DAG, over all ways to cut it (the antichain method; PipeDream's construction).

        a --> b --> d         {}  {a}  {ab}  {ac}  {abc}  {abcd}
         \\         ^
          `-> c ---'          augmented antichain of {ab}: a and b, for c still needs a; a's and b's bytes cross the cut

A *state* is a set of nodes that can have run: it is closed under predecessors. Its maximal nodes are an antichain. They
and all other nodes of the state whose outputs are needed outside form the *augmented* antichain (PipeDream's graph.py).
Its outputs cross a cut at this state: each live tensor once, skip connections included. A chain has one state more than
nodes; branches multiply.

A stage is the difference of two nested states. Stages are added from the last to the first, each by one step of the
device order (``Lineup``). T_j is the time of all nodes in state j; before and after are the devices in use before and
after the step:

    best[after][i] = min over states j that contain i of max(best[before][j], traffic(j), (T_j - T_i) / speed)

This is a product of a vector and a matrix with max and min in place of product and sum, computed in blocks. Few pairs
of states matter: the best cut in the nodes' own order (``prefix_sum``) bounds the answer from above. States for which
the devices before or after the cut would need longer than this bound are left out, and each row has a narrow band of
possible columns.

                  T_j
          x x . . . .        x: j contains i, and T_j - T_i is within the bound
    T_i   . x x x . .
          . . . x x x
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import ModelGraph, link_nodes
from raypipe.ir.plan import Partition
from raypipe.planner.cost.columns import cached_by_graph, columns_of
from raypipe.planner.partition.answer import Piece, make_answer
from raypipe.planner.partition.costs import PICO, Ints, Limits, exchange_ps, node_picoseconds
from raypipe.planner.partition.device_order import Lineup, Step, line_up
from raypipe.planner.partition.prefix_sum import prefix_sum

WORD = 64
KEPT = 2
"""Number of graphs whose states are cached: each of two micro-batch sizes is tried with several numbers of stages."""


class States(NamedTuple):
    """States (ideals) in order of time, then of size; the first is empty, the last is the whole graph.

    Attributes:
        members: by state, an integer whose bit i is set if node i has run.
        words: members as an array, shape (states, words).
        time_ps: total time of the members.
        cut_bytes: bytes of one sample that cross a cut at this state.
        closed: True if no cut is possible at this state.
    """

    members: tuple[int, ...]
    words: NDArray[np.uint64]
    time_ps: Ints
    cut_bytes: Ints
    closed: NDArray[np.bool_]

    def sums(self, values: Ints) -> Ints:
        """Sum a per-node value over the members of each state; shape (states,)."""
        bits = np.unpackbits(self.words.view(np.uint8), axis=1, bitorder="little", count=len(values))
        total = np.zeros(len(self.members), dtype=np.int64)
        # A column at a time: a product of the two would first make a copy of eight bytes per bit.
        for node in np.flatnonzero(values):
            total += bits[:, node] * values[node]
        return total


class _Wires(NamedTuple):
    """Dependencies between nodes, by node; a set of nodes is an integer with one bit per node.

    Attributes:
        needs: nodes that must have run before.
        followers: nodes that need this one.
        users: nodes that read its output.
        reads: nodes whose output it reads.
        output_bytes: bytes of the output, which stay alive until the last user has run.
        parted: number of pairs of ``ModelGraph.together`` that begin at the node, minus the number that end there.
    """

    needs: list[int]
    followers: list[list[int]]
    users: list[int]
    reads: list[list[int]]
    output_bytes: list[int]
    parted: list[int]

    def growth(self, node: int, state: int) -> int:
        """Return by how many bytes the cut grows when ``node`` runs; negative if it frees more than its output takes.

        Args:
            state: set of executed nodes afterwards, with ``node``.
        """
        freed = sum(self.output_bytes[used] for used in self.reads[node] if not self.users[used] & ~state)
        return (self.output_bytes[node] if self.users[node] else 0) - freed


def enumerate_states(graph: ModelGraph, time_ps: Ints, max_states: int) -> States:
    """List every state of the graph; a graph with ``edges=None`` is a chain in the order of its nodes.

    A state stays closed under predecessors without its last node, because edges go forward in execution order. So every
    state is made exactly once: from the state without its last node.

    Args:
        time_ps: picoseconds of each node.
        max_states: largest allowed number of states.

    Raises:
        PlanError: there are more than ``max_states``.
    """
    wires, times = _wires(graph), time_ps.tolist()
    ready = sum(1 << i for i, needs in enumerate(wires.needs) if not needs)
    # (members, later nodes that can run next, time, live bytes, pairs that a cut would part)
    states = [(0, ready, 0, 0, 0)]
    for state, open_nodes, spent, crossing, parted in states:  # grows while it is walked
        while open_nodes:
            bit = open_nodes & -open_nodes
            open_nodes ^= bit  # the smaller ones stay out of the states that follow
            if len(states) >= max_states:
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
            states.append((new, following, spent + times[node], grown, parted + wires.parted[node]))
    return _arrays(graph, states)


def _arrays(graph: ModelGraph, states: list[tuple[int, int, int, int, int]]) -> States:
    states.sort(key=lambda row: (row[2], row[0].bit_count()))
    words = -(-len(graph.nodes) // WORD)
    raw = b"".join(row[0].to_bytes(words * WORD // 8, "little") for row in states)
    rows = np.array([row[2:] for row in states], dtype=np.int64)
    return States(
        tuple(row[0] for row in states),
        np.frombuffer(raw, dtype="<u8").reshape(-1, words),
        rows[:, 0],
        rows[:, 1],
        rows[:, 2] > 0,
    )


def _wires(graph: ModelGraph) -> _Wires:
    """Collect the dependencies of each node, from the graph's edges and its pairs ``together`` and ``before``."""
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


BLOCK = 1 << 20
"""Most pairs of states in one block of the computation."""

MAX_UNBOUNDED = 8192
"""Most states for a search without an upper bound, if the nodes' own order has no cut within the limits."""

Floats = NDArray[np.float64]


class _Problem(NamedTuple):
    """Data that all steps of the dynamic program share.

    Attributes:
        bound_ps: upper bound of the least period; infinite if unknown.
        traffic_ps: picoseconds of the messages over a cut at each state, by bandwidth.
        memory: bytes of each state's nodes, by depth of the stage; empty without memory limits.
        sync_bytes: bytes of the trainable parameters in each state.
        sync_ps_per_byte: picoseconds in which replicas sum one byte of gradients, by depth; empty without replicas.
    """

    states: States
    lineup: Lineup
    bound_ps: float
    traffic_ps: dict[float, Ints]
    memory: dict[int, Ints]
    sync_bytes: Ints
    sync_ps_per_byte: dict[int, float]


class _Table(NamedTuple):
    """Tables of the recurrence; shape (states of the device order, states of the graph).

    Attributes:
        best_ps: least period in picoseconds of the stages from this state of the graph to its end.
        next_state: state of the graph after the first of these stages.
        by_step: index of the device order's step that adds this stage.
    """

    best_ps: Floats
    next_state: Ints
    by_step: Ints


def antichain(graph: ModelGraph, cluster: Cluster, limits: Limits) -> Partition:
    """Cut a DAG so that the slowest stage or cut is as fast as possible; a stage's nodes need not be neighbours.

    The result is exact, unless the cluster has many kinds of devices; see ``device_order``. A graph with ``edges=None``
    is a chain in the order of its nodes, and gets the partition of ``prefix_sum``.

    Raises:
        PlanError: nothing profiled, too many states, or the limits cannot be kept.
    """
    graph, states = _linked(graph, limits.max_states)
    lineup = line_up(cluster, limits)
    refusal = None
    try:
        bound_ps = prefix_sum(graph, cluster, limits).bottleneck_s * PICO * (1 + 1e-9) + 2
    except PlanError as error:  # the order of the nodes allows no cut; another order may
        if len(states.members) > MAX_UNBOUNDED:
            raise
        refusal, bound_ps = error, math.inf
    problem = _problem(graph, limits, states, lineup, bound_ps)
    table = _solve(problem)
    goals = [(float(table.best_ps[g, 0]), lineup.depths[g], g) for g in lineup.goals(limits.num_stages)]
    period_ps, _, goal = min(goals, default=(math.inf, 0, 0))
    if math.isinf(period_ps):
        raise refusal or PlanError(f"antichain finds no cut into {limits.num_stages} stages: set num_stages lower.")
    pieces = _pieces(problem, table, goal)
    return make_answer(graph, cluster, limits, pieces, period_ps / PICO, "antichain")


@cached_by_graph(KEPT)
def _linked(graph: ModelGraph, max_states: int) -> tuple[ModelGraph, States]:
    """Return (graph with ``cut_bytes`` computed from its edges, states of the graph); the latest are cached."""
    if graph.edges is not None:
        graph = link_nodes(graph.nodes, graph.edges, graph.together, graph.before)
    return graph, enumerate_states(graph, node_picoseconds(graph), max_states)


def _problem(graph: ModelGraph, limits: Limits, states: States, lineup: Lineup, bound_ps: float) -> _Problem:
    """Build the data that all steps of the dynamic program share."""
    cut_bytes = states.cut_bytes * limits.memory.microbatch_size
    bandwidths = {step.bandwidth_bytes_s for step in lineup.steps}
    limited = any(kind.capacity_bytes is not None for kind in lineup.kinds)
    depths = set(lineup.depths) - {0} if limited else set()
    parts = [states.sums(part) for part in limits.memory.node_parts(graph)] if limited else []
    return _Problem(
        states,
        lineup,
        bound_ps,
        {bandwidth: exchange_ps(cut_bytes, bandwidth, limits.codecs) for bandwidth in bandwidths},
        {depth: limits.memory.at_depth(np.stack(parts), depth) for depth in depths},
        states.sums(columns_of(graph).trainable_bytes),
        {depth: limits.sync_ps_per_byte(depth) for depth in set(lineup.depths) - {0} if limits.sync_s_per_byte},
    )


def _solve(problem: _Problem) -> _Table:
    states, lineup = problem.states, problem.lineup
    shape = (len(lineup.depths), len(states.members))
    table = _Table(np.full(shape, np.inf), np.full(shape, -1, dtype=np.int64), np.full(shape, -1, dtype=np.int64))
    table.best_ps[0, -1] = 0.0
    windows = [_window(problem, place) for place in range(len(lineup.depths))]
    for number, step in enumerate(lineup.steps):
        gate = np.maximum(table.best_ps[step.before], problem.traffic_ps[step.bandwidth_bytes_s])
        columns = np.flatnonzero((gate <= problem.bound_ps) & windows[step.before])
        rows = np.flatnonzero(windows[step.after])
        for part, band in _blocks(problem, step, rows, columns):
            period = _periods(problem, step, part, band, gate[band])
            nearest = period.argmin(axis=1)
            value = period[np.arange(len(part)), nearest]
            better = value < table.best_ps[step.after, part]
            chosen = part[better]
            table.best_ps[step.after, chosen] = value[better]
            table.next_state[step.after, chosen] = band[nearest[better]]
            table.by_step[step.after, chosen] = number
    return table


def _window(problem: _Problem, place: int) -> NDArray[np.bool_]:
    """Mask the graph states at which the pipeline may be cut in front of the devices in use.

    A state is left out if it allows no cut, or if the nodes before or after it would take longer than the bound.

    Args:
        place: index of the state of the device order (``Lineup``), which determines the devices in use.
    """
    states, lineup = problem.states, problem.lineup
    time_ps = states.time_ps
    keep = ~states.closed
    if math.isfinite(problem.bound_ps):
        slack = 1 + 1e-9  # sums of speeds are rounded
        keep &= time_ps[-1] - time_ps <= problem.bound_ps * lineup.used_speed[place] * slack
        keep &= time_ps <= problem.bound_ps * lineup.free_speed[place] * slack
    return keep


def _blocks(problem: _Problem, step: Step, rows: Ints, columns: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Divide the pairs of graph states that may enclose the next stage into blocks (rows, columns).

    Most pairs that enclose a longer time than the period bound are left out.

    Args:
        rows, columns: indices of graph states, in order of time: before the stage that ``step`` adds, and after it.
    """
    time_ps = problem.states.time_ps
    reach = problem.bound_ps * problem.lineup.kinds[step.kind].speed
    times = time_ps[columns].astype(np.float64)
    start = 0
    while start < len(rows):
        first = int(np.searchsorted(times, time_ps[rows[start]]))
        count = max(1, BLOCK // max(1, int(np.searchsorted(times, time_ps[rows[start]] + reach, "right")) - first))
        part = rows[start : start + min(count, 256)]
        band = columns[first : int(np.searchsorted(times, time_ps[part[-1]] + reach, "right"))]
        if len(band):
            yield part, band
        start += len(part)


def _periods(problem: _Problem, step: Step, rows: Ints, columns: Ints, gate: Floats) -> Floats:
    """Compute the period in picoseconds if the nodes between a row's and a column's state become a stage.

    The shape is (rows, columns). Pairs that cannot become a stage have an infinite period.

    Args:
        rows, columns: indices of graph states before the stage that ``step`` adds, and after it.
        gate: by column, the period of the later stages, or of the messages to them if these take longer.
    """
    states, (speed, capacity, _) = problem.states, problem.lineup.kinds[step.kind]
    spent = states.time_ps[columns] - states.time_ps[rows, None]
    busy = spent / speed
    depth = problem.lineup.depths[step.after]
    if rate := problem.sync_ps_per_byte.get(depth, 0.0):
        busy = busy + rate * (problem.sync_bytes[columns] - problem.sync_bytes[rows, None])
    period = np.maximum(busy, gate)
    refused = columns == rows[:, None]
    if capacity is not None:
        memory = problem.memory[depth]
        refused |= memory[columns] - memory[rows, None] > capacity
    inside, outside = states.words[rows], ~states.words[columns]
    # Nodes are numbered in execution order, so most words are full or empty in a whole block.
    telling = np.bitwise_or.reduce(inside, axis=0) & np.bitwise_or.reduce(outside, axis=0)
    for word in np.flatnonzero(telling):
        refused |= (inside[:, word, None] & outside[None, :, word]) != 0
    period[refused] = np.inf
    return period


def _pieces(problem: _Problem, table: _Table, place: int) -> list[Piece]:
    """Read the stages of the best partition from the table, first to last.

    Args:
        place: state of the device order (``Lineup``) in which all stages have devices.
    """
    states, lineup = problem.states, problem.lineup
    spans, state = [], 0
    while place:
        step, following = lineup.steps[table.by_step[place, state]], int(table.next_state[place, state])
        spans.append((state, following, step))
        place, state = step.before, following
    devices = lineup.assign([step.kind for _, _, step in spans])
    pieces = []
    for (before, after, step), device in zip(spans, devices, strict=True):
        fresh = states.members[after] & ~states.members[before]
        nodes = [i for i in range(fresh.bit_length()) if fresh >> i & 1]
        busy_ps = int(states.time_ps[after] - states.time_ps[before]) / lineup.kinds[step.kind].speed
        pieces.append(Piece(nodes, (device,), busy_ps / PICO, int(states.cut_bytes[before])))
    return pieces
