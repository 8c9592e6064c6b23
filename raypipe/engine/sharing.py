"""Which replicas share out the state of a stage's optimizer, and how: the plan and the parameters say, nobody is asked.

2 replicas    slices 0 | 1         a copy of the state, a checkpoint, or a state of other slices is read by name,
3 replicas    slices 0 | 1 | 2     and each replica keeps what it steps
"""

from __future__ import annotations

from raypipe.engine.placement import Placement
from raypipe.engine.replicas.slices import Slices, parts_of
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import Settings, StageState

__all__ = ["share_out", "shares_out"]


def shares_out(placement: Placement, settings: Settings) -> bool:
    """Whether the replicas of a worker's stages share out the state of their optimizers."""
    return settings.shard_optimizer and len(placement.replicas) > 1


def share_out(program: StageProgram, state: StageState, placement: Placement, settings: Settings) -> None:
    """Have the optimizer of a stage step this worker's slices from now on, where replicas share out its state.

    Before its state is read, so that no replica ever holds that of all slices.

    Raises:
        StageError: it has stepped other ones.
    """
    if shares_out(placement, settings):
        parts = parts_of(program, state.parameters, placement)
        state.shard(Slices([*parts.values()], placement.replica, state.parameters))
