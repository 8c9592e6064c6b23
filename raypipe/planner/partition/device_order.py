"""Orders of unequal devices in a pipeline, as a graph of states that is walked from the last stage to the first.

    2 fast, 1 slow, equal links          state = numbers of (fast, slow) devices in use; each arrow adds a stage

        (0,0) --fast--> (1,0) --fast--> (2,0)
          |               |               |          A stage's depth is its distance from the end: 1 for the last.
         slow            slow            slow        Equal devices are interchangeable: four devices of each of two
          v               v               v          kinds give 25 states, not 8! orders.
        (0,1) --fast--> (1,1) --fast--> (2,1)

A stage's depth determines its micro-batches in flight. Walking from the end, the depth is known before the number of
stages is. If links differ, devices on different hosts are of different kinds, and a state includes the kind that was
added last. If there are too many states, kinds keep the order of the cluster: a pipeline can only leave devices out. If
the device of each stage is given (``Limits.in_order``), there is a single path.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from raypipe.ir.cluster import Cluster
from raypipe.planner.partition.costs import Limits

MAX_STATES = 128
"""Maximum number of states with kinds in any order; beyond it, kinds keep the order of the cluster."""
MOST_DEVICES = 16
"""Most devices whose orders ``device_orders`` lists."""


class DeviceKind(NamedTuple):
    """Kind of interchangeable devices: equal speed, memory and, if links differ, host.

    Attributes:
        speed: speed of each, relative to the profiled device.
        capacity_bytes: bytes that the nodes of one stage may use on such a device; None for no limit.
        devices: positions in the cluster.
    """

    speed: float
    capacity_bytes: int | None
    devices: tuple[int, ...]


class Step(NamedTuple):
    """Transition from one state to another, which adds one stage in front of the stages that have devices.

    Attributes:
        before, after: indices of the states; 0 is the start, without stages.
        kind: index of the kind of the added stage's device.
        bandwidth_bytes_s: bandwidth to the next stage; infinite for the last stage.
    """

    before: int
    after: int
    kind: int
    bandwidth_bytes_s: float


class Lineup(NamedTuple):
    """Possible orders of devices in a pipeline, as states and steps between them (see the module).

    Attributes:
        kinds: kinds of devices.
        depths: number of stages that have devices, by state.
        used_speed, free_speed: upper bounds of the summed speeds of the devices in use, and of those that may still be
            added, by state.
        steps: transitions in order of depth.
    """

    kinds: tuple[DeviceKind, ...]
    depths: tuple[int, ...]
    used_speed: tuple[float, ...]
    free_speed: tuple[float, ...]
    steps: tuple[Step, ...]

    def goals(self, num_stages: int | None) -> list[int]:
        """List the states with ``num_stages`` stages; None lists all but the start, fewest stages first."""
        ends = [s for s, depth in enumerate(self.depths) if depth and num_stages in (None, depth)]
        return sorted(ends, key=lambda s: self.depths[s])

    def depths_by_kind(self) -> list[list[int]]:
        """List, for each kind of device, the depths of the stages that may be on it; the last stage has depth 1."""
        by_kind: list[set[int]] = [set() for _ in self.kinds]
        for step in self.steps:
            by_kind[step.kind].add(self.depths[step.after])
        return [sorted(depths) for depths in by_kind]

    def assign(self, kinds: list[int]) -> list[int]:
        """Choose a device of the given kind for each stage; devices of a kind are used in cluster order."""
        left = [list(kind.devices) for kind in self.kinds]
        return [left[kind].pop(0) for kind in kinds]


class _Place(NamedTuple):
    """State while the orders are built: number of devices in use by kind, and the kind added last (-1 for none)."""

    counts: tuple[int, ...]
    last: int


def line_up(cluster: Cluster, limits: Limits) -> Lineup:
    """Build the Lineup of a cluster: the possible orders of its devices in a pipeline."""
    if limits.in_order:
        return _straight(cluster, limits)
    alike = len({link.bandwidth_bytes_s for link in cluster.links}) == 1 or len({d.host for d in cluster.devices}) == 1
    alike_devices: dict[tuple[float, int | None, str], list[int]] = {}
    for i, device in enumerate(cluster.devices):
        key = (device.speed, limits.capacity_bytes(device), "" if alike else device.host)
        alike_devices.setdefault(key, []).append(i)
    kinds = tuple(DeviceKind(speed, cap, tuple(devices)) for (speed, cap, _), devices in alike_devices.items())
    states = math.prod(len(kind.devices) + 1 for kind in kinds) * (1 if alike else len(kinds))
    most = min(limits.num_stages or len(cluster.devices), len(cluster.devices))
    return Lineup(kinds, *_walk(cluster, most, tuple(kind.devices for kind in kinds), alike, free=states <= MAX_STATES))


def _straight(cluster: Cluster, limits: Limits) -> Lineup:
    """Build the Lineup of a pipeline with the devices in cluster order: stage s on device s, and no other order.

    Every device is a kind of its own.
    """
    devices = cluster.devices
    kinds = tuple(DeviceKind(d.speed, limits.capacity_bytes(d), (i,)) for i, d in enumerate(devices))
    last = len(devices) - 1
    bandwidths = [math.inf, *(cluster.link(i, i + 1).bandwidth_bytes_s for i in reversed(range(last)))]
    steps = tuple(Step(depth, depth + 1, last - depth, bandwidth) for depth, bandwidth in enumerate(bandwidths))
    speeds = [device.speed for device in reversed(devices)]
    used = tuple(math.fsum(speeds[:depth]) for depth in range(len(devices) + 1))
    free = tuple(math.fsum(speeds[depth:]) for depth in range(len(devices) + 1))
    return Lineup(kinds, tuple(range(len(devices) + 1)), used, free, steps)


_Kinds = tuple[tuple[int, ...], ...]
"""Devices of each kind."""
_Walked = tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...], tuple[Step, ...]]
"""Attributes of a Lineup after the first."""


@functools.lru_cache(maxsize=64)
def _walk(cluster: Cluster, most: int, kinds: _Kinds, alike: bool, *, free: bool) -> _Walked:
    """Build all attributes of a Lineup except its kinds, by a breadth-first search from the start; cached.

    Args:
        most: largest number of stages.
        kinds: devices of each kind.
        alike: True if links do not distinguish devices, so that a state need not include the last kind.
        free: True if kinds may come in any order; False keeps the order of the cluster.
    """
    speeds = [cluster.devices[devices[0]].speed for devices in kinds]
    start = _Place((0,) * len(kinds), -1)
    places, keys, depths, steps = [start], {_key(start, alike, free): 0}, [0], []
    for before, place in enumerate(places):  # grows while it is walked
        if depths[before] == most:
            continue
        for kind in _next_kinds(place, kinds, free):
            counts = tuple(n + (k == kind) for k, n in enumerate(place.counts))
            following = _Place(counts, kind)
            key = _key(following, alike, free)
            if key not in keys:
                keys[key] = len(places)
                places.append(following)
                depths.append(depths[before] + 1)
            bandwidth = math.inf if place.last < 0 else _bandwidth(cluster, kinds, kind, place.last)
            steps.append(Step(before, keys[key], kind, bandwidth))
    used = [0.0] * len(places)
    for step in steps:  # states of the fixed order stand for several sets of devices: the fastest counts
        used[step.after] = max(used[step.after], used[step.before] + speeds[step.kind])
    ahead = [_free_speed(p, kinds, speeds, most - depth) for p, depth in zip(places, depths, strict=True)]
    return tuple(depths), tuple(used), tuple(ahead), tuple(steps)


def _key(place: _Place, alike: bool, free: bool) -> tuple[object, ...]:
    if free:
        return (place.counts, None if alike else place.last)
    # In a fixed order only the last kind can have devices left, besides those further ahead.
    return (sum(place.counts), place.last, place.counts[place.last])


def _next_kinds(place: _Place, kinds: _Kinds, free: bool) -> Iterator[int]:
    for kind in range(len(kinds)):
        if place.counts[kind] < len(kinds[kind]) and (free or place.last < 0 or kind <= place.last):
            yield kind


def _bandwidth(cluster: Cluster, kinds: _Kinds, kind: int, behind: int) -> float:
    """Return the bandwidth (bytes/s) between a device of ``kind`` and the next stage's device, of kind ``behind``."""
    return cluster.link(kinds[kind][0], kinds[behind][-1]).bandwidth_bytes_s


