"""One stage's part in a checkpoint: the snapshot between two steps, the writing behind its back.

    compute   step 99 | snapshot | step 100 | step 101 | ...
    writer              [---- stage_0.safetensors ----]  entry for the manifest

Only the copy is on the critical path. A snapshot waits until the one before is written, so that
at most one copy of the stage's state is held.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from raypipe.engine.checkpoint import StageSnapshot, take_snapshot, write_snapshot
from raypipe.engine.crossing import Crossing
from raypipe.engine.executor import Executor
from raypipe.engine.setup import RunSetup
from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError

__all__ = ["ShardWriter", "writers_of"]


class ShardWriter:
    """Writes snapshots of one stage in the background.

    Args:
        run: the run's folder.
        snapshot: copies what the stage owns, called between two steps.
    """

    def __init__(self, run: Place, snapshot: Callable[[], StageSnapshot]) -> None:
        self._run = run
        self._snapshot = snapshot
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="raypipe-save")
        self._entries: dict[str, Future[dict[str, Any]]] = {}
        self._last: Future[dict[str, Any]] | None = None

    def begin(self, folder: str) -> None:
        """Copy the state now, write it to ``folder`` (below the run's) meanwhile. Errors are told by ``entry``."""
        if self._last is not None:
            self._last.exception()  # waits for the one before; its error is for whoever asks for its entry
        snapshot = self._snapshot()
        self._last = self._entries[folder] = self._pool.submit(self._write, folder, snapshot)

    def wait(self, folder: str, wait_s: float) -> bool:
        """Whether ``entry`` has something to say of ``folder``, within so many seconds."""
        future = self._entries.get(folder)
        return future is not None and not wait([future], wait_s).not_done

    def entry(self, folder: str, wait_s: float) -> dict[str, Any] | None:
        """This stage's entry in the manifest of ``folder``; None while it is not begun or not written.

        Raises:
            CheckpointError: it could not be written.
        """
        future = self._entries.get(folder)
        if future is None:
            return None
        if wait([future], wait_s).not_done:
            return None
        del self._entries[folder]
        return future.result()

    def close(self) -> None:
        """Wait for what is being written."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _write(self, folder: str, snapshot: StageSnapshot) -> dict[str, Any]:
        try:
            return write_snapshot(self._run, folder, snapshot)
        except CheckpointError as error:
            failure = type(error)(str(error))
        except Exception as error:  # noqa: BLE001  (told to whoever asks for the entry)
            failure = CheckpointError(f"{folder} could not be written: {type(error).__name__}: {error}")
        # Errors are kept until somebody asks; the traceback of the first one would keep a copy of the stage's state.
        del snapshot
        raise failure


def writers_of(executor: Executor, run: RunSetup) -> list[ShardWriter]:
    """Of the stages of one worker; on a replica that does not lead, of those whose optimizer's state it has a part of.

    Args:
        run: with a folder.
    """
    assert run.place is not None, "a run without a folder saves nothing"
    persistent, crossing = run.persistent, Crossing(executor.device)
    return [
        ShardWriter(run.place, partial(take_snapshot, work.program, work.state, persistent, crossing, work.feed.mark))
        for work in executor.works.values()
        if executor.placement.leads or work.state.slices is not None
    ]
