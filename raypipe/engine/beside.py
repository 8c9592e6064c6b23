"""Which channels there are: between the workers of one process, and to the stages beside each stage of a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raypipe.engine.memory_channel import InMemoryChannel
from raypipe.engine.messages.channel import Channel
from raypipe.engine.placement import Placement
from raypipe.engine.stage import StageProgram

__all__ = ["channels_beside", "channels_between"]


def channels_beside(
    programs: Sequence[StageProgram], placement: Placement, channels: Mapping[int, Channel]
) -> dict[int, dict[int, Sequence[Channel]]]:
    """By stage of this worker, channels to the stages beside it, by lane; the frames of a link join co-located ones.

    So a stage that writes to its input in place spoils nothing of the one before, and strides arrive as anywhere else.
    """
    lanes = range(placement.lanes)
    own = placement.lanes_of(placement.worker)
    found: dict[int, dict[int, Sequence[Channel]]] = {}
    for stage in placement.stages:
        found[stage] = {}
        for s in placement.beside(stage):
            if s not in placement.co_located(stage):
                # Nothing comes of lanes that others have, but evaluations count all as the first.
                homes = [placement.home_of(s, lane if lane in own else own[0]) for lane in lanes]
                found[stage][s] = [channels[home] for home in homes]
    for stage in placement.stages:
        if stage + 1 in placement.co_located(stage):
            capacity = max(mode.num_outputs for mode in programs[stage].modes.values())
            ahead, back = InMemoryChannel.pair(f"stage {stage} <-> stage {stage + 1}", 0, capacity)
            found[stage][stage + 1], found[stage + 1][stage] = [ahead] * len(lanes), [back] * len(lanes)
    return found


def channels_between(placements: Sequence[Placement], programs: Sequence[StageProgram]) -> list[dict[int, Channel]]:
    """Channels in memory to the neighbours of each worker, by worker and neighbour."""
    found: list[dict[int, Channel]] = [{} for _ in placements]
    for one, placement in enumerate(placements):
        for other in sorted(placement.neighbours(programs)):
            if one < other:
                name = f"{placement.name_of(one)} <-> {placement.name_of(other)}"
                ends = InMemoryChannel.pair(name, 0, placement.message_capacity(programs, other))
                found[one][other], found[other][one] = ends
    return found
