"""The state of a worker's stages, made of wherever their parameters and buffers can be read."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from raypipe.engine.checkpoint import CheckpointSource, StateSource, read_all
from raypipe.engine.setup import RunSetup
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import StageState

__all__ = ["names_of", "states_of"]


def names_of(program: StageProgram) -> tuple[str, ...]:
    """Of all tensors of a stage."""
    return (*program.parameters, *program.buffers)


def states_of(
    run: RunSetup, programs: Sequence[StageProgram], sources: Sequence[StateSource | str]
) -> list[StageState]:
    """Of these stages, with new optimizers; those that share a parameter get a copy each."""
    with contextlib.ExitStack() as stack:
        found = []
        for source in sources:
            if isinstance(source, str):
                assert run.place is not None, "a run without a folder has no checkpoints"
                source = stack.enter_context(CheckpointSource(run.place / source))
            found.append(source)
        return [
            StageState(
                program,
                read_all(found, names_of(program)),
                run.make_optimizer,
                run.make_scheduler,
            )
            for program in programs
        ]
