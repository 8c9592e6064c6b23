"""Waiting until all workers have written their part of a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from raypipe.errors import CheckpointError
from raypipe.runtime.workers.roster import results

__all__ = ["SAVE_TIMEOUT_S", "entries_of"]

SAVE_TIMEOUT_S = 3600.0


def entries_of(actors: Sequence[Any], folder: str, goes_on: Callable[[], bool]) -> list[dict[str, Any]]:
    """The manifest's entries of checkpoint ``folder``, as ``make_manifest`` takes them.

    Args:
        actors: of all workers. Of replicas the first one writes, and those that hold a part of the optimizer's state.
        goes_on: whether the workers are still configured as they were when the checkpoint was begun.

    Raises:
        CheckpointError: one of them could not write its part, or will not any more.
    """
    deadline_s = time.monotonic() + SAVE_TIMEOUT_S
    found: list[dict[str, Any]] = []
    missing = set(range(len(actors)))
    while missing and time.monotonic() < deadline_s:
        asked = {worker: actors[worker].entries.remote(folder) for worker in sorted(missing)}
        answers = results(list(asked.values()), SAVE_TIMEOUT_S, "writing a checkpoint")
        for worker, entries in zip(asked, answers, strict=True):
            if entries is not None:
                found += entries
                missing.discard(worker)
        if not goes_on():
            raise CheckpointError(f"{folder} was not completed: the stages were configured anew meanwhile.")
    if missing:
        raise CheckpointError(f"{folder} was not written within {SAVE_TIMEOUT_S:g} s.")
    return found
