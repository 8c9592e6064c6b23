"""The state of a worker's stages, made of wherever their parameters and buffers can be read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from raypipe.engine.checkpoint import CheckpointSource, StateSource, load_stage, read_all
from raypipe.engine.crossing import Crossing
from raypipe.engine.device import Crosses
from raypipe.engine.setup import RunSetup
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import StageState
from raypipe.errors import CheckpointError

__all__ = ["Sharing", "names_of", "states_from", "states_of"]

Sharing = Callable[[StageProgram, StageState], None]


def _nothing(program: StageProgram, state: StageState) -> None:
    """Nothing is shared out."""


def names_of(program: StageProgram) -> tuple[str, ...]:
    """Of all tensors of a stage."""
    return (*program.parameters, *program.buffers)


def states_of(
    run: RunSetup,
    programs: Sequence[StageProgram],
    sources: Sequence[StateSource | str],
    crossing: Crossing,
    shared: Sharing = _nothing,
) -> list[StageState]:
    """Of these stages, with new optimizers; those that share a parameter get a copy each.

    Args:
        crossing: to the device where they are to lie.
        shared: has an optimizer step slices, where replicas share out its state.
    """
    with contextlib.ExitStack() as stack:
        found = []
        for source in sources:
            if isinstance(source, str):
                assert run.place is not None, "a run without a folder has no checkpoints"
                source = stack.enter_context(CheckpointSource(run.place / source))
            found.append(source)
        states = [
            StageState(
                program,
                crossing.named(read_all(found, names_of(program)), Crosses.PARAMETERS),
                run.make_optimizer,
                run.make_scheduler,
            )
            for program in programs
        ]
    for program, state in zip(programs, states, strict=True):
        shared(program, state)
    return states


def states_from(
    run: RunSetup,
    programs: Sequence[StageProgram],
    source: StateSource,
    crossing: Crossing,
    shared: Sharing = _nothing,
) -> list[StageState]:
    """Of these stages as they are in the copies of ``source``, with what their optimizers have kept.

    Args:
        crossing, shared: see ``states_of``.

    Raises:
        CheckpointError: the copies lack something of a stage.
    """
    found = []
    for program in programs:
        names = names_of(program)
        if missing := [name for name in names if name not in source.names]:
            raise CheckpointError(f"{source.title} lacks {missing[0]!r}, so no stage can hold it.")
        infos = {name: source.info(name) for name in names}
        tensors = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in infos.items()}
        tensors = crossing.named(tensors, Crosses.PARAMETERS)
        state = StageState(program, tensors, run.make_optimizer, run.make_scheduler)
        shared(program, state)
        load_stage(source, program, state, crossing=crossing)
        found.append(state)
    return found
