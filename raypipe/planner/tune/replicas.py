"""Cuts for stages with replicas: a stage of R workers may take R times as long as one that has a single worker.

The solver is asked for one device per stage, R times as fast, and the devices that it knows nothing of are numbered
afterwards; where workers hold several stages, for one per worker. It does not know what replicas exchange at the end of
an update; the prediction of the plan does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, Link
from raypipe.ir.exchange import chunk_bytes
from raypipe.ir.graph import ModelGraph, Node
from raypipe.ir.plan import Partition
from raypipe.ir.schedule import Homes, groups_in
from raypipe.ir.schedule_spec import ScheduleKind
from raypipe.planner.partition.fit import Solver, fitting_partition
from raypipe.planner.partition.limits import Limits
from raypipe.planner.tune.request import Request
from raypipe.planner.tune.resolve import placement_of

__all__ = [
    "check_shares", "check_workers_of_replicas", "cut_for", "exchange_s", "exposed_s", "groups_of", "hides",
    "homes_of", "on_workers", "share_notes", "slowest_link", "summing_rates_s",
]  # fmt: skip

Numbers = NDArray[np.float64]


def cut_for(request: Request, solver: Solver, graph: ModelGraph, cluster: Cluster, limits: Limits) -> Partition:
    """The cut of a request within limits, with or without replicas.

    Raises:
        PlanError: no cut fits.
    """
    if not request.replicated:
        return fitting_partition(solver, graph, cluster, limits)
    assert limits.num_stages is not None, "num_replicas needs num_stages"
    homes, devices = homes_of(request, limits.num_stages), []
    for group in groups_in(homes):
        members, count = [cluster.devices[i] for i in group], len(group)
        caps = [member.memory_bytes for member in members if member.memory_bytes is not None]
        speed = min(member.speed for member in members) * count
        devices.append(dataclasses.replace(members[0], speed=speed, memory_bytes=min(caps, default=None)))
    found = fitting_partition(
        solver, graph, Cluster(tuple(devices), cluster.links), dataclasses.replace(limits, in_order=True)
    )
    return on_workers(found, homes)


def homes_of(request: Request, num_stages: int) -> Homes:
    """By stage, its workers."""
    if not request.kind.several_stages:
        return tuple(groups_of(request.replicas_of(num_stages)))
    placement = placement_of(request, num_stages)
    groups = groups_of((request.replicas_of(num_stages)[0],) * (1 + max(placement)))
    return tuple(groups[at] for at in placement)


def groups_of(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """The workers of each stage, numbered stage after stage."""
    return [tuple(range(first, stop)) for first, stop in pairwise(accumulate(counts, initial=0))]


def on_workers(partition: Partition, homes: Homes) -> Partition:
    """The same stages on these workers."""
    stages = (dataclasses.replace(stage, devices=group) for stage, group in zip(partition.stages, homes, strict=True))
    return dataclasses.replace(partition, stages=tuple(stages))


def exchange_s(
    nodes: Sequence[Node], factor: float, devices: Sequence[int], cluster: Cluster, limits: Limits
) -> tuple[float, float]:
    """Seconds in which replicas of a stage sum their gradients, and the part of them beside the last backward.

    Args:
        nodes: of the stage.
        factor: seconds of its workers for each of the nodes'.
    """
    sync_bytes = np.append(0.0, np.cumsum([float(node.param_bytes - node.frozen_bytes) for node in nodes]))
    if len(devices) == 1 or not sync_bytes[-1]:
        return 0.0, 0.0
    spec, link = limits.memory.spec, slowest_link(cluster, devices, devices)
    rates_s = summing_rates_s(len(devices), spec.lanes, link, limits.sums_factor, shards=limits.shards)
    whole_s = sum(rates_s) * float(sync_bytes[-1])
    backward_s = np.append(0.0, np.cumsum([factor * node.backward_s for node in nodes]))
    behind_s = whole_s
    if hides(spec.of_kind):
        behind_s = float(exposed_s(rates_s[0], backward_s, sync_bytes, 0, [len(nodes)])[0])
        behind_s += rates_s[1] * float(sync_bytes[-1])
    return whole_s + 2 * link.latency_s, whole_s - behind_s


def hides(kind: ScheduleKind) -> bool:
    """Whether replicas exchange beside the last backward: one that is whole, of an update that surely will be made."""
    return kind.synchronous and not kind.splits_backward


def summing_rates_s(
    replicas: int, lanes: int, link: Link, factor: float = 1.0, *, shards: bool = False
) -> tuple[float, float]:
    """Seconds for each byte of gradients that so many replicas sum: what may lie beside a backward, and the rest.

    See ``engine.all_reduce`` for what they send.

    Each of R sends (R - 1) / R of its L / R lanes, and then as much of the totals. All its peers share what one link
    carries, as they share a worker's network card, both ways at once. Every chunk waits for two messages' latency, and
    the last one, which need not be full, once more.

    Args:
        factor: bytes that travel for each byte of gradients.
        shards: totals stay where they are summed, and parameters travel, whole, once they have been stepped.
    """
    if replicas == 1:
        return 0.0, 0.0
    share, latency_s = (replicas - 1) / replicas, link.latency_s / chunk_bytes(lanes, replicas)
    if shards:
        scattered = factor * share * lanes / replicas
        return scattered / link.bandwidth_bytes_s + latency_s, share / link.bandwidth_bytes_s + latency_s
    return factor * share * (lanes / replicas + 1) / link.bandwidth_bytes_s + 2 * latency_s, 0.0


def exposed_s(rate_s: float, backward_s: Numbers, sync_bytes: Numbers, first: int, ends: Sequence[int]) -> Numbers:
    """What of an exchange comes behind the last backward, which it runs beside, by end of the stage.

    A backward goes from the last node to the first, and what a node trains is exchanged once that is over, one node
    after the other. So node i is exchanged no sooner than its own backward ends, and with it all before it:

        max over the stage's nodes i of (rate x bytes of the nodes up to i - seconds of the backwards before i)

    Args:
        rate_s: seconds for each byte.
        backward_s, sync_bytes: sums over the nodes before each position, shape (nodes + 1,).
        first: position where the stage begins.
        ends: positions where it may end.
    """
    behind_s = rate_s * (sync_bytes[first + 1 :] - sync_bytes[first]) - (backward_s[first:-1] - backward_s[first])
    longest: Numbers = np.maximum.accumulate(behind_s)[np.asarray(ends) - first - 1]
    return longest


def slowest_link(cluster: Cluster, senders: Sequence[int], receivers: Sequence[int]) -> Link:
    """Of all pairs the one with the least bandwidth, and the longest latency of any; free on one device."""
    links = [cluster.link(a, b) for a in senders for b in receivers if a != b]
    if not links:
        return Link()
    return Link(min(x.bandwidth_bytes_s for x in links), max(x.latency_s for x in links))


def check_workers_of_replicas(
    request: Request, num_stages: int, offered: int | None, *, described: bool = False
) -> None:
    """Refuse replicas for which there are too few workers.

    Args:
        described: they are devices of a cluster that was described.

    Raises:
        PlanError: says how many there are and how many it takes.
    """
    counts, wanted = request.replicas_of(num_stages), request.workers_in_all(num_stages)
    if offered is not None and wanted > offered:
        who, cure = "scaling_config offers", f"Raise num_workers to {wanted}"
        if described:
            who, cure = "the cluster has", "Describe more devices"
        raise PlanError(
            f"The plan has {'-'.join(map(str, counts))} workers for its {num_stages} stages, {wanted} in all, but "
            f"{who} {offered}. {cure}, or lower num_replicas."
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
