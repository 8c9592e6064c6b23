"""A partition that fits with its messages and workspaces, or a refusal that names the nearest plan that would.

The solvers leave out the messages at a cut, which depend on the cut, and the memory that single operations need while
they run, which does not add up. Here a partition is solved, both are counted, and where a stage is over its limit by
them, it is solved again with that much room left.
Where nothing fits, smaller changes are tried before larger ones: another schedule, smaller micro-batches, both.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition, human_bytes
from raypipe.planner.columns import sums_of, workspace_of
from raypipe.planner.memory import MemoryModel, StageMemory, check_memory, stage_memory
from raypipe.planner.partition.limits import Limits

__all__ = ["Solver", "fitting_partition", "limit_bytes", "memory_of", "solve_within"]

Solver = Callable[[ModelGraph, Cluster, Limits], Partition]
"""What ``prefix_sum``, ``antichain`` and ``hierarchical`` are."""

ROUNDS = 4


def memory_of(graph: ModelGraph, partition: Partition, model: MemoryModel) -> tuple[StageMemory, ...]:
    """The memory of every stage, messages and workspace included."""
    order = partition.order or range(len(graph.nodes))
    behind = sum(max(1, len(stage.devices)) for stage in partition.stages)
    found = []
    for stage in partition.stages:
        replicas = max(1, len(stage.devices))
        after = partition.stages[stage.index + 1].input_bytes if stage.index + 1 < partition.num_stages else 0
        nodes = order[stage.start : stage.stop]
        found.append(
            stage_memory(
                model,
                sums_of(graph, nodes),
                stage.index,
                -(-behind // replicas),
                receive_bytes=stage.input_bytes,
                send_bytes=after,
                workspace_bytes=workspace_of(graph, nodes, model.microbatch_size),
            )
        )
        behind -= replicas
    return tuple(found)


def fitting_partition(solver: Solver, graph: ModelGraph, cluster: Cluster, limits: Limits) -> Partition:
    """The solver's partition, within every limit, messages and workspace included.

    Raises:
        PlanError: nothing fits; names stage, action and numbers, and the nearest plan that does fit.
    """
    try:
        return solve_within(solver, graph, cluster, limits)
    except PlanError as error:
        bounded = limits.memory_limit_bytes is not None or any(d.memory_bytes is not None for d in cluster.devices)
        advice = _nearest_plan(solver, graph, cluster, limits) if bounded else None
        if advice is None:
            raise
        raise PlanError(f"{error} {advice}") from None


def solve_within(solver: Solver, graph: ModelGraph, cluster: Cluster, limits: Limits) -> Partition:
    """``fitting_partition`` without the search for advice.

    The room only grows, so that this ends; at worst a plan is refused that a cleverer search would find.

    Raises:
        PlanError: nothing fits; names stage, action and numbers.
    """
    room = limits.room_bytes
    for _ in range(ROUNDS):
        found = solver(graph, cluster, dataclasses.replace(limits, room_bytes=room))
        memory = memory_of(graph, found, limits.memory)
        caps = [
            min((cap for i in stage.devices if (cap := limit_bytes(cluster, limits, i)) is not None), default=None)
            for stage in found.stages
        ]
        over = [
            m.message_bytes + m.workspace_bytes
            for m, cap in zip(memory, caps, strict=True)
            if cap is not None and m.total_bytes > cap
        ]
        if not over:
            return found
        room = max(room + 1, *over)
    check_memory(memory, caps)
    return found


def limit_bytes(cluster: Cluster, limits: Limits, device: int) -> int | None:
    """What a worker on this device may use in all, None for no limit."""
    caps = (cluster.devices[device].memory_bytes, limits.memory_limit_bytes)
    return min((cap for cap in caps if cap is not None), default=None)


def _nearest_plan(solver: Solver, graph: ModelGraph, cluster: Cluster, limits: Limits) -> str | None:
    for memory, words in _alternatives(limits.memory):
        changed = dataclasses.replace(limits, memory=memory)
        try:
            found = solve_within(solver, graph, cluster, changed)
        except PlanError:
            continue
        fullest = max(m.total_bytes for m in memory_of(graph, found, memory))
        stages = "1 stage" if found.num_stages == 1 else f"{found.num_stages} stages"
        return f"The nearest plan that fits: {words}, {stages}, {human_bytes(fullest)} on the fullest device."
    if limits.num_stages is not None and limits.num_stages < len(cluster.devices):
        return _nearest_plan(solver, graph, cluster, dataclasses.replace(limits, num_stages=None))
    return None


def _alternatives(memory: MemoryModel) -> Iterator[tuple[MemoryModel, str]]:
    """Schedules that hold less, then the same with micro-batches of half the size, again and again."""
    thrifty = dataclasses.replace(memory, schedule="1f1b", group_size=1, slack=1, weight_versions=None)
    for halvings, base in itertools.product(range(memory.microbatch_size.bit_length()), (memory, thrifty)):
        size = memory.microbatch_size >> halvings
        count = -(-memory.num_microbatches * memory.microbatch_size // size)
        new = dataclasses.replace(base, microbatch_size=size, num_microbatches=count)
        if new != memory:
            yield new, f"schedule {new.schedule}, {count} micro-batches of {size}"
