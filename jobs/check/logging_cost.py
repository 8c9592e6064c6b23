"""What metrics, callbacks, loggers and Prometheus cost the driver: processor time per step, without a pipeline.

    python jobs/check/logging_cost.py

A record is told to the journal, written to metrics.parquet as the loop does, and handed to callbacks, 2,000 times; all
threads of the process count. What the driver shows to Prometheus is measured in an actor, for it needs Ray. The aim is
1 ms per step for all of it together, with the most expensive logger. The process that wandb starts is not counted.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository's root

from jobs.lib.common import final_line, table
from raypipe import Callback
from raypipe.callbacks import MLflow, RunEnd, RunStart, TensorBoard, WandB
from raypipe.engine.metrics import MetricsWriter
from raypipe.engine.storage import Place
from raypipe.errors import ConfigError
from raypipe.ir.report import StepRecord, StepReport
from raypipe.runtime.driver.publish import Publisher
from raypipe.runtime.run.calls import Calls
from raypipe.runtime.run.journal import Journal

STEPS = 2000
LOGGERS = ("tensorboard", "mlflow", "wandb_offline")


def main() -> int:
    """Measure without callbacks, with an empty one, and with each logger that is installed."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
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
        _cost_s(root / "first", [])  # which imports what all of them need
        found = {"prometheus": _published_s() * 1e3}
        for name, callbacks in told:
            try:
                found[name.replace(" ", "_")] = _cost_s(root / name.replace(" ", "_"), callbacks) * 1e3
            except (ConfigError, RuntimeError) as error:
                print(f"{name}: not measured, {error}")
    loggers = max(found.get(name, 0.0) for name in ("empty_callback", *LOGGERS))  # with the metrics in it
    found["together"] = found["prometheus"] + loggers
    print(table("processor time of the driver", ("told", "ms per step"), found.items()))
    print(final_line("logging_cost", found))
    return 0 if found["together"] <= 1.0 else 1


def _published_s() -> float:
    """Processor seconds per step of an actor that shows the steps of three stages to Prometheus, as a driver does."""
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        found: float = ray.get(ray.remote(num_cpus=0)(_publish_all).remote(), timeout=600)
    finally:
        ray.shutdown()
    return found


def _publish_all() -> float:
    publisher = Publisher("cost", ((0,), (1,), (2,)))
    for step in range(STEPS + 100):
        if step == 100:
            began_s = time.process_time()
        ends_s = float(step) / 10
        reports = [
            StepReport(stage, step, 8, 2.5, 1.5, ends_s, ends_s + 0.1, 0.08, 0.01, (1000, 500), peak_in_flight=2)
            for stage in range(3)
        ]
        publisher.step(_record(step), reports)
    return (time.process_time() - began_s) / STEPS


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
    record = _record(step)
    metrics.append(record)
    journal.step(record, ())
    calls.step(record)
    if metrics.due:
        metrics.write()


def _record(step: int) -> StepRecord:
    return StepRecord(step, 32, 1.0 / (step + 1), 1.0, 0.01, 0.1, 1e6, 4)


def _drained(calls: Calls) -> None:
    deadline_s = time.monotonic() + 120
    while calls.waiting and time.monotonic() < deadline_s:
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
