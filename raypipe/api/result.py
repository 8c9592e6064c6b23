"""Result: what a run leaves in your hands when it is over, and what its folder says of it later.

result = trainer.fit(num_steps=500)            result = raypipe.Result.from_path("runs/lm")
result.metrics_dataframe                       a row per step
result.get_best_checkpoint("eval_loss", "min")
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raypipe.api.listing import last_word, summary_of
from raypipe.api.notebook import result_html
from raypipe.api.records import Records, table_of_all
from raypipe.engine.checkpoint import best_checkpoint, checkpoint_name, newest_step
from raypipe.engine.metrics import EVALUATION, part_before
from raypipe.engine.rundir import EVENTS
from raypipe.engine.storage import Place
from raypipe.errors import ConfigError, StageError
from raypipe.ir.report import StepRecord
from raypipe.report.page import write_report
from raypipe.runtime.run.spec import Outcome
from raypipe.runtime.run.status import RunStatus

__all__ = ["Result", "losses_of", "result_of"]


@dataclass(frozen=True)
class Result:
    """What a finished run leaves in your hands.

    Attributes:
        metrics: the last step's numbers, None for those that are not known (tokens of data without), and those of the
            last evaluation: eval_loss, eval_<name> of a metric.
        records: every step, those of earlier submissions of the run included.
        checkpoint: folder of the last checkpoint; ``raypipe.load_state_dict`` reads it.
        path: the run's folder: plan, config, metrics, events, timeline.
        stopped: why the run ended before its last step; empty when it did not.
        error: why the run failed, where ``from_path`` read it; ``fit`` and ``wait`` raise it instead.
    """

    metrics: dict[str, Any]
    records: Records = field(repr=False)
    checkpoint: str
    path: str
    stopped: str = ""
    error: Exception | None = None

    @classmethod
    def from_path(cls, path: str | os.PathLike[str], *, storage_filesystem: Any = None) -> Result:
        """What a run has left in its folder, whoever trained it: from the command line, detached, on another day.

        Needs no cluster. Of a run that has not ended, ``stopped`` says so.

        Args:
            path: the run's folder, a local path or a URI such as s3://bucket/runs/lm.
            storage_filesystem: a pyarrow.fs.FileSystem on which ``path`` is.

        Raises:
            ConfigError: it is no run's folder.
            CheckpointError: its metrics cannot be read.
        """
        return _read(Place.of(path, storage_filesystem))

    @property
    def metrics_dataframe(self) -> Any:
        """A pandas DataFrame with one row per step."""
        return self.records.table.to_pandas()

    def get_best_checkpoint(self, metric: str, mode: str, *, storage_filesystem: Any = None) -> str:
        """The folder of the best checkpoint that was kept; ``raypipe.load_state_dict`` reads it.

        Args:
            metric: "loss", "grad_norm", "eval_loss" or "eval_<name>" of a metric.
            mode: "max" or "min".
            storage_filesystem: a pyarrow.fs.FileSystem on which the run's folder is, where RunConfig named one.

        Raises:
            ConfigError: another mode, or a number that no checkpoint has; says which there are.
            CheckpointError: none is there.
        """
        return best_checkpoint(Place.of(self.path, storage_filesystem), metric, mode)

    def report(self, output: str = "") -> str:
        """Write all of the run as one HTML file, as ``raypipe report`` does; returns where it is.

        Args:
            output: file of this machine; "" is report.html in the run's folder.
        """
        return write_report(Place.of(self.path), "stopped" if self.stopped else "finished", output)

    def _repr_html_(self) -> str:
        table = self.records.table
        return result_html(self.metrics, losses_of(table), self.path, self.stopped)


def losses_of(table: pa.Table) -> list[tuple[float, float]]:
    """(step, loss) of every row; steps count from 1, as people do."""
    return [(step + 1.0, loss) for step, loss in zip(table["step"].to_pylist(), table["loss"].to_pylist(), strict=True)]


def result_of(status: RunStatus, outcome: Outcome, records: Records) -> Result:
    """The result of a run that has just ended."""
    metrics = _metrics(records) | dict(outcome.evaluation)
    return Result(metrics, records, outcome.checkpoint, status.path, outcome.stopped)


def _metrics(records: Records) -> dict[str, Any]:
    """Numbers of the last step, without an evaluation's."""
    if not records:
        return {}
    last = records[-1]
    metrics: dict[str, Any] = {name: getattr(last, name) for name in StepRecord.__slots__ if name != "evaluation"}
    metrics |= {"samples_per_s": last.samples_per_s, "tokens_per_s": last.tokens_per_s}
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
    return Result(_metrics(records) | _last_evaluation(records), records, checkpoint, str(folder), stopped, error)


def _last_evaluation(records: Records) -> dict[str, float]:
    columns = (records.table[name] for name in records.table.column_names if name.startswith(EVALUATION))
    rows = [found[-1].as_py() for column in columns if len(found := pc.indices_nonzero(pc.is_valid(column)))]
    return dict(records[max(rows)].evaluation) if rows else {}
