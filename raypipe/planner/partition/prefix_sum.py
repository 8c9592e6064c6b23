"""Bottleneck-optimal partition of a chain, by probing prefix sums (after Lv et al., CCGrid'23).

A probe tests whether every stage can stay within a period. It walks from the last stage to the first, because a
stage's depth, and with it its weight versions and micro-batches in flight, counts from the end. A place is a position
where the chain may be cut, or one of its two ends:

    place     0   1   2   3   4   5   6   7   8
    reached                               x   x    places from which the stages so far can cover all nodes to the end
    hi(p)     4   5   7   8   8   9   9   9   9    first place at which a stage that begins at place p may not end
    reached               x   x   x   x   x        with one stage more: p with a reached place after p, before hi(p)

Reached places are counted from the left, so that a probe takes O(places) for each transition of the device order
(``Lineup``). A place whose messages take longer than the period is not cut in that probe. The least period is searched
for in whole picoseconds, so that the result is exact.

Only the abstract of the paper was available; this construction is ours.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition
from raypipe.planner.cost.columns import prefix
from raypipe.planner.partition.answer import Piece, make_answer, no_cut_fits
from raypipe.planner.partition.costs import PICO, Chain, Ints, Limits, chain_costs, exchange_ps, least_feasible
from raypipe.planner.partition.device_order import Lineup, Step, line_up

Bools = NDArray[np.bool_]
ROUNDING = 1e-12
"""Relative error of a time divided by a speed, by which bounds of periods are widened."""


class _Problem(NamedTuple):
    """Data that all probes share.

    Attributes:
        time_ps: picoseconds of all nodes before each place, by depth of the stage, because stages may recompute or sum
            gradients.
        memory: prefix sums of a stage's bytes at the places, by depth.
        traffic_ps: picoseconds of the messages over a cut at each place, by bandwidth.
        by_memory: cache of ``_ends_by_memory``, by depth and bytes.
    """

    chain: Chain
    lineup: Lineup
    limits: Limits
    time_ps: dict[int, Ints]
    memory: dict[int, Ints]
    traffic_ps: dict[float, Ints]
    by_memory: dict[tuple[int, int], Ints]


class _Cut(NamedTuple):
    """Stage of a successful probe: the nodes between two places, and the step that gives its kind of device."""

    first: int
    last: int
    step: Step


def prefix_sum(graph: ModelGraph, cluster: Cluster, limits: Limits) -> Partition:
    """Cut the nodes, in their own order, so that the slowest stage or cut is as fast as possible.

    The result is exact, unless the cluster has many kinds of devices; see ``device_order``.

    Raises:
        PlanError: nothing profiled, too few places to cut, or the memory limits cannot be kept; names the stage.
    """
    problem = _problem(graph, cluster, limits)
    lowest, highest = _bounds(problem)
    least = least_feasible(
        lambda period_ps: _probe(problem, period_ps),
        lowest,
        highest,
        following=lambda period_ps: _following(problem, period_ps),
        enough=lambda cuts: _kept_ps(problem, cuts),
    )
    if least is None:
        raise no_cut_fits(graph, cluster, limits, nearest_cut(graph, cluster, limits))
    return _answer(graph, cluster, problem, least[1], "prefix_sum")


def any_cut(graph: ModelGraph, cluster: Cluster, limits: Limits) -> Partition:
    """Return some cut within the memory limits, ignoring time: a single probe, for frequent calls.

    Raises:
        PlanError: no cut fits; the error of ``prefix_sum`` has the numbers.
    """
    problem = _problem(graph, cluster, limits)
    _, highest = _bounds(problem)
    cuts = _probe(problem, highest)
    if cuts is None:
        raise PlanError("No cut keeps the memory limits.")
    return _answer(graph, cluster, problem, cuts, "any_cut")


def nearest_cut(graph: ModelGraph, cluster: Cluster, limits: Limits) -> Partition | None:
    """Find the cut that exceeds the memory limits by the fewest bytes per device, whatever its period.

    Returns None without memory limits, or if there are too few places to cut.
    """
    problem = _problem(graph, cluster, limits)
    if all(kind.capacity_bytes is None for kind in problem.lineup.kinds):
        return None
    _, highest = _bounds(problem)
    lacking = sum(int(memory[-1]) for memory in problem.memory.values())
    lacking += max(0, *(-(kind.capacity_bytes or 0) for kind in problem.lineup.kinds))
    least = least_feasible(
        lambda extra: _probe(problem, highest, extra), 1, lacking, enough=lambda cuts: _lacking_bytes(problem, cuts)
    )
    return None if least is None else _answer(graph, cluster, problem, least[1], "nearest")


def _problem(graph: ModelGraph, cluster: Cluster, limits: Limits) -> _Problem:
    chain, lineup = chain_costs(graph, limits.memory.microbatch_size), line_up(cluster, limits)
    parts = np.stack([prefix(part)[chain.positions] for part in limits.memory.node_parts(graph)])
    bandwidths = {step.bandwidth_bytes_s for step in lineup.steps}
    depths = sorted(set(lineup.depths) - {0})
    # What comes before everything that learns has no backward, and so no second forward. A stage that has both runs all
    # of it twice; that the frozen part of it counts once here keeps the sums those of places.
    frozen = int(np.searchsorted(chain.sync_bytes, 0, side="right")) - 1 if chain.sync_bytes[-1] else 0
    twice_ps = chain.time_ps + np.maximum(chain.forward_ps - chain.forward_ps[frozen], 0)
    time_ps = {}
    for depth in depths:
        plain_ps = twice_ps if limits.memory.recomputes(depth) else chain.time_ps
        time_ps[depth] = plain_ps + _sync_ps(chain, lineup, limits, depth) if limits.sync_s_per_byte else plain_ps
    return _Problem(
        chain,
        lineup,
        limits,
        time_ps,
        {depth: limits.memory.at_depth(parts, depth) for depth in depths},
        {bandwidth: exchange_ps(chain.cut_bytes, bandwidth, limits.codecs) for bandwidth in bandwidths},
        {},
    )


def _sync_ps(chain: Chain, lineup: Lineup, limits: Limits, depth: int) -> Ints:
    """Return the work of summing the gradients of all nodes before each place, for the stage at this depth.

    The work is in picoseconds at speed 1: it is later divided by the speed of the stage's device.
    """
    speed = lineup.kinds[next(step.kind for step in lineup.steps if lineup.depths[step.after] == depth)].speed
    work: Ints = np.rint(chain.sync_bytes * (limits.sync_ps_per_byte(depth) * speed)).astype(np.int64)
    return work


def _bounds(problem: _Problem) -> tuple[int, int]:
    """Return a lower and an upper bound of the periods of all cuts, in picoseconds."""
    chain, kinds = problem.chain, problem.lineup.kinds
    total = int(chain.time_ps[-1])
    largest = int(np.diff(chain.time_ps).max())
    fastest = max(kind.speed for kind in kinds)
    lowest = max(total / problem.lineup.free_speed[0], largest / fastest)
    traffic = max(int(x.max()) for x in problem.traffic_ps.values())
    slowest = max(int(time_ps[-1]) for time_ps in problem.time_ps.values())
    return int(lowest * (1 - 1e-9)), math.ceil(slowest / min(kind.speed for kind in kinds)) + traffic + 1


def _following(problem: _Problem, period_ps: int) -> int:
    """Return the next larger period, in picoseconds, at which a probe could have another result.

    At that period another stage, or the traffic of another cut, is short enough.
    """
    following = math.inf
    for time_ps in {id(time_ps): time_ps for time_ps in problem.time_ps.values()}.values():
        for speed, _, _ in problem.lineup.kinds:
            first = np.searchsorted(time_ps, time_ps - math.floor(period_ps * speed))
            longer = (time_ps - time_ps[np.maximum(first - 1, 0)])[first > 0]
            if len(longer):
                following = min(following, _at_speed(int(longer.min()), speed)[0])
    for traffic_ps in problem.traffic_ps.values():
        over = traffic_ps[traffic_ps > period_ps]
        if len(over):
            following = min(following, int(over.min()))
    return period_ps + 1 if math.isinf(following) else max(period_ps + 1, int(following))


def _kept_ps(problem: _Problem, cuts: list[_Cut]) -> int:
    """Compute the shortest period that these stages and their messages keep, in picoseconds, rounded up."""
    longest = 0
    for first, last, step in cuts:
        time_ps = problem.time_ps[problem.lineup.depths[step.after]]
        _, busy_ps = _at_speed(int(time_ps[last] - time_ps[first]), problem.lineup.kinds[step.kind].speed)
        longest = max(longest, busy_ps, int(problem.traffic_ps[step.bandwidth_bytes_s][last]))
    return longest


def _lacking_bytes(problem: _Problem, cuts: list[_Cut]) -> int:
    """Compute the most bytes by which one of these stages exceeds the memory limit of its device."""
    lacking = 0
    for first, last, step in cuts:
        memory, capacity = (
            problem.memory[problem.lineup.depths[step.after]],
            problem.lineup.kinds[step.kind].capacity_bytes,
        )
        if capacity is not None:
            lacking = max(lacking, int(memory[last] - memory[first]) - capacity)
    return lacking


def _at_speed(time_ps: int, speed: float) -> tuple[int, int]:
    """Bound the time at ``speed``, in whole picoseconds, of work that takes ``time_ps`` at speed 1: (lower, upper)."""
    if speed == 1:
        return time_ps, time_ps
    return math.floor(time_ps / speed * (1 - ROUNDING)), math.ceil(time_ps / speed * (1 + ROUNDING))


def _ends(problem: _Problem, period_ps: int, extra_bytes: int) -> dict[tuple[int, int], Ints]:
    """Compute ``hi`` of the module docstring at all places, by (device kind, depth).

    Args:
        extra_bytes: bytes by which each stage may exceed its memory limit.
    """
    ends, in_time = {}, dict[tuple[int, float], Ints]()
    depths = problem.lineup.depths_by_kind()
    for kind, (speed, capacity, _) in enumerate(problem.lineup.kinds):
        for depth in depths[kind]:
            time_ps = problem.time_ps[depth]
            # Most depths have the same seconds.
            if (id(time_ps), speed) not in in_time:
                latest_ps = time_ps + math.floor(period_ps * speed)
                in_time[id(time_ps), speed] = np.searchsorted(time_ps, latest_ps, side="right")
            by_time = in_time[id(time_ps), speed]
            ends[kind, depth] = by_time
            if capacity is not None:
                by_memory = _ends_by_memory(problem, depth, capacity + extra_bytes, keep=not extra_bytes)
                ends[kind, depth] = np.minimum(by_time, by_memory)
    return ends


def _ends_by_memory(problem: _Problem, depth: int, capacity_bytes: int, *, keep: bool) -> Ints:
    """Return ``hi`` of a stage at this depth by its memory alone; cached for later probes if ``keep``."""
    key = (depth, capacity_bytes)
    ends = problem.by_memory.get(key)
    if ends is None:
        memory = problem.memory[depth]
        ends = np.searchsorted(memory, memory + capacity_bytes, side="right")
        if keep:
            problem.by_memory[key] = ends
    return ends


def _probe(problem: _Problem, period_ps: int, extra_bytes: int = 0) -> list[_Cut] | None:
    """Find stages that keep the period and the memory limits; return None if they do not exist.

    Args:
        extra_bytes: bytes by which each stage may exceed its memory limit.
    """
    lineup, places = problem.lineup, len(problem.chain.positions)
    ends = _ends(problem, period_ps, extra_bytes)
    quick = {bandwidth: traffic_ps <= period_ps for bandwidth, traffic_ps in problem.traffic_ps.items()}
    reached = np.zeros((len(lineup.depths), places), dtype=np.bool_)
    reached[0, -1] = True
    count = np.zeros(places + 1, dtype=np.int64)  # of reached places before each place
    for before, after, kind, bandwidth in lineup.steps:
        (reached[before] & quick[bandwidth]).cumsum(out=count[1:])
        if count[-1]:
            reached[after] |= count.take(ends[kind, lineup.depths[after]]) > count[1:]
    goal = next((g for g in lineup.goals(problem.limits.num_stages) if reached[g, 0]), None)
    return None if goal is None else _walk_back(problem, reached, ends, period_ps, goal)


def _walk_back(
    problem: _Problem, reached: Bools, ends: dict[tuple[int, int], Ints], period_ps: int, state: int
) -> list[_Cut]:
    """Choose the cuts of a successful probe, from the first stage on, each with the least traffic that is possible.

    Args:
        reached: by state of the device order and place, True if stages can cover all nodes from the place on.
        state: state of the device order in which all stages have devices.
    """
    lineup, chain = problem.lineup, problem.chain
    place, cuts = 0, []
    while state:
        options = []
        for step in (step for step in lineup.steps if step.after == state):
            stop = int(ends[step.kind, lineup.depths[state]][place])
            may_end = reached[step.before, :stop] & (problem.traffic_ps[step.bandwidth_bytes_s][:stop] <= period_ps)
            at = may_end[place + 1 :].nonzero()[0] + place + 1
            if len(at):
                # The first of the places with the least traffic.
                end = at[chain.cut_bytes[at].argmin()]
                options.append((int(chain.cut_bytes[end]), int(end), step))
        _, end, step = min(options, key=lambda option: option[:2])
        cuts.append(_Cut(place, end, step))
        place, state = end, step.before
    return cuts


def _answer(graph: ModelGraph, cluster: Cluster, problem: _Problem, cuts: list[_Cut], name: str) -> Partition:
    chain, lineup = problem.chain, problem.lineup
    devices = lineup.assign([cut.step.kind for cut in cuts])
    pieces, slowest_ps = [], 0.0
    for (first, last, step), device in zip(cuts, devices, strict=True):
        speed, time_ps = lineup.kinds[step.kind].speed, problem.time_ps[lineup.depths[step.after]]
        busy_ps = int(chain.time_ps[last] - chain.time_ps[first]) / speed
        whole_ps = int(time_ps[last] - time_ps[first]) / speed
        slowest_ps = max(slowest_ps, whole_ps, int(problem.traffic_ps[step.bandwidth_bytes_s][last]))
        nodes = range(int(chain.positions[first]), int(chain.positions[last]))
        crossing = int(chain.cut_bytes[first]) // problem.limits.memory.microbatch_size
        pieces.append(Piece(nodes, (device,), busy_ps / PICO, crossing))
    return make_answer(graph, cluster, problem.limits, pieces, slowest_ps / PICO, name)
