"""Result of every solver: stages with predictions and a reason in words, or an error with numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition, Stage
from raypipe.ir.units import human_bytes
from raypipe.planner.cost.columns import columns_of, sums_of
from raypipe.planner.cost.memory import stage_memory
from raypipe.planner.partition.costs import Limits
from raypipe.planner.partition.fit import refilled


class Piece(NamedTuple):
    """One stage of the partition that a solver found.

    Attributes:
        nodes: positions in the graph, in execution order.
        devices: positions in the cluster, one per replica.
        period_s: seconds per micro-batch, divided by the number of replicas.
        input_bytes: bytes of one sample that cross the cut before the stage.
    """

    nodes: Sequence[int]
    devices: tuple[int, ...]
    period_s: float
    input_bytes: int


def make_answer(
    graph: ModelGraph, cluster: Cluster, limits: Limits, pieces: Sequence[Piece], bottleneck_s: float, name: str
) -> Partition:
    """Build the Partition from the stages that a solver found, with their predictions and the reason in words.

    Args:
        bottleneck_s: seconds per micro-batch of the slowest stage or cut.
        name: name of the solver, for the reason.
    """
    stages, start, whole_s = [], 0, []
    for index, piece in enumerate(pieces):
        stages.append(
            Stage(
                index=index,
                start=start,
                stop=start + len(piece.nodes),
                first_node=graph.nodes[piece.nodes[0]].name,
                last_node=graph.nodes[piece.nodes[-1]].name,
                param_bytes=sums_of(graph, piece.nodes).param_bytes,
                input_bytes=piece.input_bytes,
                devices=piece.devices,
                period_s=piece.period_s,
            )
        )
        start += len(piece.nodes)
        whole_s.append(_whole_s(graph, piece, again=limits.memory.recomputes(len(pieces) - index)))
    order: tuple[int, ...] = ()
    if not all(isinstance(piece.nodes, range) for piece in pieces):
        order = tuple(position for piece in pieces for position in piece.nodes)
        order = () if order == tuple(range(len(graph.nodes))) else order
    bottleneck_s = max(bottleneck_s, *whole_s)
    reason = _reason(cluster, stages, whole_s, bottleneck_s, fixed=limits.num_stages is not None)
    partition = Partition(tuple(stages), f"{reason}; found by {name}", order, bottleneck_s)
    return refilled(partition, graph, limits.memory)


def _whole_s(graph: ModelGraph, piece: Piece, *, again: bool) -> float:
    """Compute the seconds per micro-batch of a stage; ``again`` adds the second forward of a stage that recomputes."""
    columns, nodes = columns_of(graph), list(piece.nodes)
    busy_s = float(columns.busy_s[nodes].sum())
    if not again or not busy_s:
        return piece.period_s
    return piece.period_s * (1 + float(columns.forward_s[nodes].sum()) / busy_s)


def _reason(
    cluster: Cluster,
    stages: Sequence[Stage],
    whole_s: Sequence[float],
    bottleneck_s: float,
    *,
    fixed: bool,
) -> str:
    """Describe the slowest stage or cut.

    Args:
        whole_s: seconds per micro-batch of each stage, with recomputation.
        bottleneck_s: the longest of these, or of the messages over a cut.
        fixed: True if the number of stages was given.
    """
    worst = stages[max(range(len(stages)), key=whole_s.__getitem__)]
    used = [cluster.devices[i] for stage in stages for i in stage.devices]
    speeds = [math.fsum(cluster.devices[i].speed for i in stage.devices) for stage in stages]
    ideal_s = math.fsum(s * speed for s, speed in zip(whole_s, speeds, strict=True)) / math.fsum(speeds)
    takes = f"{bottleneck_s * 1e3:.4g} ms per micro-batch"
    over = f"{max(0.0, bottleneck_s / (ideal_s or math.inf) - 1):.1%} more than if all workers had the same to do"
    replicas = [len(stage.devices) for stage in stages]
    if whole_s[worst.index] < bottleneck_s * (1 - 1e-9):
        text = f"sending over a cut takes longest, {takes}, {over}"
    elif len(stages) > 1:
        text = f"stage {worst.index} ({worst.first_node} ... {worst.last_node}) takes longest, {takes}, {over}"
    else:
        text = f"all in one stage takes {takes}"
    if max(replicas) > 1:
        text += f"; workers by stage: {', '.join(map(str, replicas))}"
        if len(stages) == 1:
            text += ", which is plain data parallelism"
    left = len(cluster.devices) - len(used)
    unused = "are left over" if fixed else "would make it no faster"
    return text + (f"; {left} of {len(cluster.devices)} devices {unused}" if left else "")


def no_cut_fits(graph: ModelGraph, cluster: Cluster, limits: Limits, nearest: Partition | None) -> PlanError:
    """Build the error for limits that cannot be kept.

    Args:
        nearest: cut that lacks the least memory; None if the graph has too few places to cut.
    """
    wanted = f"{limits.num_stages} stages" if limits.num_stages else f"at most {len(cluster.devices)} stages"
    if nearest is None:
        places, devices = len(graph.cut_positions()), len(cluster.devices)
        return PlanError(
            f"There is no cut of {len(graph.nodes)} nodes into {wanted}: the model has {places} places to cut, and the "
            f"cluster {devices} devices. Set num_stages to at most {min(places + 1, devices)}."
        )
    rows = []
    for stage in nearest.stages:
        held = sums_of(graph, nearest.nodes_of(stage))
        memory = stage_memory(limits.memory, held, stage.index, nearest.num_stages - stage.index)
        device = cluster.devices[stage.devices[0]]
        cap = limits.capacity_bytes(device)
        if cap is not None:
            needed = memory.total_bytes - memory.reserve_bytes
            rows.append((needed / max(cap, 1), memory, needed, cap, device))
    _, memory, needed, cap, device = max(rows, key=lambda row: row[0])
    left = limits.room_bytes
    offers = human_bytes(max(cap, 0))
    if left:
        offers += f" beside {human_bytes(left)} for messages and what operations need while they run"
    return PlanError(
        f"No cut into {wanted} keeps the memory limits. In the nearest one, stage {memory.stage} needs "
        f"{human_bytes(needed)} at {memory.action}, and {device.name} offers {offers}: {memory}. Use "
        "smaller micro-batches, more or larger devices, or a schedule with fewer micro-batches in flight."
    )
