"""Refusal of a request that no plan fulfils, with the least memory or the fewest workers that would do.

The least memory of a worker, if all have equally much, is the least over all cuts of the bytes of their fullest stage.
It is found from the last stage to the first, for all positions p of the model where a stage may begin:

    need[d][p] = min over ends e of max(bytes of a stage of depth d from p to e, need[d - 1][e])

Bytes include messages and workspace. They are the same as those of ``memory.stage_memory``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, ComputeDevice
from raypipe.ir.graph import ModelGraph
from raypipe.ir.units import human_bytes
from raypipe.planner.cost.columns import columns_of, prefix
from raypipe.planner.cost.memory import MemoryModel, check_memory
from raypipe.planner.partition.fit import fitting_partition, memory_of
from raypipe.planner.search.cut_costs import CutTables, Shape
from raypipe.planner.search.problem import Problem, limits_of
from raypipe.planner.search.recompute import is_open, most_recompute
from raypipe.planner.search.replica_cuts import check_shares, cut_for
from raypipe.planner.search.request import Request, microbatches
from raypipe.planner.search.schedule_settings import memory_model
from raypipe.planner.search.solver_cuts import own_order_solver, quick_cut

MOST_TIMES = 8
"""Largest multiple of the given number of devices, or of their memory, that an error message suggests."""
MOST_CELLS = 200_000_000
"""Most pairs of positions, over all stages, that ``least_bytes`` compares; beyond it, some positions are left out."""


def refusal(problem: Problem, shapes: Sequence[Shape]) -> PlanError:
    """Build the error for a problem without a plan that fits.

    Args:
        shapes: workers by stage of the plans that were compared, most stages first.
    """
    if is_open(problem.request):
        problem = problem.asking(dataclasses.replace(problem.request, recompute=most_recompute(problem.request)))
    stages = len(shapes[0])
    request = problem.request.thriftiest(stages)
    size, count = _smallest(request, stages)
    limits, devices = limits_of(request, stages, count, size), len(problem.cluster.devices)
    try:
        check_shares(request, stages, count)
        if problem.cut_is_given and stages > devices:
            raise PlanError(
                f"The plan has {stages} stages, but there are {devices} devices. Set num_stages or the number of split "
                f"points so that there are at most {devices} stages."
            )
        if problem.cut_is_given:
            given = CutTables(problem).given(stages)
            caps = [limits.limit_bytes([device]) for device in problem.cluster.devices[:stages]]
            check_memory(memory_of(problem.at(size), given, limits.memory), caps)
        cut_for(request, own_order_solver(request), problem.at(size), problem.cluster, limits)
    except PlanError as error:
        text = str(error)
    else:
        text = f"No plan of {stages} stages keeps the memory limits."
    advice = what_would_fit(problem) if problem.bounded else ""
    return PlanError(f"{text} {advice}".rstrip())


def what_would_fit(problem: Problem) -> str:
    """Describe the number of devices or the memory that would suffice; "" if neither would.

    Also returns "" without a memory limit, with given cuts, and with replicas. The plan is assumed to need as little
    memory as the request allows: 1F1B if the schedule is open, and the smallest micro-batches if their number is open.
    """
    devices, places = len(problem.cluster.devices), len(problem.profile.graph.cut_positions()) + 1
    request = problem.request.thriftiest(places)
    caps = [d.memory_bytes for d in problem.cluster.devices if d.memory_bytes is not None]
    caps += [] if request.memory_limit_bytes is None else [request.memory_limit_bytes]
    if problem.cut_is_given or not caps or request.replicated:
        return ""
    cap = min(caps)
    asked = request.num_stages
    if (asked or 1) > min(places, MOST_TIMES * devices):
        return ""
    size, count = _smallest(request, devices)
    if request.kind.several_stages:
        need: int | None = _of_several_stages(problem, request, cap, count, size)
        options = [] if need is None else [f"{devices} workers of {human_bytes(need)}"]
    else:
        most = min(asked or MOST_TIMES * devices, places)
        needs = least_bytes(problem.profile.graph, memory_model(request, most, count, size), most)
        options = []
        more = range(devices + 1, most + 1) if asked is None else ()
        if number := next((stages for stages in more if needs[stages - 1] <= cap), 0):
            options.append(f"{number} workers of {human_bytes(cap)}")
        least = needs[asked - 1] if asked else min(needs[:devices])
        if least <= MOST_TIMES * cap:
            options.append(f"{devices} workers of {human_bytes(least)}")
    text = ""
    if options:
        what = f"with {count} micro-batches of {size} and {request.schedule}"
        text = f"The least that would do {what}: {' or '.join(options)}."
    return f"{text} {_nearest(problem, cap)}".strip()


def least_bytes(graph: ModelGraph, model: MemoryModel, most_stages: int) -> list[int]:
    """Compute the least bytes of a worker with which some cut fits, for 1, 2, ... ``most_stages`` stages.

    If the graph has too many positions for ``MOST_CELLS``, the numbers may be a little too large.
    """
    columns, size = columns_of(graph), model.microbatch_size
    chosen = np.arange(len(columns.places))
    most = max(2, math.isqrt(MOST_CELLS // most_stages))
    if len(chosen) > most:
        chosen = np.unique(np.linspace(0, len(chosen) - 1, most).astype(np.int64))
    places, cut_bytes = columns.places[chosen], columns.cut_bytes[chosen] * size
    parts = np.stack([prefix(part)[places] for part in model.node_parts(graph)])
    # Whole numbers below 2 ** 53, which float64 holds exactly.
    fixed = (_workspace(graph, places, size) + model.reserve_bytes).astype(np.float64)
    fixed[np.arange(len(places))[:, None] >= np.arange(len(places))] = np.inf
    total = np.empty_like(fixed)
    need = np.full(len(places), np.inf)
    need[-1] = 0.0
    needs = []
    for depth in range(1, most_stages + 1):
        nodes, in_flight, slots = model.at_depth(parts, depth), model.in_flight(depth), model.message_slots
        begin, end = cut_bytes * (in_flight + slots) - nodes, cut_bytes * slots + nodes
        np.add(fixed, end, out=total)
        np.add(total, begin[:, None], out=total)
        need = np.maximum(total, need, out=total).min(axis=1)
        needs.append(need[0])
    return [int(each) if math.isfinite(each) else 1 << 62 for each in needs]


def _workspace(graph: ModelGraph, places: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Compute ``columns.workspace_bytes`` of a stage between each pair of places; shape (places, places).

    Args:
        size: samples in a micro-batch.
    """
    columns = columns_of(graph)
    fixed, slopes, kept = columns.workspace
    if not len(fixed):
        return np.zeros((len(places), len(places)), dtype=np.int64)
    peaks = fixed + size * (slopes + kept)
    lowest = np.iinfo(np.int64).min // 4
    of_place = np.full(len(places), lowest)
    owner = np.searchsorted(places, np.repeat(np.arange(len(graph.nodes)), np.diff(columns.workspace_at)), "right")
    np.maximum.at(of_place, owner, peaks)  # of the nodes between the place before and this one
    rows = np.where(np.arange(len(places))[:, None] < np.arange(len(places)), of_place, lowest)
    longest = np.maximum.accumulate(rows, axis=1)
    found: NDArray[np.int64] = np.maximum(0, longest - size * columns.before[3][places])
    return found


