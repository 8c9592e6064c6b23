"""metrics.parquet: a folder of parts, so that a run of any length appends, and writes nothing anew from its start.

    metrics.parquet/steps_0000000000.parquet    steps    0 ... 4095   written for the last time when it was full
                    steps_0000004096.parquet    steps 4096 ... 8191
                    steps_0000008192.parquet    steps 8192 ... 8700   replaced at every write until it is full

pandas.read_parquet and pyarrow read the folder as one table. The part of a step follows from its number, so no
step is ever in two parts, and a run that goes back to step 5000 replaces the second part and deletes the third. A part
is there whole or not at all, and is written outside the folder first, so that readers never meet half of one.

Releases before this one wrote one file of that name; ``MetricsWriter`` makes parts of it.
"""

from __future__ import annotations

import re
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError
from raypipe.ir.kept_records import KeptRecords
from raypipe.ir.report import Numbers, StepRecord

__all__ = [
    "EVALUATION", "METRICS", "SCHEMA", "MetricsWriter", "Part", "part_before", "parts_of", "records_of",
    "steps_written", "table_of", "table_read",
]  # fmt: skip

METRICS = "metrics.parquet"
PARTIAL = "metrics.partial"
FROM_OLD_RELEASE = "metrics.old.parquet"
PART_STEPS = 4096
"""Steps of a part: to replace the last one takes some milliseconds, and a million steps are 245 files."""
WRITE_S = 5.0
WRITE_STEPS = 1024
"""Records are written after so many seconds or steps, whichever comes first: what is lost with a driver that is killed,
unless its successor finds the reports with the stages."""

_NAME = re.compile(r"steps_(\d{10,})\.parquet")
_KINDS = {"int": pa.int64(), "float": pa.float64(), "str": pa.string(), "bool": pa.bool_()}
_FIELDS = [field for field in fields(StepRecord) if field.name != "evaluation"]
SCHEMA = pa.schema([(field.name, _KINDS[str(field.type)]) for field in _FIELDS])
"""Of every run; the numbers of evaluations have a column each behind these, eval_loss and eval_<name> of a metric,
empty in the rows of steps that no evaluation followed."""
EVALUATION = "eval_"


class Part(NamedTuple):
    """A file below the run's folder, and the first step that it may have."""

    first: int
    name: str


def table_of(records: Sequence[StepRecord], evaluations: Sequence[str] = ()) -> pa.Table:
    """One row per record, one column per field, and one for each number of an evaluation.

    Args:
        evaluations: names of columns that are there whether a record has such a number or not.
    """
    kept = records if isinstance(records, KeptRecords) else KeptRecords(records)
    columns = {name: kept.column(name) for name in SCHEMA.names}
    none: dict[str, float] = {}  # one for all of the many steps that no evaluation followed
    found = [dict(numbers) if numbers else none for numbers in kept.column("evaluation")]
    names = dict.fromkeys((*evaluations, *(name for numbers in found for name in numbers)))
    return _table({**columns, **{name: [numbers.get(name) for numbers in found] for name in names}})


def _table(columns: Mapping[str, Any]) -> pa.Table:
    more = [(name, pa.float64()) for name in columns if name not in SCHEMA.names]
    schema = pa.schema([*SCHEMA, *more])
    return pa.table([_column(columns[name], schema.field(name).type) for name in schema.names], schema=schema)


def _column(values: Any, kind: pa.DataType) -> Any:
    """Of a table: what was read of another one, or Python's numbers."""
    if isinstance(values, pa.ChunkedArray):
        return values.cast(kind)
    if not isinstance(values, array) or kind == pa.bool_():
        return pa.array(list(map(bool, values)) if kind == pa.bool_() else values, kind)
    # Of a copy, for an array whose memory is used elsewhere cannot grow.
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values[:])])


