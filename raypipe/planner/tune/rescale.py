"""A profile at other micro-batch sizes than the one that its nodes were measured at.

    whole model   t(b), a curve through several sizes
    one node      lines through the sizes it was measured at, two or three; else it grows as the whole does

A layer of many parameters and few activations takes as long for one sample as for eight, a convolution an eighth:
with one factor for all nodes the cut of one size would be out of balance at another. The lines give the shares, the
curve gives their sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from raypipe.ir.graph import ModelGraph, Node
from raypipe.ir.profile import Profile
from raypipe.planner.columns import columns_of
from raypipe.planner.stage_time import StageTime, fit_stage_time

__all__ = ["graph_at", "seconds_at", "seconds_by_count", "slower", "times_of"]

Floats = NDArray[np.float64]
LEAST = 1e-3
"""Of its measured seconds, what a node takes at least at any size: lines are not followed to zero and below."""


def times_of(profile: Profile) -> StageTime | None:
    """t(b) of the whole model; None where it was measured at one size only."""
    points = profile.seconds_by_size
    return fit_stage_time(dict(points)) if len(points) > 1 else None


def seconds_at(profile: Profile, times: StageTime | None, samples: int) -> float:
    """Seconds of one micro-batch of so many samples through the whole model, by the curve through the points.

    Args:
        times: ``times_of(profile)``.
    """
    here_s = float(columns_of(profile.graph).busy_s.sum())
    if times is None:
        return here_s * samples / profile.microbatch_size
    return here_s * times.seconds(samples) / times.seconds(profile.microbatch_size)


def seconds_by_count(
    profile: Profile, minibatch_size: int, num_microbatches: int, takes: Callable[[int], bool] = bool
) -> tuple[tuple[int, float], ...]:
    """(M, seconds of one micro-batch through the whole model) for every M that cuts the mini-batch evenly.

    Args:
        num_microbatches: that is planned; it need not be even.
        takes: samples of a micro-batch -> whether the model takes all that an epoch is cut into.

    Returns:
        empty where the model was measured at one size only.
    """
    times = times_of(profile)
    if times is None:
        return ()
    even = {m for m in range(1, minibatch_size + 1) if minibatch_size % m == 0 and takes(minibatch_size // m)}
    counts = sorted(even | {num_microbatches})
    return tuple((m, seconds_at(profile, times, -(-minibatch_size // m))) for m in counts)


def graph_at(profile: Profile, samples: int, total_s: float, graph: ModelGraph) -> ModelGraph:
    """The graph with seconds at another size.

    Args:
        total_s: of the whole model at that size, ``seconds_at``.
        graph: the profile's, or a coarser form of it, whose nodes then all grow alike.
    """
    if samples == profile.microbatch_size:
        return graph
    busy_s = columns_of(graph).busy_s
    factors = np.ones(len(graph.nodes))
    other = profile.small
    if graph is profile.graph and other is not None:
        factors = _factors(other, busy_s, (samples - other[0]) / (profile.microbatch_size - other[0]))
    factors *= total_s / (float((factors * busy_s).sum()) or 1.0)
    nodes = tuple(slower(node, factor) for node, factor in zip(graph.nodes, factors.tolist(), strict=True))
    return dataclasses.replace(graph, nodes=nodes)


def _factors(other: tuple[int, tuple[float, ...]], busy_s: Floats, share: float) -> Floats:
    """By node, its seconds at a third size over ``busy_s``.

    Args:
        share: how far the size is from the other one, in steps from there to that of ``busy_s``.
    """
    other_s = np.array(other[1])
    at_s = other_s + share * (busy_s - other_s)
    ratio = np.divide(at_s, busy_s, out=np.ones_like(busy_s), where=busy_s > 0)
    found: Floats = np.maximum(ratio, LEAST)
    return found


def slower(node: Node, factor: float) -> Node:
    """``dataclasses.replace`` with so many times the seconds, at a third of its price: there may be ten thousand."""
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
