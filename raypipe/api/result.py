"""Result of a run, returned by ``fit`` or read from its folder, and the sequence of its records."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import pyarrow as pa
import pyarrow.compute as pc

from raypipe.api.listing import last_word, summary_of
from raypipe.api.notebook import result_html
from raypipe.engine.io.checkpoint import best_checkpoint, checkpoint_name, newest_step
from raypipe.engine.io.run_files import (
    EVALUATION,
    EVENTS,
    part_before,
    records_of,
    table_of,
    table_read,
)
from raypipe.engine.io.storage import Place
from raypipe.errors import ConfigError, StageError
from raypipe.ir.report import StepRecord
from raypipe.report.page import write_report
from raypipe.run.spec import Outcome
from raypipe.run.status import Alert, RunStatus, alerts_in

ANY_STEP = 1 << 62
BLOCK = 4096
"""Number of rows of the table that are converted to records at a time."""


class Records(Sequence[StepRecord]):
    """Sequence of one StepRecord per step, in order, read from a table on access. A slice is a tuple.

    Args:
        table: one row per step, as ``table_of`` builds it.
    """

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self._block = -1
        self._records: list[StepRecord] = []

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @overload
    def __getitem__(self, place: int) -> StepRecord: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[StepRecord, ...]: ...

    def __getitem__(self, place: int | slice) -> StepRecord | tuple[StepRecord, ...]:
        if isinstance(place, slice):
            return tuple(self[one] for one in range(len(self))[place])
        block, row = divmod(range(len(self))[place], BLOCK)
        if block != self._block:
            self._block, self._records = block, records_of(self.table.slice(block * BLOCK, BLOCK))
        return self._records[row]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Records | tuple) and tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return f"<records of {len(self)} steps>"


def table_of_all(last: Sequence[StepRecord], before: Callable[[int], bytes | None]) -> pa.Table:
    """Create a table with one row per step of the run.

    Args:
        last: records of the newest steps.
        before: (step) -> bytes of the newest part of metrics.parquet that has steps below ``step``; None if there is
            no such part. Called until the table begins at step 0.
    """
    tables = [table_of(last)]
    first = last[0].step if last else ANY_STEP
    while first > 0 and (part := before(first)) is not None:
        table = table_read(part, "A part of metrics.parquet")
        table = table.filter(pc.less(table["step"], first))
        if not table.num_rows:
            break
        tables.append(table)
        first = table["step"][0].as_py()
    return pa.concat_tables(tables[::-1], promote_options="default")


@dataclass(frozen=True)
class Result:
    """Result of a finished run.

    Attributes:
        metrics: numbers of the last step and of the last evaluation: eval_loss, and eval_<name> of each metric. "step"
            is the number of steps done, counted from 1. A number that is not known is None, such as tokens of data
            without token ids.
        records: one record per step, including steps of earlier submissions of the run. ``record.step`` counts from 0.
        checkpoint: folder of the last checkpoint, for ``raypipe.load_state_dict``; "" without a checkpoint.
        path: the run's folder, with plan, config, metrics, events and timeline.
        stopped: reason why the run ended before its last step; "" if it did not.
        error: error of a failed run that was read with ``from_path``; else None, because ``fit`` and ``wait`` raise it.
        alerts: alerts of the last submission, one of each kind with its count: checkpoints that failed, callbacks that
            raised, files that could not be written, stages that were lost.
    """

    metrics: dict[str, Any]
    records: Records = field(repr=False)
    checkpoint: str
    path: str
    stopped: str = ""
    error: Exception | None = None
    alerts: tuple[Alert, ...] = ()

    @classmethod
    def from_path(cls, path: str | os.PathLike[str], *, storage_filesystem: Any = None) -> Result:
        """Read the result of a run from its folder, without a cluster.

        It works for every run, however it was started. If the run has not ended, the attribute ``stopped`` states that.

        Args:
            path: the run's folder, a local path or a URI such as s3://bucket/runs/lm.
            storage_filesystem: pyarrow.fs.FileSystem on which ``path`` is; None derives it from ``path``.

        Raises:
            ConfigError: ``path`` is not the folder of a run, or its events.jsonl cannot be read.
            CheckpointError: its metrics cannot be read.
        """
        return _read(Place.of(path, storage_filesystem))

    @property
    def metrics_dataframe(self) -> Any:
        """pandas DataFrame with one row per step; the column "step" counts from 0."""
        return self.records.table.to_pandas()

    def get_best_checkpoint(self, metric: str, mode: str, *, storage_filesystem: Any = None) -> str:
        """Return the folder of the best checkpoint that still exists, for ``raypipe.load_state_dict``.

        Args:
            metric: "loss", "grad_norm", "eval_loss" or "eval_<name>" of a metric.
            mode: "max" or "min".
            storage_filesystem: storage_filesystem of the run's RunConfig, if that was set.

        Raises:
            ConfigError: ``mode`` is neither, or no checkpoint has this metric; the message has the metrics that exist.
            CheckpointError: the run has no checkpoint.
        """
        return best_checkpoint(Place.of(self.path, storage_filesystem), metric, mode)

    def report(self, output: str = "") -> str:
        """Write a report of the run to one HTML file, as ``raypipe report`` does; return the path of the file.

        Args:
            output: file on this machine; "" for report.html in the run's folder.
        """
        return write_report(Place.of(self.path), "stopped" if self.stopped else "finished", output)

    def _repr_html_(self) -> str:
        table = self.records.table
        return result_html(self.metrics, losses_of(table), self.path, self.stopped, self.alerts)


def losses_of(table: pa.Table) -> list[tuple[float, float]]:
    """Return (number of the step from 1, loss) of every row of a table of steps."""
    return [(step + 1.0, loss) for step, loss in zip(table["step"].to_pylist(), table["loss"].to_pylist(), strict=True)]


def result_of(status: RunStatus, outcome: Outcome, records: Records) -> Result:
    """Create the result of a run that has just ended."""
    metrics = _metrics(records) | dict(outcome.evaluation)
    return Result(metrics, records, outcome.checkpoint, status.path, outcome.stopped, alerts=status.alerts)


def _metrics(records: Records) -> dict[str, Any]:
    """Return the last step's numbers by name, without results of evaluations; empty without records."""
    if not records:
        return {}
    last = records[-1]
    metrics: dict[str, Any] = {name: getattr(last, name) for name in StepRecord.__slots__ if name != "evaluation"}
    metrics |= {"step": last.step + 1, "samples_per_s": last.samples_per_s, "tokens_per_s": last.tokens_per_s}
    return metrics | dict.fromkeys(last.unknown)


def _read(folder: Place) -> Result:
    if not folder.exists(EVENTS):
        raise ConfigError(f"{folder} is no folder of a run: it has no {EVENTS}. Give <storage_path>/<name>.")
    records = Records(table_of_all((), lambda step: part_before(folder, step)))
    step = newest_step(folder)
    checkpoint = "" if step is None else str(folder / checkpoint_name(step))
    end = last_word(folder)
    state = summary_of(folder).state if end is None else end["state"]
    reason = "" if end is None else str(end.get("reason", ""))
    stopped = {"finished": "", "failed": "", "stopped": reason}.get(state, f"the run has not ended, it is {state}")
    error = StageError(reason) if state == "failed" else None
    return Result(
        _metrics(records) | _last_evaluation(records),
        records,
        checkpoint,
        str(folder),
        stopped,
        error,
        alerts_in(folder),
    )


def _last_evaluation(records: Records) -> dict[str, float]:
    columns = (records.table[name] for name in records.table.column_names if name.startswith(EVALUATION))
    rows = [rows_with[-1].as_py() for column in columns if len(rows_with := pc.indices_nonzero(pc.is_valid(column)))]
    return dict(records[max(rows)].evaluation) if rows else {}
