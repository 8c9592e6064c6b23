"""MLflow: parameters, metrics and the end of a run, on a tracking server."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raypipe.callbacks.base import (
    Callback,
    Event,
    Newest,
    RunEnd,
    RunStart,
    changes_the_run,
    check_every,
    needed,
    scalars,
)
from raypipe.ir.report import StepRecord

__all__ = ["MLflow"]

BATCH_S = 2.0
MOST_METRICS, MOST_PARAMS = 1000, 100
"""Of one request, as MLflow limits them."""
MOST_WAITING = 100_000
"""Metrics that are kept for a server that does not answer; the oldest go first."""
TAG = "raypipe.run"
_NOT_ALLOWED = re.compile(r"[^\w\-. /]")


@dataclass
class MLflow(Callback):
    """Logs to MLflow, in a request every two seconds rather than one per step.

    A run that goes on, here or in another driver, goes on in the same run of MLflow, which is found by its tag.

    Attributes:
        experiment: name; made where it is missing.
        tracking_uri: None for MLFLOW_TRACKING_URI of the process that runs the loop.
        every_steps: of so many steps one is logged.
    """

    experiment: str = "raypipe"
    tracking_uri: str | None = None
    every_steps: int = 1
    _client: Any = field(default=None, init=False, repr=False)
    _run_id: str = field(default="", init=False, repr=False)
    _steps: Newest = field(default_factory=Newest, init=False, repr=False)
    _evaluations: Newest = field(default_factory=Newest, init=False, repr=False)
    _waiting: list[Any] = field(default_factory=list, init=False, repr=False)
    _sent_s: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_every("MLflow", self.every_steps)

    def check(self) -> None:
        """Raises: ConfigError: what it logs with is not installed."""
        needed("mlflow", "raypipe[mlflow]", "MLflow()")

    def on_start(self, run: RunStart) -> None:
        self._steps, self._evaluations = Newest(), Newest()  # a second fit may use the same object
        self._waiting, self._sent_s = [], 0.0
        mlflow = needed("mlflow", "raypipe[mlflow]", "MLflow()")
        self._client = mlflow.MlflowClient(self.tracking_uri)
        found = self._client.get_experiment_by_name(self.experiment)
        experiment = self._client.create_experiment(self.experiment) if found is None else found.experiment_id
        tag = run.path.replace("'", "")
        known = self._client.search_runs([experiment], f"tags.`{TAG}` = '{tag}'", max_results=1)
        if known and run.step:
            self._run_id = known[0].info.run_id
            self._client.update_run(self._run_id, "RUNNING")
            return
        made = self._client.create_run(experiment, run_name=run.name, tags={TAG: tag})
        self._run_id = made.info.run_id
        params = [
            mlflow.entities.Param(_NOT_ALLOWED.sub("_", name), str(value)) for name, value in run.settings.items()
        ]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + MOST_PARAMS])

    def on_step(self, record: StepRecord) -> None:
        if record.step % self.every_steps == 0 and self._steps.passed_by(record.step):
            self._wait(scalars(record), record.step)

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._evaluations.passed_by(step):
            self._wait(metrics, max(0, step - 1))  # of the last step before it

    def on_checkpoint(self, step: int, path: str) -> None:
        self._client.set_tag(self._run_id, "raypipe.checkpoint", path)

    def on_recovery(self, event: Event) -> None:
        self._client.set_tag(self._run_id, f"raypipe.{event.decision}.{event.step}".replace(" ", "_"), event.reason)

    def on_decision(self, event: Event) -> None:
        if changes_the_run(event):
            self.on_recovery(event)

    def on_end(self, end: RunEnd) -> None:
        state = "FAILED" if end.error else "KILLED" if end.stopped else "FINISHED"
        try:
            self._send()
        finally:
            self._client.set_terminated(self._run_id, state)

    def _wait(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep numbers until a request is worth it."""
        now_s = time.time()
        self._waiting += [(name, value, int(now_s * 1000), step) for name, value in metrics.items()]
        del self._waiting[:-MOST_WAITING]
        if now_s - self._sent_s >= BATCH_S:
            self._send()

    def _send(self) -> None:
        metric = needed("mlflow.entities", "raypipe[mlflow]", "MLflow()").Metric
        self._sent_s = time.time()
        while self._waiting:
            self._client.log_batch(self._run_id, metrics=[metric(*found) for found in self._waiting[:MOST_METRICS]])
            del self._waiting[:MOST_METRICS]  # only now: a request that failed is made again
