"""What a run writes down for people while it trains; a disk that is full ends nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raypipe.engine.rundir import RunFolder
from raypipe.errors import CheckpointError
from raypipe.runtime.run.spec import Watcher

__all__ = ["Notes"]


class Notes:
    """Writes that training does not need: one that fails is told, and told again when it works once more.

    Args:
        watcher: told of a write that failed, as the message of the run's status.
    """

    def __init__(self, folder: RunFolder, watcher: Watcher) -> None:
        self._folder, self._watcher = folder, watcher
        self._complaint = ""  # of the last write, where it failed

    def try_to(self, write: Callable[[], None]) -> bool:
        """Write, and say whether that worked; a failure neither ends the run nor hides why it ended."""
        try:
            write()
        except CheckpointError as error:
            self._complaint = str(error)
            self._watcher.tell(message=self._complaint)
            return False
        if self._complaint:
            self._complaint = ""
            self._watcher.tell(message="")
        return True

    def event(self, decision: str, reason: str, **numbers: Any) -> None:
        """A line of events.jsonl."""
        self.try_to(lambda: self._folder.event(decision, reason, **numbers))
