"""What is asked, and what does not change between the decisions that are compared."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import ModelGraph
from raypipe.ir.profile import Profile
from raypipe.planner.partition.limits import Limits
from raypipe.planner.stage_time import StageTime
from raypipe.planner.tune.coarse import coarse
from raypipe.planner.tune.request import Request
from raypipe.planner.tune.rescale import graph_at, seconds_at, times_of
from raypipe.planner.tune.resolve import memory_model

__all__ = ["Problem", "limits_of"]


@dataclass(frozen=True)
class Problem:
    """What does not change between attempts.

    Attributes:
        described: the cluster is the user's, not assumed.
    """

    request: Request
    profile: Profile
    cluster: Cluster
    described: bool

    @property
    def searches(self) -> bool:
        """Whether the cut is left to a solver, so that a shorter graph will do to compare."""
        return not self.request.split_points and self.request.partitioner != "parameters"

    @functools.cached_property
    def short(self) -> ModelGraph:
        """The graph to compare with."""
        return coarse(self.profile.graph) if self.searches else self.profile.graph

    @functools.cached_property
    def times(self) -> StageTime | None:
        """t(b) of the whole model."""
        return times_of(self.profile)

    def seconds(self, samples: int) -> float:
        """Of one micro-batch of so many samples through the whole model."""
        return seconds_at(self.profile, self.times, samples)

    def at(self, samples: int, graph: ModelGraph) -> ModelGraph:
        """The profile's graph, or a coarser form of it, with seconds at this size."""
        return graph_at(self.profile, samples, self.seconds(samples), graph)

    def asking(self, request: Request) -> Problem:
        """The same with another request for the same graph; what was made of that is kept."""
        other = dataclasses.replace(self, request=request)
        other.__dict__.update({name: vars(self)[name] for name in ("short", "times") if name in vars(self)})
        return other

    @property
    def unbound(self) -> Problem:
        """The same on devices with any amount of memory."""
        devices = tuple(dataclasses.replace(device, memory_bytes=None) for device in self.cluster.devices)
        free = self.asking(dataclasses.replace(self.request, memory_limit_bytes=None))
        return dataclasses.replace(free, cluster=Cluster(devices, self.cluster.links))

    @property
    def bounded(self) -> bool:
        """Whether memory can refuse anything."""
        caps = (self.request.memory_limit_bytes, *(device.memory_bytes for device in self.cluster.devices))
        return any(cap is not None for cap in caps)

    @property
    def links(self) -> str:
        """Where they come from, in words."""
        if self.described:
            return "as described"
        link = self.cluster.links[0]
        return f"assumed ({link.bandwidth_bytes_s / 1e9:g} GB/s, {link.latency_s * 1e3:g} ms)"


def limits_of(request: Request, num_stages: int | None, stages: int, count: int, size: int) -> Limits:
    """What a cut has to keep to.

    Args:
        num_stages: that it must have; None leaves them to the solver, and ``stages`` is how many there may be.
        count, size: micro-batches, and samples in each.
    """
    return Limits(
        num_stages=num_stages,
        memory=memory_model(request, stages, count, size),
        memory_limit_bytes=request.memory_limit_bytes,
        sums_factor=request.sums_factor,
        shards=request.shards,
        codecs=request.codecs,
        update_interval=count,  # synchronous: replicas reduce their gradients once per step
    )
