"""Planning problem (request, profile and cluster, which all candidates share) and decision (the result of planning).

A profile is rescaled to micro-batch sizes other than the one that its nodes were measured at:

    whole model   t(b), a curve through the measured sizes
    one node      a line through two measured sizes; without a second one it grows as the whole model does

The lines give each node's share of the seconds, the curve gives their sum. One factor for all nodes would not do: a
layer with many parameters and few activations takes as long for one sample as for eight, a convolution takes an eighth,
so a cut that is balanced at one size is not balanced at another.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import ModelGraph, Node
from raypipe.ir.plan import Candidate, Partition, Prediction
from raypipe.ir.profile import Profile
from raypipe.planner.cost.columns import columns_of
from raypipe.planner.cost.microbatch import MicrobatchChoice, StageTime, fit_stage_time
from raypipe.planner.partition.costs import Limits
from raypipe.planner.search.request import Request
from raypipe.planner.search.schedule_settings import memory_model

Floats = NDArray[np.float64]
LEAST = 1e-3
"""Least ratio of a node's extrapolated seconds to its measured seconds."""


def times_of(profile: Profile) -> StageTime | None:
    """Fit t(b), the seconds of a micro-batch of b samples through the whole model; None if one size was measured."""
    points = profile.seconds_by_size
    return fit_stage_time(dict(points)) if len(points) > 1 else None


def seconds_at(profile: Profile, samples: int) -> float:
    """Compute the seconds of one micro-batch of ``samples`` samples through the whole model.

    They are proportional to samples if the model was measured at one size only.
    """
    here_s, times = float(columns_of(profile.graph).busy_s.sum()), times_of(profile)
    if times is None:
        return here_s * samples / profile.microbatch_size
    return here_s * times.seconds(samples) / times.seconds(profile.microbatch_size)


