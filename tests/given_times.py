"""Profiles whose times are given: what a plan makes of them is the same on every machine."""

from __future__ import annotations

from dataclasses import replace

from raypipe.ir.profile import Profile

__all__ = ["with_times"]


def with_times(profile: Profile, forward_s: float = 1e-3) -> Profile:
    """The same model where every operation takes as long as every other, and its backward twice as long.

    Args:
        forward_s: seconds of an operation, for a micro-batch of any size: more of them always take longer.
    """
    nodes = tuple(
        replace(node, forward_s=forward_s, backward_input_s=forward_s, backward_weight_s=forward_s)
        for node in profile.graph.nodes
    )
    whole_s = 3 * forward_s * len(nodes)
    sizes = tuple((size, whole_s) for size, _ in profile.seconds_by_size)
    small = None if profile.small is None else (profile.small[0], (3 * forward_s,) * len(nodes))
    return replace(profile, graph=replace(profile.graph, nodes=nodes), seconds_by_size=sizes, small=small)
