"""List of runs, read from their folders without a cluster and without torch: name, state and progress."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from raypipe.engine.io.run_files import EVENTS, METRICS, read_events, steps_written
from raypipe.engine.io.storage import Place
from raypipe.errors import CheckpointError, ConfigError, LeaseError
from raypipe.run.lease import LEASE, read_lease

_ENDS = {"finish": "finished", "fail": "failed", "stop": "stopped"}


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Summary of one run.

    Attributes:
        name: name of the run, which is the name of its folder.
        state: "finished", "stopped" or "failed", as recorded by the run. Without a recorded end, the state follows from
            the lease, which the run's process holds while it trains: "running" if held, "killed" if the holder is dead,
            "failed" if released, "unknown" if missing or unreadable. A holder on another machine never counts as dead.
        step: optimizer steps done, as far as they were written to the folder.
        num_steps: total number of steps of the run; 0 if unknown.
        last_write_s: time of the last write to the run's files, in Unix seconds; None if the storage reports none.
        folder: path or address of its folder.
    """

    name: str
    state: str
    step: int
    num_steps: int
    last_write_s: float | None
    folder: str


def runs_in(storage: Place, *, deeper: bool = False) -> list[RunSummary]:
    """List the runs in a folder by the time of their last write, the newest last.

    Args:
        deeper: True to list also runs one level deeper, in subfolders that are not runs themselves: jobs with a
            relative storage_path put their runs there.

    Raises:
        CheckpointError: the storage cannot be reached.
        ConfigError: events.jsonl of a run cannot be read.
    """
    folders = [storage / entry.name for entry in storage.list() if entry.is_folder]
    if deeper:
        others = [folder for folder in folders if not folder.exists(EVENTS)]
        folders += [folder / entry.name for folder in others for entry in folder.list() if entry.is_folder]
    runs = [summary_of(folder) for folder in folders if folder.exists(EVENTS)]
    return sorted(runs, key=lambda run: (run.last_write_s or 0.0, run.name))


def summary_of(folder: Place) -> RunSummary:
    """Summarise the run in a folder that has an events.jsonl.

    Raises:
        ConfigError: events.jsonl cannot be read.
    """
    events = _events(folder)
    begun = max((i for i, event in enumerate(events) if event["decision"] == "start"), default=0)
    num_steps = int(events[begun].get("num_steps", 0)) if events else 0
    end = _last(events)
    state = _ENDS[end["decision"]] if end else _state_by_lease(folder)
    steps = [int(event["step"]) for event in events if isinstance(event.get("step"), int)]
    step = steps[-1] if steps else 0
    with suppress(CheckpointError):
        step = max(step, steps_written(folder))
    times = [written for name in (EVENTS, METRICS, LEASE) if (written := folder.written_s(name)) is not None]
    return RunSummary(folder.name, state, step, num_steps, max(times, default=None), str(folder))


def last_word(folder: Place) -> dict[str, Any] | None:
    """Return name, path and state of a run, with the fields of the event that ended it; None before the end.

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