def _of_several_stages(problem: Problem, request: Request, cap: int, count: int, size: int) -> int | None:
    """Find by bisection the least bytes per worker with which a plan fits, to 0.1 %, if workers hold several stages.

    Returns None if ``MOST_TIMES * cap`` bytes are not enough either.

    Args:
        cap: bytes per worker that are known to be too few.
        count, size: number of micro-batches, and samples in each.
    """
    stages, devices = request.num_stages or 1, len(problem.cluster.devices)
    limits = dataclasses.replace(limits_of(request, stages, count, size), memory_limit_bytes=None)

    def fits(bytes_each: int) -> bool:
        like = Cluster((ComputeDevice("device", 1.0, bytes_each),) * devices)
        try:
            fitting_partition(quick_cut(request), problem.profile.graph, like, limits)
        except PlanError:
            return False
        return True

    low, high = cap, MOST_TIMES * cap
    if not fits(high):
        return None
    while high - low > max(1, cap // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _nearest(problem: Problem, cap: int) -> str:
    """Describe a plan that fits into ``cap`` bytes with smaller micro-batches or 1F1B; "" if no such plan fits."""
    request, devices = problem.request, len(problem.cluster.devices)
    if request.num_microbatches is None or request.kind.several_stages or not request.kind.synchronous:
        return ""
    stages = request.num_stages or min(devices, len(problem.profile.graph.cut_positions()) + 1)
    minibatch, size, _ = microbatches(request, stages)
    for halvings in range(size.bit_length()):
        small = size >> halvings
        for other in dict.fromkeys((request.thriftiest(stages), request.as_1f1b())):
            number = -(-minibatch // small)
            model = memory_model(dataclasses.replace(other, num_microbatches=number), stages, number, small)
            needs = least_bytes(problem.profile.graph, model, stages)
            if needs[stages - 1] <= cap:
                return (
                    f"The nearest plan that fits: schedule {other.schedule}, {number} micro-batches of {small}, "
                    f"{stages} stages, {human_bytes(needs[stages - 1])} on the fullest device."
                )
    return ""


def _smallest(request: Request, stages: int) -> tuple[int, int]:
    """Return (samples in each, number) of the permitted micro-batches that need the least memory."""
    minibatch, size, count = microbatches(request, stages)
    if request.num_microbatches is None and request.kind.synchronous and not request.in_lanes:
        size = request.smallest_microbatch(minibatch)
        count = -(-minibatch // size)
    return size, count
