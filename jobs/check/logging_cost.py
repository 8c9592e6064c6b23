"""What metrics, callbacks and loggers cost the driver: processor time per step, without a pipeline beside them.

    python jobs/check/logging_cost.py

A record is told to the journal, written to metrics.parquet as the loop does, and handed to callbacks, 2,000 times; all
threads of the process count. The aim is 1 ms per step for all of it together, one logger at a time. Prometheus' part,
in the driver actor, is not in it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from jobs.lib.common import final_line, table
from raypipe import Callback
from raypipe.callbacks import MLflow, RunEnd, RunStart, TensorBoard, WandB
from raypipe.engine.metrics import MetricsWriter
from raypipe.engine.storage import Place
from raypipe.errors import ConfigError
from raypipe.ir.report import StepRecord
from raypipe.runtime.run.calls import Calls
from raypipe.runtime.run.journal import Journal

STEPS = 2000


def main() -> int:
    """Measure without callbacks, with an empty one, and with each logger that is installed."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # which needs no database here
        told: list[tuple[str, Sequence[Any]]] = [
            ("metrics alone", []),
            ("empty callback", [Callback()]),
            ("tensorboard", [TensorBoard()]),
            ("mlflow", [MLflow(tracking_uri=(root / "mlruns").as_uri())]),
            ("wandb_offline", [WandB(project="cost", mode="offline")]),
        ]
        found = {}
        for name, callbacks in told:
            try:
                found[name.replace(" ", "_")] = _cost_s(root / name.replace(" ", "_"), callbacks) * 1e3
            except (ConfigError, RuntimeError) as error:
                print(f"{name}: not measured, {error}")
    print(table("processor time of the driver", ("told", "ms per step"), found.items()))
    print(final_line("logging_cost", found))
    return 0 if max(found.values()) <= 1.0 else 1


def _cost_s(folder: Path, callbacks: Sequence[Any]) -> float:
    """Processor seconds per step, start and end of the callbacks left out."""
    complaints: list[str] = []
    folder.mkdir(parents=True)
    journal, metrics = Journal("cost", str(folder)), MetricsWriter(Place.of(folder))
    for callback in callbacks:
        getattr(callback, "check", lambda: None)()
    calls = Calls(callbacks, complaints.append)
    calls.start(RunStart("cost", str(folder), 0, STEPS, {"lr of group 0": 1e-3}, ""))
    _step(0, journal, metrics, calls)
    _drained(calls)
    began_s = time.process_time()
    for step in range(1, STEPS + 1):
        _step(step, journal, metrics, calls)
        if step % 100 == 0:
            _drained(calls)
    took_s = time.process_time() - began_s
    calls.end(RunEnd(STEPS, ""))
    if complaints:
        raise RuntimeError(complaints[0])
    return took_s / STEPS


def _step(step: int, journal: Journal, metrics: MetricsWriter, calls: Calls) -> None:
    record = StepRecord(step, 32, 1.0 / (step + 1), 1.0, 0.01, 0.1, 1e6, 4)
    metrics.append(record)
    journal.step(record, ())
    calls.step(record)
    if metrics.due:
        metrics.write()


def _drained(calls: Calls) -> None:
    deadline_s = time.monotonic() + 120
    while calls.waiting and time.monotonic() < deadline_s:
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
