"""What a run leaves behind: ``<storage_path>/<name>/`` with plan, config, events and timeline.

Its metrics are in ``metrics.py``, its checkpoints in ``checkpoint/``.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.engine.storage import Place
from raypipe.ir.pictures.timeline import timeline_svg
from raypipe.ir.timeline import Timeline
from raypipe.ir.trace import chrome_trace_json

__all__ = ["EVENTS", "RunFolder", "read_events"]

EVENTS = "events.jsonl"
_BEGIN = '{"time": '

_APPENDING = threading.Lock()
"""Object stores cannot append: there a file is read and written anew, and several threads of a driver have events."""


def read_events(run: Place) -> list[dict[str, Any]]:
    """The lines of a run's events.jsonl, oldest first, without those that were cut short when a disk was full.

    Raises:
        CheckpointError: there is no such file, or it cannot be read.
    """
    found = []
    for line in run.read_bytes(EVENTS).decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line[max(0, line.rfind(_BEGIN)) :])  # behind one that was cut short stands the next
            if isinstance(event, dict) and "decision" in event:
                found.append(event)
    return found


class RunFolder:
    """Writes the files of one run, each whole or not at all.

    Args:
        place: anywhere that pyarrow.fs reaches. A run that goes on under the same name replaces plan, config and
            timeline, and adds to events.
    """

    def __init__(self, place: Place) -> None:
        self.place = place

    def write_plan(self, plan_json: str) -> None:
        self.place.write_bytes("plan.json", plan_json.encode())

    def write_config(self, config_yaml: str) -> None:
        self.place.write_bytes("config.yaml", config_yaml.encode())

    def event(self, decision: str, reason: str, **numbers: Any) -> None:
        """One line of events.jsonl: what was decided or happened, why, and the numbers."""
        line = {"time": round(time.time(), 3), "decision": decision, "reason": reason, **numbers}
        with _APPENDING:
            self.place.append_bytes(EVENTS, (json.dumps(line) + "\n").encode())

    def write_timelines(self, timelines: Sequence[Timeline]) -> None:
        """timeline/trace.json for Perfetto, timeline.svg for any browser, and the spans as Parquet."""
        self.place.write_bytes("timeline/trace.json", chrome_trace_json(timelines).encode())
        self.place.write_bytes("timeline/timeline.svg", timeline_svg(timelines).encode())
        rows = [
            {
                "source": timeline.source,
                "worker": span.worker,
                "action": str(span.action),
                "start_s": span.start_s,
                "end_s": span.end_s,
            }
            for timeline in timelines
            for span in timeline.spans
        ]
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(rows), sink)
        self.place.write_bytes("timeline/spans.parquet", sink.getvalue())
