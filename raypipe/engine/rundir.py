"""What a run leaves behind: ``<storage_path>/<name>/`` with plan, metrics, events, timeline and checkpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.ir.picture import timeline_svg
from raypipe.ir.report import StepRecord
from raypipe.ir.timeline import Timeline, chrome_trace_json

__all__ = ["RunFolder"]


class RunFolder:
    """Writes the files of one run.

    Args:
        path: made if missing; files of an earlier run of the same name are replaced, events are appended.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)

    def write_plan(self, plan_json: str) -> None:
        (self.path / "plan.json").write_text(plan_json)

    def event(self, decision: str, reason: str, **numbers: Any) -> None:
        """One line of events.jsonl: what was decided or happened, why, and the numbers."""
        line = {"time": round(time.time(), 3), "decision": decision, "reason": reason, **numbers}
        with (self.path / "events.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def write_metrics(self, records: Sequence[StepRecord]) -> None:
        """metrics.parquet: one row per step, a column per field of StepRecord."""
        columns = {f.name: [getattr(record, f.name) for record in records] for f in fields(StepRecord)}
        pq.write_table(pa.table(columns), self.path / "metrics.parquet")

    def write_timelines(self, timelines: Sequence[Timeline]) -> None:
        """timeline/trace.json for Perfetto, timeline.svg for any browser, and the spans as Parquet."""
        folder = self.path / "timeline"
        folder.mkdir(exist_ok=True)
        (folder / "trace.json").write_text(chrome_trace_json(timelines))
        (folder / "timeline.svg").write_text(timeline_svg(timelines))
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
        pq.write_table(pa.Table.from_pylist(rows), folder / "spans.parquet")
