"""The least slow stage of a DAG, over all ways to cut it (the antichain method; PipeDream's construction).

A stage is what lies between two nested states (see ``states``). From the last stage to the first, one step of
the lineup at a time:

    best[after][i] = min over states j that contain i of max(best[before][j], traffic(j), (T_j - T_i) / speed)

a max-plus product of a vector and a matrix, done in blocks of numpy. Few pairs of states matter: the cut of the
same nodes in their own order (``prefix_sum``) bounds the answer from above, so that a state which the devices
behind it, or those before it, cannot reach in that time is left out, and of the others each row looks at a band.

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
from raypipe.planner.columns import columns_of
from raypipe.planner.partition.answer import Piece, make_answer
from raypipe.planner.partition.costs import PICO, Ints, exchange_ps, node_picoseconds
from raypipe.planner.partition.limits import Limits
from raypipe.planner.partition.lineup import Lineup, Step, line_up
from raypipe.planner.partition.prefix_sum import prefix_sum
from raypipe.planner.partition.states import States, enumerate_states

__all__ = ["antichain"]

BLOCK = 1 << 20
"""Pairs of states that are looked at together."""

MAX_UNBOUNDED = 8192
"""States that may be searched without a bound from above, when the nodes' own order has no cut within the limits."""

Floats = NDArray[np.float64]


class _Problem(NamedTuple):
    """All that steps share.

    Attributes:
        bound_ps: a period that can be kept.
        traffic_ps: of the cut at each state, by bandwidth.
        memory: bytes of each state's nodes, by depth; empty without memory limits.
        sync_bytes: of each state's parameters that learn.
        sync_ps_per_byte: what replicas take to sum a byte of those, by depth; empty without replicas.
    """

    states: States
    lineup: Lineup
    bound_ps: float
    traffic_ps: dict[float, Ints]
    memory: dict[int, Ints]
    sync_bytes: Ints
    sync_ps_per_byte: dict[int, float]


class _Table(NamedTuple):
    """The recurrence's values, by state of the lineup and state of the graph, and where they came from."""

    best_ps: Floats
    next_state: Ints
    by_step: Ints


def antichain(graph: ModelGraph, cluster: Cluster, limits: Limits) -> Partition:
    """Cut a DAG so that the slowest stage or cut is as fast as possible; stages may interleave in execution order.

    Exact for any costs, memory limits and numbers of devices of few kinds; see ``lineup`` for many kinds. Without
    ``graph.edges`` it is the chain of its own order, and the answer is ``prefix_sum``'s.

    Raises:
        PlanError: nothing profiled, too many states, or the limits cannot be kept.
    """
    if graph.edges is not None:
        graph = link_nodes(graph.nodes, graph.edges, graph.together, graph.before)
    states = enumerate_states(graph, node_picoseconds(graph), limits.max_states)
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


def _problem(graph: ModelGraph, limits: Limits, states: States, lineup: Lineup, bound_ps: float) -> _Problem:
    """What does not depend on the step that is looked at."""
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
    """Graph states that can stand at the front of these devices: neither side would take longer than the bound."""
    states, lineup = problem.states, problem.lineup
    time_ps = states.time_ps
    keep = ~states.closed
    if math.isfinite(problem.bound_ps):
        slack = 1 + 1e-9  # sums of speeds are rounded
        keep &= time_ps[-1] - time_ps <= problem.bound_ps * lineup.used_speed[place] * slack
        keep &= time_ps <= problem.bound_ps * lineup.free_speed[place] * slack
    return keep


def _blocks(problem: _Problem, step: Step, rows: Ints, columns: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Rows with the columns in their band; both are in order of time."""
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
    """Picoseconds by pair; infinite where the pair is no stage. Shape (rows, columns)."""
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
    """Follow the table from the empty state to the whole graph."""
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
