"""Loading of state: builds the states of a worker's stages from initial tensors, checkpoints or in-memory copies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

import torch

from raypipe.data.stream import Mark
from raypipe.engine.copy.copy_header import COMMON, copy_source
from raypipe.engine.device.device import TransferKind
from raypipe.engine.io.checkpoint import StateSource, checkpoint_source, load_stage, read_all
from raypipe.engine.messages.transfer import DeviceTransfer
from raypipe.engine.optim.state import StageState
from raypipe.engine.setup import RunSetup
from raypipe.engine.stage.stage import StageProgram
from raypipe.errors import CheckpointError
from raypipe.runtime.worker.copies import WorkerCopies
from raypipe.runtime.worker.copy_transfer import RemoteCopy, Tally

Sharing = Callable[[StageProgram, StageState], None]


def _nothing(program: StageProgram, state: StageState) -> None:
    """Default of ``Sharing``: replicas do not share out the optimizer state."""


def names_of(program: StageProgram) -> tuple[str, ...]:
    """List the names of a stage's parameters and buffers."""
    return (*program.parameters, *program.buffers)


def states_of(
    run: RunSetup,
    programs: Sequence[StageProgram],
    sources: Sequence[StateSource | str],
    crossing: DeviceTransfer,
    shared: Sharing = _nothing,
) -> list[StageState]:
    """Build the states of stages with new optimizers; stages that share a parameter get a copy each.

    Args:
        sources: sources of parameters and buffers, each read from the first source that has it; a string is the name of
            a checkpoint in the run's folder.
        crossing: transfers tensors to the device of the states.
        shared: called with each (program, state), to shard the optimizer state if it is sharded over replicas.
    """
    with contextlib.ExitStack() as stack:
        opened = []
        for source in sources:
            if isinstance(source, str):
                assert run.place is not None, "a run without a folder has no checkpoints"
                source = stack.enter_context(checkpoint_source(run.place / source))
            opened.append(source)
        states = [
            StageState(
                program,
                crossing.named(read_all(opened, names_of(program)), TransferKind.PARAMETERS),
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
    crossing: DeviceTransfer,
    shared: Sharing = _nothing,
) -> list[StageState]:
    """Build the states of stages, optimizer state included, from in-memory copies.

    Args:
        source: the copies, joined by ``joined``.
        crossing, shared: see ``states_of``.

    Raises:
        CheckpointError: the copies lack something of a stage.
    """
    states = []
    for program in programs:
        names = names_of(program)
        if missing := [name for name in names if name not in source.names]:
            raise CheckpointError(f"{source.title} lacks {missing[0]!r}, so no stage can hold it.")
        infos = {name: source.info(name) for name in names}
        tensors = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in infos.items()}
        tensors = crossing.named(tensors, TransferKind.PARAMETERS)
        state = StageState(program, tensors, run.make_optimizer, run.make_scheduler)
        shared(program, state)
        load_stage(source, program, state, crossing=crossing)
        states.append(state)
    return states


def joined(
    copies: Iterable[RemoteCopy], own: WorkerCopies, me: str, names: Iterable[str]
) -> tuple[StateSource, Tally, Mark | None]:
    """Join all copies of stages that have any of these names to one source.

    Copies in this process are read in place; also if ``copies`` names another replica's copy of the same stage and
    step.

    Args:
        copies: references to all pieces of each stage.
        own: copies in this process.
        me: Ray's id of this actor.
        names: names of the parameters and buffers that are needed.

    Returns:
        The source; a counter of the bytes that are read from other workers; position in the stream of train_data, or
        None.
    """
    wanted, moved, named = set(names), Tally(), list(copies)
    stages = {copy.stage for copy in named if copy.piece == COMMON and wanted.intersection(copy.names)}
    pieces = [
        own.piece(*copy.of) if copy.key == me or own.has(*copy.of) else copy.opened(moved)
        for copy in named
        if copy.stage in stages
    ]
    marks = (Mark.of(piece.header.mark) for piece in pieces if piece.header.mark is not None)
    return copy_source(pieces), moved, next(marks, None)