def _free_speed(place: _Place, kinds: _Kinds, speeds: Sequence[float], stages: int) -> float:
    """Compute an upper bound of the summed speeds of the devices of ``stages`` further stages."""
    kept = zip(kinds, speeds, place.counts, strict=True)
    free = [speed for devices, speed, used in kept for _ in range(len(devices) - used)]
    return math.fsum(sorted(free, reverse=True)[: max(0, stages)])


@functools.lru_cache(maxsize=64)
def listed_orders(cluster: Cluster, count: int, most: int) -> tuple[tuple[int, ...], ...]:
    """List the first ``most`` of ``device_orders``; cached."""
    return tuple(itertools.islice(device_orders(cluster, count), most))


def device_orders(cluster: Cluster, count: int) -> Iterator[tuple[int, ...]]:
    """Yield orders of ``count`` devices (indices into the cluster), the cluster's own order first.

    Of orders that differ by an exchange of alike devices, only one is yielded. Devices are alike at a position if they
    have equal speed, equal memory, and equal distances to the devices before them and to those that are left. A cluster
    of more than ``MOST_DEVICES`` devices yields only its own order.
    """
    devices = cluster.devices
    if len(devices) > MOST_DEVICES:
        yield tuple(range(count))
        return

    def beyond(order: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(order) == count:
            yield order
            return
        left = [i for i in range(len(devices)) if i not in order]
        alike = set()
        for i in left:
            before = tuple(cluster.distance(i, j) for j in order)
            after = sorted(
                (cluster.distance(i, j), devices[j].speed, devices[j].memory_bytes or -1) for j in left if j != i
            )
            kind = (devices[i].speed, devices[i].memory_bytes, before, tuple(after))
            if kind not in alike:
                alike.add(kind)
                yield from beyond((*order, i))

    yield from beyond(())
