"""Files of a run's folder, ``<storage_path>/<name>/``: plan, config, events, timeline, metrics.

    metrics.parquet/steps_0000000000.parquet    steps    0 ... 4095   full: not written again
                    steps_0000004096.parquet    steps 4096 ... 8191
                    steps_0000008192.parquet    steps 8192 ... 8700   replaced at every write until it is full

pandas.read_parquet and pyarrow read the folder metrics.parquet as one table. Each file is a part. The number of a step
determines its part, so that no step is in two parts. A run that rolls back to step 5000 deletes the third part, and
replaces the second at the next write. A part is written elsewhere and then renamed, so that it is complete or absent.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.engine.io.storage import Place
from raypipe.errors import CheckpointError
from raypipe.ir.report import KeptRecords, Numbers, StepRecord
from raypipe.ir.timeline import Timeline
from raypipe.viz.chrome_trace import chrome_trace_json
from raypipe.viz.timeline_svg import timeline_svg

EVENTS = "events.jsonl"
_BEGIN = '{"time": '

_APPENDING = threading.Lock()
"""Lock of ``RunFolder.event``, which several threads call: on an object store, the file is read and rewritten."""


def read_events(run: Place) -> list[dict[str, Any]]:
    """Read the events of a run from its events.jsonl, oldest first. Incomplete lines, as of a full disk, are left out.

    Raises:
        CheckpointError: the file is missing or unreadable.
    """
    events = []
    for line in run.read_bytes(EVENTS).decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(
                line[max(0, line.rfind(_BEGIN)) :]
            )  # a line that was cut short has the next one after it
            if isinstance(event, dict) and "decision" in event:
                events.append(event)
    return events


class RunFolder:
    """Writer of plan, config, timeline and events in a run's folder.

    A run that resumes under the same name replaces plan, config and timeline, and appends events.

    Args:
        place: folder of the run, on any file system of pyarrow.
    """

    def __init__(self, place: Place) -> None:
        self.place = place

    def write_plan(self, plan_json: str) -> None:
        self.place.write_bytes("plan.json", plan_json.encode())

    def write_config(self, config_yaml: str) -> None:
        self.place.write_bytes("config.yaml", config_yaml.encode())

    def event(self, decision: str, reason: str, **numbers: Any) -> None:
        """Append an event to events.jsonl: time, name of the decision or event, its reason, and further JSON values."""
        line = {"time": round(time.time(), 3), "decision": decision, "reason": reason, **numbers}
        with _APPENDING:
            self.place.append_bytes(EVENTS, (json.dumps(line) + "\n").encode())

    def write_timelines(self, timelines: Sequence[Timeline]) -> None:
        """Write timeline/trace.json for Perfetto, timeline.svg for browsers, and the spans as Parquet."""
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


METRICS = "metrics.parquet"
PARTIAL = "metrics.partial"
FROM_OLD_RELEASE = "metrics.old.parquet"
PART_STEPS = 4096
"""Maximum number of steps in a part (file) of the metrics. A part is written in milliseconds; 10^6 steps have 245."""
WRITE_S = 5.0
WRITE_STEPS = 1024
"""Records are written after WRITE_S seconds or WRITE_STEPS steps, whichever comes first. If a driver is killed, later
records are lost, unless the next driver gets the reports from the stages."""

_NAME = re.compile(r"steps_(\d{10,})\.parquet")
_KINDS = {
    "int": pa.int64(),
    "float": pa.float64(),
    "float | None": pa.float64(),
    "str": pa.string(),
    "bool": pa.bool_(),
}
_FIELDS = [field for field in fields(StepRecord) if field.name != "evaluation"]
SCHEMA = pa.schema([(field.name, _KINDS[str(field.type)]) for field in _FIELDS])
"""Columns of every run. Columns for the results of evaluations follow: eval_loss, and eval_<name> for each metric. They
are empty in the rows of steps without an evaluation."""
EVALUATION = "eval_"


class MetricsPart(NamedTuple):
    """Part of the metrics: the first step that it may contain, and the name of its file below the run's folder."""

    first: int
    name: str


