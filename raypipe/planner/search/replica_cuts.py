"""Cuts for stages with replicas, and the seconds in which replicas exchange gradients.

The partition solver gets one device for each group of R replicas, R times as fast as its slowest worker. Afterwards
each stage gets the workers of its group. The exchange of gradients is not part of the solver's costs; it is part of the
plan's prediction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, Link
from raypipe.ir.communication import chunk_bytes
from raypipe.ir.graph import ModelGraph, Node
from raypipe.ir.plan import Partition
from raypipe.ir.schedule import Homes, groups_in
from raypipe.ir.schedule_spec import ScheduleKind
from raypipe.planner.partition.costs import Limits
from raypipe.planner.partition.fit import Solver, fitting_partition
from raypipe.planner.schedule.replicas import Replicas
from raypipe.planner.search.request import Request
from raypipe.planner.search.schedule_settings import placement_of

Numbers = NDArray[np.float64]


def cut_for(request: Request, solver: Solver, graph: ModelGraph, cluster: Cluster, limits: Limits) -> Partition:
    """Cut the graph within limits as the request requires, with or without replicas, and assign workers to the stages.

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
    partition = fitting_partition(
        solver, graph, Cluster(tuple(devices), cluster.links), dataclasses.replace(limits, in_order=True)
    )
    return partition.on_workers(homes)


def homes_of(request: Request, num_stages: int) -> Homes:
    """List the workers of each stage."""
    if not request.kind.several_stages:
        return Replicas(request.replicas_of(num_stages)).homes(num_stages)
    placement = placement_of(request, num_stages)
    count = 1 + max(placement)
    groups = Replicas((request.replicas_of(num_stages)[0],) * count).homes(count)
    return tuple(groups[at] for at in placement)


def exchange_s(
    nodes: Sequence[Node], factor: float, devices: Sequence[int], cluster: Cluster, limits: Limits
) -> tuple[float, float]:
    """Compute the seconds of a stage's gradient exchange, and how many of them overlap with the last backward.

    Args:
        nodes: nodes of the stage.
        factor: seconds on the stage's workers for each second of the nodes.
        devices: workers of the stage.
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
    """Return True if the exchange of gradients overlaps with the last backward.

    That requires a synchronous schedule with whole backwards.
    """
    return kind.synchronous and not kind.splits_backward


def summing_rates_s(
    replicas: int, lanes: int, link: Link, factor: float = 1.0, *, shards: bool = False
) -> tuple[float, float]:
    """Compute the seconds in which replicas all-reduce one byte of gradients.

    There are R replicas and L lanes (partial sums of gradients); each replica holds L / R lanes. For each byte of
    gradients a replica sends L / R times (R - 1) / R bytes of its lanes (scatter), and (R - 1) / R bytes of the totals
    (gather). Messages to all peers share the bandwidth of one link, since a worker has one network card; both
    directions run at once. The gradients are sent in chunks (``chunk_bytes``), each of which waits for the latency of
    two messages. See ``engine.optim.all_reduce``.

    Args:
        link: slowest link between the replicas.
        factor: bytes that are sent for each byte of gradients, 0.5 with bf16.
        shards: True if each replica keeps the total of its slice, and the updated parameters are gathered after the
            optimizer step.

    Returns:
        seconds per byte that may overlap with the last backward, and seconds per byte that may not (0 without
        ``shards``).
    """
    if replicas == 1:
        return 0.0, 0.0
    share, latency_s = (replicas - 1) / replicas, link.latency_s / chunk_bytes(lanes, replicas)
    if shards:
        scattered = factor * share * lanes / replicas
        return scattered / link.bandwidth_bytes_s + latency_s, share / link.bandwidth_bytes_s + latency_s
    return factor * share * (lanes / replicas + 1) / link.bandwidth_bytes_s + 2 * latency_s, 0.0


def exposed_s(rate_s: float, backward_s: Numbers, sync_bytes: Numbers, first: int, ends: Sequence[int]) -> Numbers:
    """Compute the seconds of an exchange that remain after the last backward, for each possible end of the stage.

    A backward runs from the last node to the first. The gradients of a node are exchanged after its own backward, one
    node after the other. So the exchange of node i and of all nodes before it begins no sooner than the backward of
    node i ends, and the remaining seconds are

        max over the stage's nodes i of (rate x bytes of the nodes up to i - seconds of the backwards before i)

    Args:
        rate_s: seconds of exchange per byte of gradients.
        backward_s, sync_bytes: seconds of backward and bytes of gradients, summed over the nodes before each position;
            shape (nodes + 1,).
        first: position of the stage's first node.
        ends: possible end positions of the stage.
    """
    behind_s = rate_s * (sync_bytes[first + 1 :] - sync_bytes[first]) - (backward_s[first:-1] - backward_s[first])
    longest: Numbers = np.maximum.accumulate(behind_s)[np.asarray(ends) - first - 1]
    return longest


def slowest_link(cluster: Cluster, senders: Sequence[int], receivers: Sequence[int]) -> Link:
    """Return a link with the least bandwidth and the longest latency of all pairs of a sender and a receiver.

    It is half-duplex if one of them is, and likewise for latencies that occupy the wire. The link costs nothing if the
    only sender is the only receiver.
    """
    links = [cluster.link(a, b) for a in senders for b in receivers if a != b]
    if not links:
        return Link()
    return Link(
        min(x.bandwidth_bytes_s for x in links),
        max(x.latency_s for x in links),
        "half" if any(x.half_duplex for x in links) else "full",
        any(x.latency_occupies_wire for x in links),
    )


def check_workers_of_replicas(
    request: Request, num_stages: int, offered: int | None, *, described: bool = False
) -> None:
    """Raise PlanError if fewer workers are offered than all replicas of all stages need.

    Args:
        offered: number of offered workers; None if it is not limited.
        described: True if the workers are devices of a described cluster, for the message.
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
    """Raise PlanError if a stage has more replicas than a step has micro-batches."""
    most = max(request.replicas_of(num_stages))
    if num_microbatches < most:
        raise PlanError(
            f"A step has {num_microbatches} micro-batches, and num_replicas={request.replicas} gives a stage {most} "
            f"workers: some would have nothing to do. Give a minibatch_size and num_microbatches of {most} or more, or "
            "fewer replicas."
        )


def share_notes(request: Request, num_stages: int, num_microbatches: int) -> tuple[str, ...]:
    """Return a note if the micro-batches do not divide equally over the lanes (partial sums of gradients), else ()."""
    lanes = request.num_lanes(num_stages)
    if not request.in_lanes or num_microbatches % lanes == 0:
        return ()
    up = -(-num_microbatches // lanes) * lanes
    what = "lanes, and so replicas, have unequal shares" if request.replicated else "lanes have unequal shares"
    return (f"{num_microbatches} micro-batches are no multiple of the {lanes} lanes: {what}; {up} would be even.",)
