"""What changes of machines cost in seconds: from the record of jobs/bench/recovery, or from before there was one.

    found without a record               in the record of ``python jobs/bench/recovery``
    NOTICE_S, SHRINK_S                   node_seconds: a node is lost, until the end of the first new step
    half an interval of copies, and 2    redone_steps_500mb
    GROW_S                               the median of resize_seconds_*
    COPY_S, as if steps stood still      copy_overhead, of copies in the background
    --                                   ray_train_seconds: Ray Train restarts its group, in the same process

The record's nodes and resizes have 96 MB of state per stage: what is more is moved at MOVED_BYTES_S.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import NamedTuple

from jobs.lib import records
from raypipe.planner.copies import CopyCosts, copy_interval
from raypipe.planner.elastic import MOVED_BYTES_S

__all__ = ["RECORD", "Measured", "measured"]

RECORD = records.FOLDER / "recovery.json"
NOTICE_S, SHRINK_S, GROW_S, COPY_S = 1.4, 2.1, 1.0, 0.2
STATE_BYTES, RECORDED_BYTES = 500e6, 96e6


class Measured(NamedTuple):
    """Seconds, and where they are from.

    Attributes:
        recover_s: after the loss of a machine.
        redone_steps: after such a loss.
        resize_s: of a change of the plan between two steps.
        notice_s: until the loss of a machine is known.
        overhead: share of the time that copies of state take.
        ray_train_s: that Ray Train takes to restart its workers; 0 where it was not measured.
        source: for people.
    """

    recover_s: float
    redone_steps: float
    resize_s: float
    notice_s: float
    overhead: float
    ray_train_s: float
    source: str


def measured(step_s: float, path: Path = RECORD) -> Measured:
    """Of a run whose steps take so long."""
    if not path.exists():
        return _before(step_s)
    run = records.read(path)["runs"][0]
    found = run["figures"]
    more_s = (STATE_BYTES - RECORDED_BYTES) / MOVED_BYTES_S
    source = f"the record of {run['command']} of {run['date']}"
    if "copy_overhead" in found:
        overhead = found["copy_overhead"] - 1
    else:  # a record of the other parts
        overhead, source = _before(step_s).overhead, f"{source}, with the copies of docs/design/0038"
    return Measured(
        recover_s=found["node_seconds"] + more_s,
        redone_steps=found["redone_steps_500mb"],
        resize_s=more_s + median(value for name, value in found.items() if _is_resize(name)),
        notice_s=found["node_noticed_seconds"],
        overhead=max(0.0, overhead),
        ray_train_s=found.get("ray_train_seconds", 0.0),
        source=source,
    )


def _is_resize(name: str) -> bool:
    return name.startswith("resize_seconds_") and "_max_" not in name


def _before(step_s: float) -> Measured:
    every, move_s = copy_interval(CopyCosts(step_s, COPY_S)), STATE_BYTES / MOVED_BYTES_S
    return Measured(
        recover_s=NOTICE_S + SHRINK_S + move_s,
        redone_steps=every / 2 + 2,
        resize_s=GROW_S + move_s,
        notice_s=NOTICE_S,
        overhead=COPY_S / (every * step_s),
        ray_train_s=0.0,
        source="docs/design/0037, 0038 and a run of the elastic sequence: there is no record of jobs/bench/recovery",
    )