def table_read(data: bytes, what: str) -> pa.Table:
    """The table of a part, or of an old release's file, whose missing columns have their defaults.

    Args:
        what: it is, for the message.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        found = pq.read_table(pa.BufferReader(data))
        defaults = {field.name: [field.default] * len(found) for field in _FIELDS}
        columns = {n: found[n] if n in found.column_names else defaults[n] for n in SCHEMA.names}
        return _table({**columns, **{n: found[n] for n in found.column_names if n.startswith(EVALUATION)}})
    except (pa.ArrowException, KeyError, TypeError, OSError) as error:
        raise CheckpointError(
            f"{what} cannot be read ({error}). Training does not need it: delete it to go on without these steps."
        ) from error


def records_of(table: pa.Table) -> list[StepRecord]:
    """One record per row."""
    return [_record(row) for row in table.to_pylist()]


def _record(row: Mapping[str, Any]) -> StepRecord:
    told = tuple((name, value) for name, value in row.items() if name not in SCHEMA.names and value is not None)
    return StepRecord(**{name: row[name] for name in SCHEMA.names}, evaluation=told)


def parts_of(run: Place) -> list[Part]:
    """The parts of a run's metrics, oldest first; of an old release's file none."""
    found = (_NAME.fullmatch(entry.name) for entry in run.list(METRICS) if not entry.is_folder)
    return sorted(Part(int(match[1]), f"{METRICS}/{match[0]}") for match in found if match)


def part_before(run: Place, step: int) -> bytes | None:
    """The newest part with steps below ``step``, as Parquet; None where there is none."""
    below = [part for part in parts_of(run) if part.first < step]
    return run.read_bytes(below[-1].name) if below else None


def steps_written(run: Place) -> int:
    """One more than the last step in the metrics of a run, those of an old release included; 0 without any.

    Raises:
        CheckpointError: they cannot be read.
    """
    names = [METRICS] if run.size_bytes(METRICS) is not None else [part.name for part in parts_of(run)][-1:]
    tables = (table_read(run.read_bytes(name), str(run / name)) for name in names)
    return max((step + 1 for table in tables for step in table["step"].to_pylist()), default=0)


class MetricsWriter:
    """Appends the records of one run. In memory are those of the last part, and what could not be written.

    Args:
        run: the run's folder.
        clock: seconds.
        evaluations: names of the numbers that an evaluation of this run gives.
    """

    def __init__(
        self, run: Place, clock: Callable[[], float] = time.monotonic, *, evaluations: Sequence[str] = ()
    ) -> None:
        self._run = run
        self._names = tuple(evaluations)
        self._evaluated: dict[int, Numbers] | None = None  # all of the run, by step, once somebody asked
        self._kept: dict[int, Numbers] = {}  # evaluations of steps that are told once more
        self._clock = clock
        self._tried_s = clock()
        self._new = 0  # records since the last try to write
        self._changed = False  # whether memory has what the folder does not
        self.recent = KeptRecords()
        """From the beginning of the last part on, the last step in any case; of the parts before, what could not be
        written yet."""

    @property
    def due(self) -> bool:
        """Whether to write now."""
        return self._new >= WRITE_STEPS or (self._new > 0 and self._clock() - self._tried_s >= WRITE_S)

    def append(self, record: StepRecord) -> StepRecord:
        """The next step; its record, with the evaluation that ``take_over`` kept of it."""
        if kept := self._kept.pop(record.step, ()):
            record = replace(record, evaluation=kept)
        self.recent.append(record)
        self._new += 1
        self._changed = True
        return record

    def evaluated(self, step: int, numbers: Numbers) -> StepRecord | None:
        """An evaluation followed so many steps; the record that has it now, None where there is none of that step."""
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
        """(optimizer steps done then, numbers) of all of the run, in their order.

        Raises:
            CheckpointError: a part of the metrics is damaged or cannot be reached.
        """
        if self._evaluated is None:
            older = [part for part in parts_of(self._run) if not self.recent or part.first < self.recent[0].step]
            records = [*(record for part in older for record in self._read(part.name)), *self.recent]
            self._evaluated = {record.step: record.evaluation for record in records if record.evaluation}
        return [(step + 1, self._evaluated[step]) for step in sorted(self._evaluated)]

    def write(self) -> None:
        """Replace the last part, and write those that became full.

        Raises:
            CheckpointError: the place is full, forbidden or unreachable; the records are kept for the next try.
        """
        self._tried_s, self._new = self._clock(), 0
        if not self._changed:
            return
        for part in _by_part(self.recent):
            self._write_part(part)
            if len(part) < len(self.recent):  # it is full, and written for the last time
                self.recent.forget(len(part))
        self._changed = False

    def go_back(self, step: int) -> None:
        """The run goes on after ``step`` steps: what there is of later ones goes away.

        Raises:
            CheckpointError: the place cannot be reached, or the part that goes on is damaged.
        """
        self.recent = KeptRecords(record for record in self.recent if record.step < step)
        self._new, self._changed, self._evaluated, self._kept = 0, True, None, {}
        self._take_over_old_file()
        name = _name(_first_of(max(0, step - 1)))
        if not self.recent and self._run.exists(name):
            self.recent = KeptRecords(record for record in self._read(name) if record.step < step)
        for part in reversed(parts_of(self._run)):  # the newest first, so that there is never a gap
            if part.first >= step:
                self._run.delete(part.name)

    def take_over(self, step: int) -> None:
        """As ``go_back``, but later steps are told once more by stages that remember no evaluation: those stay.

        Raises:
            CheckpointError: the place cannot be reached, or a part with later steps is damaged.
        """
        self._take_over_old_file()
        later = [part for part in parts_of(self._run) if part.first >= _first_of(step)]
        records = [record for part in later for record in self._read(part.name)]
        self.go_back(step)
        self._kept = {record.step: record.evaluation for record in records if record.step >= step}

    def _write_part(self, records: KeptRecords) -> None:
        sink = pa.BufferOutputStream()
        pq.write_table(table_of(records, self._names), sink)
        self._run.write_bytes(_name(_first_of(records[0].step)), sink.getvalue(), partial=PARTIAL)
        del sink
        # Arrow's pool keeps what it freed, by its size, and a part has another one whenever it is written anew.
        pa.default_memory_pool().release_unused()

    def _read(self, name: str) -> list[StepRecord]:
        return records_of(table_read(self._run.read_bytes(name), str(self._run / name)))

    def _take_over_old_file(self) -> None:
        """Make parts of the one file of an old release; a process that dies meanwhile loses nothing."""
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
