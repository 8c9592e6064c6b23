"""Loading of state: builds the states of a worker's stages from initial tensors, checkpoints or in-memory copies."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Sequence

import ray
import torch

from raypipe.data.stream import Mark
from raypipe.data.stream_source import StreamSource
from raypipe.engine.copy.copy_header import COMMON, copy_source
from raypipe.engine.device.device import Device, TransferKind
from raypipe.engine.io.checkpoint import StateSource, checkpoint_source, load_stage, read_all
from raypipe.engine.messages.transfer import DeviceTransfer
from raypipe.engine.optim.state import MakeOptimizer, StageState, shard_optimizer
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.stage.stage import StageProgram
from raypipe.errors import CheckpointError
from raypipe.runtime.worker.copies import WorkerCopies
from raypipe.runtime.worker.copy_transfer import RemoteCopy, Tally


def names_of(stage: StageProgram | StageState) -> tuple[str, ...]:
    """List the names of a stage's parameters and buffers."""
    return (*stage.parameters, *stage.buffers)


def rehearse(make_optimizer: MakeOptimizer) -> None:
    """Create an optimizer for a dummy parameter and step it once, so that the optimizer's modules are imported."""
    stand_in = torch.nn.Parameter(torch.zeros(1))
    stand_in.grad = torch.zeros(1)
    with contextlib.suppress(Exception):  # imports are done even if it cannot be made for such a parameter
        make_optimizer([("spare", stand_in)]).step()
    # Imported modules live as long as the process; the first collection of all of them takes a while.
    gc.collect()
    gc.freeze()


def load_states(
    run: RunSetup, setup: GenerationSetup, worker: int, sources: Sequence[StateSource | str | RemoteCopy],
    present: list[StageState], own: WorkerCopies, device: Device,
) -> tuple[list[StageState], int]:  # fmt: skip
    """Build the states of a worker's stages from the given sources.

    Copies in this process of steps after the loaded state are dropped, because the run repeats these steps.

    Args:
        sources: see StageActor.load.
        present: present states of the worker. They are overwritten and returned if they have the parameters and buffers
            of the new stages, and ``sources`` are copies.
        own: all copies in this process.

    Returns:
        (the states, number of bytes read from other workers' copies).
    """
    placement = setup.placement(worker)
    programs = [setup.programs[stage] for stage in placement.stages]
    copies, crossing = [source for source in sources if isinstance(source, RemoteCopy)], DeviceTransfer(device)
    if not copies:
        others = [source for source in sources if not isinstance(source, RemoteCopy)]
        states = states_of(run, programs, others, crossing)
        own.forget_after(-1)  # their steps are replayed, perhaps with other codecs
        return states, 0
    names = [names_of(program) for program in programs]
    me = ray.get_runtime_context().get_actor_id()
    source, moved, mark = joined(copies, own, me, [name for of_stage in names for name in of_stage])
    if mark is not None and isinstance(stream := run.sources["train"], StreamSource):
        stream.learn(mark)
    if names == [names_of(state) for state in present]:
        states = present
        for state in states:
            state.renew(run.make_optimizer, run.make_scheduler)
    else:
        states = empty_states(run, programs, source, crossing)
    for program, state in zip(programs, states, strict=True):
        shard_optimizer(program, state, placement, run.settings)
        load_stage(source, program, state, crossing=crossing)
    own.forget_after(copies[0].step)
    return states, moved.total


def states_of(
    run: RunSetup, programs: Sequence[StageProgram], sources: Sequence[StateSource | str], crossing: DeviceTransfer
) -> list[StageState]:
    """Build the states of stages with new optimizers; stages that share a parameter each get their own copy of it.

    Args:
        sources: sources of parameters and buffers. Each tensor is read from the first source that has it. A string is
            the name of a checkpoint in the run's folder.
        crossing: transfers tensors to the device of the states.
    """
    with contextlib.ExitStack() as stack:
        opened = []
        for source in sources:
            if isinstance(source, str):
                assert run.place is not None, "a run without a folder has no checkpoints"
                source = stack.enter_context(checkpoint_source(run.place / source))
            opened.append(source)
        return [
            StageState(
                program,
                crossing.named(read_all(opened, names_of(program)), TransferKind.PARAMETERS),
                run.make_optimizer,
                run.make_scheduler,
            )
            for program in programs
        ]


def empty_states(
    run: RunSetup, programs: Sequence[StageProgram], source: StateSource, crossing: DeviceTransfer
) -> list[StageState]:
    """Build the states of stages with uninitialized tensors and new optimizers; the caller loads the tensors.

    Args:
        source: only shapes and dtypes of the tensors are read from it.
        crossing: transfers tensors to the device of the states.

    Raises:
        CheckpointError: the source lacks a tensor of a stage.
    """
    states = []
    for program in programs:
        names = names_of(program)
        if missing := [name for name in names if name not in source.names]:
            raise CheckpointError(f"{source.title} lacks {missing[0]!r}, so no stage can hold it.")
        infos = {name: source.info(name) for name in names}
        tensors = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in infos.items()}
        tensors = crossing.named(tensors, TransferKind.PARAMETERS)
        states.append(StageState(program, tensors, run.make_optimizer, run.make_scheduler))
    return states


def joined(
    copies: Iterable[RemoteCopy], own: WorkerCopies, me: str, names: Iterable[str]
) -> tuple[StateSource, Tally, Mark | None]:
    """Join the copies of all stages that have any of these names into one source.

    Copies in this process are read in place. A copy of another replica is replaced by this process's own copy of the
    same stage and step, if there is one.

    Args:
        copies: references to all pieces of each stage's copy, see CopyHeader.
        own: copies in this process.
        me: Ray's id of this actor.
        names: names of the parameters and buffers that are needed.

    Returns:
        (source, counter of the bytes that are read from other workers, position in the stream of train_data). The
        position is None if no stage reads a stream.
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
