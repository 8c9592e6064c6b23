"""Partition that fits into memory with messages and workspaces.

The solvers leave out the messages at a cut, which depend on the cut, and the memory that single operations need while
they run, which does not add up. Here a partition is solved and both are counted. If a stage then exceeds its limit,
the partition is solved again, with room left on every device for messages and common workspaces; workspace that only
one stage needs (such as the logits of a large vocabulary) is charged to the operation that needs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition, Stage
from raypipe.planner.cost.columns import KEPT, cached_by_graph, neediest, sums_of, workspace_bytes
from raypipe.planner.cost.memory import MemoryModel, StageMemory, check_memory, stage_memory
from raypipe.planner.partition.costs import Limits

Solver = Callable[[ModelGraph, Cluster, Limits], Partition]
"""Signature of ``prefix_sum`` and ``antichain``."""

ROUNDS = 4


def memory_of(graph: ModelGraph, partition: Partition, model: MemoryModel) -> tuple[StageMemory, ...]:
    """Compute the memory of every stage, including messages and workspace."""
    stages = []
    for stage in partition.stages:
        after = partition.stages[stage.index + 1].input_bytes if stage.index + 1 < partition.num_stages else 0
        nodes = partition.nodes_of(stage)
        stages.append(
            stage_memory(
                model,
                sums_of(graph, nodes),
                stage.index,
                partition.num_stages - stage.index,
                receive_bytes=stage.input_bytes,
                send_bytes=after,
                workspace_bytes=workspace_bytes(graph, nodes, model.microbatch_size),
            )
        )
    return tuple(stages)


def fitting_partition(solver: Solver, graph: ModelGraph, cluster: Cluster, limits: Limits) -> Partition:
    """Find a partition within every memory limit, including messages and workspace.

    Raises:
        PlanError: nothing fits; names stage, action and numbers.
    """
    room, charges = limits.room_bytes, dict[int, int]()
    for _ in range(ROUNDS):
        partition = solver(
            _charged(graph, tuple(charges.items())), cluster, dataclasses.replace(limits, room_bytes=room)
        )
        memory = memory_of(graph, partition, limits.memory)
        caps = [stage_limit_bytes(cluster, limits, stage) for stage in partition.stages]
        over = [m for m, cap in zip(memory, caps, strict=True) if cap is not None and m.total_bytes > cap]
        if not over:
            return refilled(partition, graph, limits.memory) if charges else partition
        common = min(m.workspace_bytes for m in memory)
        before = room, dict(charges)
        room = max(room, common + max(m.message_bytes + m.exchange_bytes for m in over))
        for m in over:
            if (more := m.workspace_bytes - common) > 0:
                nodes = partition.nodes_of(partition.stages[m.stage])
                needy = neediest(graph, nodes, limits.memory.microbatch_size)
                charges[needy] = max(more, charges.get(needy, 0))
        if (room, charges) == before:
            room += max(m.message_bytes + m.workspace_bytes + m.exchange_bytes for m in over)
    check_memory(memory, caps)
    return partition


@cached_by_graph(KEPT)
def _charged(graph: ModelGraph, charges: tuple[tuple[int, int], ...]) -> ModelGraph:
    """Return a copy of the graph in which each (node, bytes) of ``charges`` adds these bytes to the node's buffers.

    Buffers are the part of a node's memory that does not depend on the batch size.
    """
    if not charges:
        return graph
    nodes = list(graph.nodes)
    for at, nbytes in charges:
        nodes[at] = dataclasses.replace(nodes[at], buffer_bytes=nodes[at].buffer_bytes + nbytes)
    return dataclasses.replace(graph, nodes=tuple(nodes))


def refilled(partition: Partition, graph: ModelGraph, model: MemoryModel) -> Partition:
    """Return the partition with ``memory_bytes`` of its stages computed by this memory model."""
    stages = zip(partition.stages, memory_of(graph, partition, model), strict=True)
    return dataclasses.replace(
        partition, stages=tuple(dataclasses.replace(stage, memory_bytes=m.total_bytes) for stage, m in stages)
    )


def stage_limit_bytes(cluster: Cluster, limits: Limits, stage: Stage) -> int | None:
    """Return the memory limit of each worker of a stage, None for no limit."""
    return limits.limit_bytes(cluster.devices[i] for i in stage.devices)


def fits_within(partition: Partition, graph: ModelGraph, cluster: Cluster, limits: Limits, memory: MemoryModel) -> bool:
    """Return True if the stages of each worker, counted together by ``memory``, keep the memory limit of its device."""
    held: dict[tuple[int, ...], int] = {}
    for stage, need in zip(partition.stages, memory_of(graph, partition, memory), strict=True):
        held[stage.devices] = held.get(stage.devices, 0) + need.total_bytes
    caps = {stage.devices: stage_limit_bytes(cluster, limits, stage) for stage in partition.stages}
    return all(cap is None or held[devices] <= cap for devices, cap in caps.items())
