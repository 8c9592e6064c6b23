"""Runs by their folders, without a cluster: what each is called, how far it is, and whether somebody trains it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raypipe.engine.metrics import METRICS, steps_written
from raypipe.engine.rundir import EVENTS, read_events
from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError, ConfigError, LeaseError
from raypipe.runtime.run.lease import LEASE, read_lease

__all__ = ["DEFAULT_STORAGE", "RunSummary", "last_word", "runs_in", "summary_of"]

DEFAULT_STORAGE = "~/ray_results"
"""Where Ray Train puts its runs too; a run always leaves a checkpoint behind."""
_ENDS = {"finish": "finished", "fail": "failed", "stop": "stopped"}


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run.

    Attributes:
        state: finished, stopped or failed, as it said itself; running while its lease is held (of another machine:
            look at last_write_s); killed where its process is gone; unknown where an old release left no lease.
        step, num_steps: done, as far as metrics were written, and wanted.
        last_write_s: seconds since 1970, of its newest file; None where the place does not say.
    """

    name: str
    state: str
    step: int
    num_steps: int
    last_write_s: float | None
    folder: str


def runs_in(storage: Place) -> list[RunSummary]:
    """All runs of a folder, the one that was written last at the end; other folders are left out.

    Raises:
        CheckpointError: the place cannot be reached.
    """
    folders = [storage / entry.name for entry in storage.list() if entry.is_folder]
    found = [summary_of(folder) for folder in folders if folder.exists(EVENTS)]
    return sorted(found, key=lambda run: (run.last_write_s or 0.0, run.name))


def summary_of(folder: Place) -> RunSummary:
    """One run by its folder, which has an events.jsonl.

    Raises:
        ConfigError: the file cannot be read.
    """
    events = _events(folder)
    begun = max((i for i, event in enumerate(events) if event["decision"] == "start"), default=0)
    num_steps = int(events[begun].get("num_steps", 0)) if events else 0
    end = _last(events)
    state = _ENDS[end["decision"]] if end else _state_by_lease(folder)
    steps = [int(event["step"]) for event in events if isinstance(event.get("step"), int)]
    step = max(_steps_written(folder), steps[-1] if steps else 0)
    times = [written for name in (EVENTS, METRICS, LEASE) if (written := folder.written_s(name)) is not None]
    return RunSummary(folder.name, state, step, num_steps, max(times, default=None), str(folder))


def last_word(folder: Place) -> dict[str, Any] | None:
    """How a run that is over has ended: its last event and its state; None while nobody has said so.

    Raises:
        ConfigError: events.jsonl cannot be read.
    """
    end = _last(_events(folder))
    return end and {"name": folder.name, "path": str(folder), "state": _ENDS[end["decision"]], **end}


def _last(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    begun = max((i for i, event in enumerate(events) if event["decision"] == "start"), default=0)
    return next((event for event in reversed(events[begun:]) if event["decision"] in _ENDS), None)


def _events(folder: Place) -> list[dict[str, Any]]:
    try:
        return read_events(folder)
    except CheckpointError as error:
        raise ConfigError(f"{folder / EVENTS} cannot be read: {error} Give the folder of a run.") from error


def _steps_written(folder: Place) -> int:
    try:
        return steps_written(folder)
    except CheckpointError:
        return 0


def _state_by_lease(folder: Place) -> str:
    try:
        lease = read_lease(folder)
    except (CheckpointError, LeaseError):
        return "unknown"
    if lease is None:
        return "unknown"
    if lease.released:
        return "failed"  # it gave back what it held, and could not write why
    return "killed" if lease.holder.is_gone else "running"
