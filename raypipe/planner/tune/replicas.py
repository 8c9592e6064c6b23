"""Cuts for stages with replicas: a stage of R workers may take R times as long as one that has a single worker.

The solver is asked for one device per stage, R times as fast, and the devices that it knows nothing of are numbered
afterwards. It does not know what replicas exchange at the end of an update; the prediction of the plan does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.exchange import chunk_bytes
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition
from raypipe.planner.memory import StageMemory
from raypipe.planner.partition.fit import Solver, fitting_partition
from raypipe.planner.partition.limits import Limits
from raypipe.planner.tune.request import Request

__all__ = ["check_shares", "check_workers_of_replicas", "cut_for", "exchange_s", "on_workers", "share_notes"]


def cut_for(request: Request, solver: Solver, graph: ModelGraph, cluster: Cluster, limits: Limits) -> Partition:
    """The cut of a request within limits, with or without replicas.

    Raises:
        PlanError: no cut fits.
    """
    if not request.replicated:
        return fitting_partition(solver, graph, cluster, limits)
    assert limits.num_stages is not None, "num_replicas needs num_stages"
    counts = request.replicas_of(limits.num_stages)
    devices = (
        dataclasses.replace(device, speed=device.speed * count)
        for device, count in zip(cluster.devices, counts, strict=False)
    )
    found = fitting_partition(
        solver, graph, Cluster(tuple(devices), cluster.links), dataclasses.replace(limits, in_order=True)
    )
    return on_workers(found, counts)


def on_workers(partition: Partition, counts: tuple[int, ...]) -> Partition:
    """The same stages with so many workers each, numbered stage after stage."""
    bounds = pairwise(accumulate(counts, initial=0))
    stages = (
        dataclasses.replace(stage, devices=tuple(range(first, stop)))
        for stage, (first, stop) in zip(partition.stages, bounds, strict=True)
    )
    return dataclasses.replace(partition, stages=tuple(stages))


def exchange_s(memory: StageMemory, devices: Sequence[int], cluster: Cluster, limits: Limits) -> float:
    """Seconds in which a stage's replicas sum their gradients; see ``engine.all_reduce`` for what they send.

    Each of R sends (R - 1) / R of its L / R lanes, and then as much of the totals. All its peers share what one link
    carries, as they share a worker's network card, both ways at once. Every chunk waits for two messages' latency.
    """
    count, lanes = len(devices), limits.memory.spec.lanes
    if count == 1:
        return 0.0
    link = cluster.link(devices[0], devices[1])
    gradient_bytes = memory.gradient_bytes / limits.memory.gradient_factor
    nbytes = gradient_bytes * (count - 1) / count * (lanes / count + 1)
    chunks = math.ceil(gradient_bytes / chunk_bytes(lanes, count))
    return nbytes / link.bandwidth_bytes_s + 2 * chunks * link.latency_s


def check_workers_of_replicas(request: Request, num_stages: int, offered: int | None) -> None:
    """Refuse replicas for which there are too few workers.

    Raises:
        PlanError: says how many there are and how many it takes.
    """
    counts = request.replicas_of(num_stages)
    if offered is not None and sum(counts) > offered:
        raise PlanError(
            f"The plan has {'-'.join(map(str, counts))} workers for its {num_stages} stages, {sum(counts)} in all, but "
            f"scaling_config offers {offered}. Raise num_workers to {sum(counts)}, or lower num_replicas."
        )


def check_shares(request: Request, num_stages: int, num_microbatches: int) -> None:
    """Refuse replicas that would have no micro-batch.

    Raises:
        PlanError: names the fields.
    """
    most = max(request.replicas_of(num_stages))
    if num_microbatches < most:
        raise PlanError(
            f"A step has {num_microbatches} micro-batches, and num_replicas={request.replicas} gives a stage {most} "
            f"workers: some would have nothing to do. Give a minibatch_size and num_microbatches of {most} or more, or "
            "fewer replicas."
        )


def share_notes(request: Request, num_stages: int, num_microbatches: int) -> tuple[str, ...]:
    """A sentence where replicas have more micro-batches or fewer, or a lane has none."""
    lanes = request.num_lanes(num_stages)
    if not request.in_lanes or num_microbatches % lanes == 0:
        return ()
    up = -(-num_microbatches // lanes) * lanes
    what = "lanes, and so replicas, have unequal shares" if request.replicated else "lanes have unequal shares"
    return (f"{num_microbatches} micro-batches are no multiple of the {lanes} lanes: {what}; {up} would be even.",)
