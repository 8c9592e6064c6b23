"""Stages of a process go back to a checkpoint: their state, and where they go on in a stream."""

from __future__ import annotations

from collections.abc import Iterable

from raypipe.engine.checkpoint import FreshOptions, load_stage
from raypipe.engine.checkpoint.stream_mark import read_mark
from raypipe.engine.crossing import Crossing
from raypipe.engine.data.stream_source import StreamSource
from raypipe.engine.setup import RunSetup
from raypipe.engine.stage_work import StageWork

__all__ = ["restore_stages"]


def restore_stages(
    works: Iterable[StageWork], run: RunSetup, folder: str, fresh: FreshOptions, crossing: Crossing
) -> None:
    """Of a checkpoint written at any number of stages.

    Args:
        folder: below the run's.
        fresh: options of the optimizer that are not taken back.
        crossing: to the device of these stages.

    Raises:
        CheckpointError: another model, another optimizer, or a file that is not there.
    """
    assert run.place is not None, "a run that saves nothing has nothing to go back to"
    checkpoint = run.place / folder
    mark = read_mark(checkpoint) if isinstance(run.sources.get("train"), StreamSource) else None
    for work in works:
        load_stage(checkpoint, work.program, work.state, run.persistent, fresh, crossing)
        work.ring.fill()
        work.feed.learn(mark)