def table_of(records: Sequence[StepRecord], evaluations: Sequence[str] = ()) -> pa.Table:
    """Create a table with one row per record, and one column per field and per result of an evaluation.

    Args:
        evaluations: names of columns that exist even if no record has such a result.
    """
    kept = records if isinstance(records, KeptRecords) else KeptRecords(records)
    columns = {name: kept.column(name) for name in SCHEMA.names}
    none: dict[str, float] = {}  # one for all of the many steps that no evaluation followed
    evaluated = [dict(numbers) if numbers else none for numbers in kept.column("evaluation")]
    names = dict.fromkeys((*evaluations, *(name for numbers in evaluated for name in numbers)))
    return _table({**columns, **{name: [numbers.get(name) for numbers in evaluated] for name in names}})


def _table(columns: Mapping[str, Any]) -> pa.Table:
    more = [(name, pa.float64()) for name in columns if name not in SCHEMA.names]
    schema = pa.schema([*SCHEMA, *more])
    return pa.table([_column(columns[name], schema.field(name).type) for name in schema.names], schema=schema)


def _column(values: Any, kind: pa.DataType) -> Any:
    """Create a column of a table from a column of another table, from an array or from a sequence of values."""
    if isinstance(values, pa.ChunkedArray):
        return values.cast(kind)
    if not isinstance(values, array) or kind == pa.bool_():
        return pa.array(list(map(bool, values)) if kind == pa.bool_() else values, kind)
    # Of a copy: an array whose memory is used elsewhere cannot grow.
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values[:])])


def table_read(data: bytes, what: str) -> pa.Table:
    """Parse a Parquet file of step metrics, of this or an old release. Missing columns get the defaults of StepRecord.

    Raises:
        CheckpointError: the file is damaged; ``what`` names the file in the message.
    """
    try:
        table = pq.read_table(pa.BufferReader(data))
        defaults = {field.name: [field.default] * len(table) for field in _FIELDS}
        columns = {n: table[n] if n in table.column_names else defaults[n] for n in SCHEMA.names}
        return _table({**columns, **{n: table[n] for n in table.column_names if n.startswith(EVALUATION)}})
    except (pa.ArrowException, KeyError, TypeError, OSError) as error:
        raise CheckpointError(
            f"{what} cannot be read ({error}). Training does not need it: delete it to go on without these steps."
        ) from error


def records_of(table: pa.Table) -> list[StepRecord]:
    """Convert a table of metrics to records, one per row."""
    return [
        StepRecord(
            **{name: row[name] for name in SCHEMA.names},
            evaluation=tuple((k, x) for k, x in row.items() if k not in SCHEMA.names and x is not None),
        )
        for row in table.to_pylist()
    ]


def parts_of(run: Place) -> list[MetricsPart]:
    """List the parts (files) of a run's metrics, oldest first; empty if an old release wrote them as a single file."""
    matches = (_NAME.fullmatch(entry.name) for entry in run.list(METRICS) if not entry.is_folder)
    return sorted(MetricsPart(int(match[1]), f"{METRICS}/{match[0]}") for match in matches if match)


def part_before(run: Place, step: int) -> bytes | None:
    """Return the bytes of the newest Parquet file of metrics that may have steps below ``step``; None without one."""
    below = [part for part in parts_of(run) if part.first < step]
    return run.read_bytes(below[-1].name) if below else None


def steps_written(run: Place) -> int:
    """Return the number of the last step in a run's metrics, plus 1; 0 without metrics. Reads old releases' files too.

    Raises:
        CheckpointError: the metrics cannot be read.
    """
    names = [METRICS] if run.size_bytes(METRICS) is not None else [part.name for part in parts_of(run)][-1:]
    tables = (table_read(run.read_bytes(name), str(run / name)) for name in names)
    return max((step + 1 for table in tables for step in table["step"].to_pylist()), default=0)


