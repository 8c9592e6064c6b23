"""Marks of streams in a checkpoint: where each stage that reads one goes on, as JSON beside the stage's files.

    checkpoints/step_0000200/stage_0.stream.json     {"position": 1600, "number": 2, "within": 64, "state": ..., ...}

The run's position, which counts, is in the manifest. A mark only says how to get there without reading the stream from
its begin, so one that is missing or damaged costs time and no exactness; and that of any stage, of whatever process
wrote it, does for every other.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from raypipe.engine.data.stream import Mark
from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError

__all__ = ["read_mark", "write_mark"]

ENDING = ".stream.json"
MOST_BYTES = 1 << 26


def write_mark(folder: Place, stage: int, mark: Mark) -> None:
    """Beside the files of a stage.

    Raises:
        CheckpointError: the place is full, forbidden or unreachable.
    """
    found = mark._asdict()
    folder.write_bytes(f"stage_{stage}{ENDING}", json.dumps({**found, "sha256": _digest(found)}).encode())


def read_mark(checkpoint: Place) -> Mark | None:
    """The mark in a checkpoint; None where it has no good one."""
    try:
        entries = checkpoint.list()
        folders = [checkpoint, *(checkpoint / entry.name for entry in entries if entry.is_folder)]
        files = [(folder, entry.name) for folder in folders for entry in folder.list() if entry.name.endswith(ENDING)]
    except CheckpointError:
        return None
    found = (_read(folder, name) for folder, name in files)
    return next((mark for mark in found if mark is not None), None)


def _read(folder: Place, name: str) -> Mark | None:
    try:
        found = json.loads(folder.read_bytes(name, MOST_BYTES))
        if found.pop("sha256") != _digest(found):
            return None
        return Mark.of(found)
    except (CheckpointError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _digest(found: Any) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
