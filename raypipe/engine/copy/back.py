"""A stage goes back, in place, to a step that some source has."""

from __future__ import annotations

from collections.abc import Callable

from raypipe.engine.checkpoint import StateSource, load_stage
from raypipe.engine.crossing import Crossing
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import MakeOptimizer, MakeScheduler, StageState

__all__ = ["bring_back"]


def bring_back(
    source: StateSource,
    program: StageProgram,
    state: StageState,
    make_optimizer: MakeOptimizer,
    make_scheduler: MakeScheduler | None,
    crossing: Crossing | None = None,
    share_out: Callable[[StageProgram, StageState], None] = lambda program, state: None,
) -> None:
    """Make the state that of the source: parameters and buffers in place, a new optimizer and a new scheduler.

    No scheduler can be turned back, and an optimizer of step 0 has kept nothing, which no ``load_state_dict`` makes of
    one that has. Whoever holds the old ones must be made anew too: an Executor is.

    Args:
        crossing: to the device where the state lies; None for the CPU.
        share_out: has the new optimizer step slices, where replicas share out its state.

    Raises:
        CheckpointError: the source lacks something of the stage; the state is unusable then.
    """
    state.renew(make_optimizer, make_scheduler)
    share_out(program, state)
    load_stage(source, program, state, crossing=crossing)
