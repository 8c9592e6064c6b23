"""A profile at other micro-batch sizes than the one that its nodes were measured at.

    whole model   t(b), a curve through several sizes
    one node      a line through two sizes, where it was measured at two; else it grows as the whole does

A layer of many parameters and few activations takes as long for one sample as for eight, a convolution an eighth:
with one factor for all nodes the cut of one size would be out of balance at another. The lines give the shares, the
curve gives their sum.
"""

from __future__ import annotations

import dataclasses

from raypipe.ir.graph import ModelGraph
from raypipe.ir.profile import Profile
from raypipe.planner.microbatch import StageTime, fit_stage_time

__all__ = ["graph_at", "seconds_at", "times_of"]

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
    here_s = profile.graph.busy_s
    if times is None:
        return here_s * samples / profile.microbatch_size
    return here_s * times.seconds(samples) / times.seconds(profile.microbatch_size)


def graph_at(profile: Profile, samples: int, total_s: float, graph: ModelGraph) -> ModelGraph:
    """The graph with seconds at another size.

    Args:
        total_s: of the whole model at that size, ``seconds_at``.
        graph: the profile's, or a coarser form of it, whose nodes then all grow alike.
    """
    if samples == profile.microbatch_size:
        return graph
    factors = _factors(profile, samples) if graph is profile.graph else None
    if factors is None:
        factors = [1.0] * len(graph.nodes)
    sum_s = sum(factor * node.busy_s for factor, node in zip(factors, graph.nodes, strict=True))
    scale = total_s / (sum_s or 1.0)
    nodes = (
        dataclasses.replace(
            node,
            forward_s=node.forward_s * scale * factor,
            backward_input_s=node.backward_input_s * scale * factor,
            backward_weight_s=node.backward_weight_s * scale * factor,
        )
        for factor, node in zip(factors, graph.nodes, strict=True)
    )
    return dataclasses.replace(graph, nodes=tuple(nodes))


def _factors(profile: Profile, samples: int) -> list[float] | None:
    """By node, its seconds at this size over those in the graph; None where it was measured at one size."""
    if profile.small is None:
        return None
    size, seconds = profile.small
    share = (samples - size) / (profile.microbatch_size - size)
    found = []
    for small_s, node in zip(seconds, profile.graph.nodes, strict=True):
        at_s = small_s + share * (node.busy_s - small_s)
        found.append(max(at_s / node.busy_s, LEAST) if node.busy_s else 1.0)
    return found