def seconds_by_count(
    profile: Profile, minibatch_size: int, num_microbatches: int, takes: Callable[[int], bool] = bool
) -> tuple[tuple[int, float], ...]:
    """List (M, seconds of one micro-batch through the whole model) for every M that divides the mini-batch.

    Args:
        num_microbatches: planned M, which is included even if it does not divide the mini-batch.
        takes: returns True if the model accepts micro-batches of so many samples throughout an epoch.

    Returns:
        the list; empty if the model was measured at one size only.
    """
    if len(profile.seconds_by_size) < 2:
        return ()
    even = {m for m in range(1, minibatch_size + 1) if minibatch_size % m == 0 and takes(minibatch_size // m)}
    counts = sorted(even | {num_microbatches})
    return tuple((m, seconds_at(profile, -(-minibatch_size // m))) for m in counts)


def graph_at(profile: Profile, samples: int) -> ModelGraph:
    """Return the profile's graph with the seconds of its nodes rescaled to micro-batches of ``samples`` samples."""
    graph = profile.graph
    if samples == profile.microbatch_size:
        return graph
    factors = factors_at(profile, samples).tolist()
    nodes = tuple(slower(node, factor) for node, factor in zip(graph.nodes, factors, strict=True))
    return dataclasses.replace(graph, nodes=nodes)


def factors_at(profile: Profile, samples: int) -> Floats:
    """Compute by node the factor of its seconds if micro-batches have ``samples`` samples; see the module."""
    busy_s, other, here = columns_of(profile.graph).busy_s, profile.small, profile.microbatch_size
    factors = np.ones(len(busy_s))
    if samples == here:
        return factors
    if other is not None:
        other_s = np.array(other[1])
        at_s = other_s + (samples - other[0]) / (here - other[0]) * (busy_s - other_s)
        np.divide(at_s, busy_s, out=factors, where=busy_s > 0)
        factors = np.maximum(factors, LEAST)
    return factors * (seconds_at(profile, samples) / (float((factors * busy_s).sum()) or 1.0))


def slower(node: Node, factor: float) -> Node:
    """Return the node with its seconds multiplied by ``factor``; three times as fast as ``dataclasses.replace``."""
    return Node(
        node.name,
        node.module,
        node.param_names,
        node.param_bytes,
        node.cut_bytes,
        node.forward_s * factor,
        node.backward_input_s * factor,
        node.backward_weight_s * factor,
        node.activation_bytes,
        node.output_bytes,
        node.frozen_bytes,
        node.buffer_bytes,
        node.source,
        node.workspace,
    )


@dataclass(frozen=True)
class Problem:
    """Request, profile and cluster that all candidates share.

    Attributes:
        described: True if the user described the cluster, False if it is assumed.
    """

    request: Request
    profile: Profile
    cluster: Cluster
    described: bool

    @property
    def cut_is_given(self) -> bool:
        """True if the cut follows from the user's split points or from the sizes of parameters, without a search."""
        return bool(self.request.split_points) or self.request.partitioner == "parameters"

    @functools.cached_property
    def times(self) -> StageTime | None:
        """Curve t(b) of the whole model (see the module); None if it was measured at one micro-batch size only."""
        return times_of(self.profile)

    def at(self, samples: int) -> ModelGraph:
        """Return the profile's graph with node seconds rescaled to micro-batches of this many samples; cached."""
        if samples not in self._graphs:
            self._graphs[samples] = graph_at(self.profile, samples)
        return self._graphs[samples]

    @functools.cached_property
    def _graphs(self) -> dict[int, ModelGraph]:
        return {}

    def asking(self, request: Request) -> Problem:
        """Return a copy of this problem with another request and the same cached values."""
        return self._with(request=request)

    @functools.cached_property
    def unlimited(self) -> Problem:
        """Copy of the problem without memory limits."""
        devices = tuple(dataclasses.replace(device, memory_bytes=None) for device in self.cluster.devices)
        request = dataclasses.replace(self.request, memory_limit_bytes=None)
        return self._with(request=request, cluster=Cluster(devices, self.cluster.links))

    def _with(self, **fields: Any) -> Problem:
        other = dataclasses.replace(self, **fields)
        other.__dict__.update(times=self.times, _graphs=self._graphs)
        return other

    @property
    def bounded(self) -> bool:
        """True if any memory limit is known."""
        caps = (self.request.memory_limit_bytes, *(device.memory_bytes for device in self.cluster.devices))
        return any(cap is not None for cap in caps)

    @property
    def links(self) -> str:
        """Origin of the links' numbers, for reports."""
        if self.described:
            return "as described"
        link = self.cluster.links[0]
        return f"assumed ({link.bandwidth_bytes_s / 1e9:g} GB/s, {link.latency_s * 1e3:g} ms)"


def limits_of(request: Request, num_stages: int, count: int, size: int) -> Limits:
    """Build the limits that a cut has to keep.

    Args:
        count, size: number of micro-batches, and samples in each.
    """
    return Limits(
        num_stages=num_stages,
        memory=memory_model(request, num_stages, count, size),
        memory_limit_bytes=request.memory_limit_bytes,
        sums_factor=request.sums_factor,
        shards=request.shards,
        codecs=request.codecs,
    )


NOTHING = Prediction(0.0, 0.0, 0.0, None, "", "", "", (), ())
"""Empty prediction, in which decisions that are only compared fill in ``step_s`` and nothing else."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Result of planning: a complete configuration of a run, from which its plan and stages can be built.

    Attributes:
        request: request with a chosen schedule.
        graph: graph with seconds at the chosen micro-batch size.
        limits: limits of the cut, with the memory model of the schedule.
        choice: how the number of micro-batches was chosen; None if it was given, or follows from a fixed rule.
        reasons: (choice, reason) pairs, as from ``reasons_of``.
        candidates: shapes that were compared; empty if the number of replicas was given.
    """

    request: Request
    graph: ModelGraph
    cluster: Cluster
    limits: Limits
    partition: Partition
    minibatch_size: int
    microbatch_size: int
    num_microbatches: int
    choice: MicrobatchChoice | None = None
    prediction: Prediction = NOTHING
    reasons: tuple[tuple[str, str], ...] = ()
    candidates: tuple[Candidate, ...] = ()

    def taking(self, step_s: float) -> Decision:
        """Return the decision with these seconds of a step as its whole prediction."""
        return dataclasses.replace(self, prediction=dataclasses.replace(NOTHING, step_s=step_s))


def step_s_of(decision: Decision) -> float:
    """Return the predicted seconds of a decision's step, by which decisions are compared."""
    return decision.prediction.step_s