class MetricsWriter:
    """Writer of the step records of one run to a series of files (parts).

    The records of the newest part, and those not yet written, are kept in memory.

    Args:
        run: folder of the run.
        clock: function that returns the current time in seconds, which decides when records are written.
        evaluations: names of the columns for results of this run's evaluations.
    """

    def __init__(
        self, run: Place, clock: Callable[[], float] = time.monotonic, *, evaluations: Sequence[str] = ()
    ) -> None:
        self._run = run
        self._names = tuple(evaluations)
        self._evaluated: dict[int, Numbers] | None = None  # all of the run, by step, once somebody asked
        self._clock = clock
        self._tried_s = clock()
        self._new = 0  # records since the last try to write
        self._changed = False  # whether memory has what the folder does not
        self.recent = KeptRecords()
        """Records in memory: those of the last part, and those of earlier parts that could not be written."""

    @property
    def due(self) -> bool:
        """True if new records have waited for WRITE_S seconds, or if there are at least WRITE_STEPS of them."""
        return self._new >= WRITE_STEPS or (self._new > 0 and self._clock() - self._tried_s >= WRITE_S)

    def append(self, record: StepRecord) -> StepRecord:
        """Add the record of the next step to the records in memory, and return the record."""
        self.recent.append(record)
        self._new += 1
        self._changed = True
        return record

    def evaluated(self, step: int, numbers: Numbers) -> StepRecord | None:
        """Add the results of the evaluation after ``step`` steps to the last record, and return the new record.

        If the last record belongs to another step than ``step - 1``, nothing changes and None is returned.
        """
        if not self.recent or self.recent[-1].step != step - 1:
            return None
        record = replace(self.recent.pop(), evaluation=numbers)
        self.recent.append(record)
        self._changed = True
        self._new += 1
        if self._evaluated is not None:
            self._evaluated[record.step] = numbers
        return record

    def evaluations(self) -> list[tuple[int, Numbers]]:
        """Return (optimizer steps done, results) of all evaluations of the run, in order.

        Raises:
            CheckpointError: a part of the metrics is damaged or cannot be reached.
        """
        if self._evaluated is None:
            older = [part for part in parts_of(self._run) if not self.recent or part.first < self.recent[0].step]
            records = [*(record for part in older for record in self._read(part.name)), *self.recent]
            self._evaluated = {record.step: record.evaluation for record in records if record.evaluation}
        return [(step + 1, self._evaluated[step]) for step in sorted(self._evaluated)]

    def write(self) -> None:
        """Write all records in memory, replacing the file of the last part; then free the records of full parts.

        Raises:
            CheckpointError: storage is full, forbidden or unreachable; the records are kept for the next call.
        """
        self._tried_s, self._new = self._clock(), 0
        if not self._changed:
            return
        for part in _by_part(self.recent):
            self._write_part(part)
            if len(part) < len(self.recent):  # full, and written for the last time
                self.recent.forget(len(part))
        self._changed = False

    def go_back(self, step: int) -> None:
        """Roll back to ``step`` steps: delete the records of later steps, and the files that have only later steps.

        A file that has earlier steps too is replaced by the next ``write``.

        Raises:
            CheckpointError: storage cannot be reached, or a file to be read is damaged.
        """
        self.recent = KeptRecords(record for record in self.recent if record.step < step)
        self._new, self._changed, self._evaluated = 0, True, None
        self._take_over_old_file()
        name = _name(_first_of(max(0, step - 1)))
        if not self.recent and self._run.exists(name):
            self.recent = KeptRecords(record for record in self._read(name) if record.step < step)
        for part in reversed(parts_of(self._run)):  # the newest first, so that no gap is ever seen
            if part.first >= step:
                self._run.delete(part.name)

    def _write_part(self, records: KeptRecords) -> None:
        sink = pa.BufferOutputStream()
        pq.write_table(table_of(records, self._names), sink)
        self._run.write_bytes(_name(_first_of(records[0].step)), sink.getvalue(), partial=PARTIAL)
        del sink
        # Arrow's pool keeps freed memory by size, and a part has another size each time.
        pa.default_memory_pool().release_unused()

    def _read(self, name: str) -> list[StepRecord]:
        return records_of(table_read(self._run.read_bytes(name), str(self._run / name)))

    def _take_over_old_file(self) -> None:
        """Convert the single metrics file of an old release to parts, without losing records if the process dies."""
        if self._run.size_bytes(METRICS) is not None:
            self._run.rename(METRICS, FROM_OLD_RELEASE)
        if self._run.size_bytes(FROM_OLD_RELEASE) is not None:
            for part in _by_part(KeptRecords(self._read(FROM_OLD_RELEASE))):
                self._write_part(part)
            self._run.delete(FROM_OLD_RELEASE)


def _by_part(records: KeptRecords) -> list[KeptRecords]:
    sizes = [sum(1 for _ in steps) for _, steps in groupby(records.column("step"), _first_of)]
    ends = [0, *accumulate(sizes)]
    return [records[begin:end] for begin, end in pairwise(ends)]


def _first_of(step: int) -> int:
    return step // PART_STEPS * PART_STEPS


def _name(first: int) -> str:
    return f"{METRICS}/steps_{first:010d}.parquet"
