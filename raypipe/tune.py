"""Ray Tune over pipelines: each trial is a run, and stopping a trial stops its run.

def make(config, name):
    return raypipe.PipelineTrainer(..., run_config=RunConfig(name=name, storage_path=...))

tuner = ray.tune.Tuner(
    raypipe.tune.trainable(make, num_steps=500, report_interval_steps=50),
    param_space={"lr": ray.tune.loguniform(1e-4, 1e-2)},
    tune_config=ray.tune.TuneConfig(metric="loss", mode="min", num_samples=8, max_concurrent_trials=2),
)

Tune  --setup-->  trial, a process of its own  --start-->  run: driver, stages, places
      --step--->  waits for so many steps, and reports
      --stop--->  cleanup                      --stop--->  ends after its step, with a checkpoint; nothing is left

Stages reserve resources of their own, which Tune does not count. Therefore set max_concurrent_trials to the number of
runs that fit on the cluster. A trial that Tune restarts resumes its run, because the name of the run is the same.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ray import tune

from raypipe.api.handle import RunHandle
from raypipe.api.trainer import PipelineTrainer
from raypipe.errors import ConfigError, RaypipeError

MakeTrainer = Callable[[dict[str, Any], str], PipelineTrainer]
"""Function (config of the trial, name for its run) -> trainer whose run_config gives the run this name."""

TRIAL = {"memory": 1.0}
"""Resources of the process that waits for a run: one byte of memory, since Ray has no empty placement group.

A share of a CPU would keep a stage from reserving that CPU.
"""
POLL_S = 0.2
END_S = 120.0
"""Maximum seconds for a stopped run to finish its step and checkpoint; then its driver and stages are ended."""
POINTER = "run.json"
RUNNING = ("starting", "running", "stopping")


def trainable(make_trainer: MakeTrainer, num_steps: int, report_interval_steps: int = 10) -> type[tune.Trainable]:
    """Create the trainable class for ``ray.tune.Tuner``; each trial is the run of a trainer from ``make_trainer``.

    A trial reports ``loss`` (mean over the steps since the last report), ``step``, ``samples_per_s``, ``path`` (the
    run's folder) and ``checkpoint`` (the newest one). The last report also has the run's ``metrics``, with the results
    of the last evaluation. If the run fails, the trial fails with the run's error.

    Args:
        num_steps: optimizer steps of every run.
        report_interval_steps: steps between two reports; a scheduler can stop a trial at a report only.

    Raises:
        ConfigError: one of the two numbers is not an integer of at least 1.
    """
    for name, value in (("num_steps", num_steps), ("report_interval_steps", report_interval_steps)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name}={value!r} is not possible: give an integer of at least 1.")

    class PipelineTrial(_Trial):
        make = staticmethod(make_trainer)
        steps, interval = num_steps, report_interval_steps

    return PipelineTrial


class _Trial(tune.Trainable):
    """Trial of Tune: starts one run, and reports its progress.

    Attributes:
        make: see ``MakeTrainer``.
        steps: optimizer steps of the run.
        interval: steps between two reports.
    """

    make: MakeTrainer
    steps: int
    interval: int
    _handle: RunHandle | None = None

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory([dict(TRIAL)])

    def setup(self, config: dict[str, Any]) -> None:
        name = f"trial-{self.trial_id}"
        trainer = type(self).make(config, name)
        if (own_name := getattr(trainer._run, "name", None)) != name:
            raise ConfigError(
                f"make_trainer named its run {own_name!r} instead of {name!r}: give the name that it is called with to "
                "RunConfig(name=...), so that every trial has a run of its own, and goes on with it."
            )
        self._told = 0
        self._handle = trainer.start(self.steps)

    def step(self) -> dict[str, Any]:
        assert self._handle is not None
        wanted = min(self._told + self.interval, self.steps)
        while (status := self._handle.status()).state in RUNNING and not (wanted <= status.step < self.steps):
            time.sleep(POLL_S)
        losses = [] if status.state == "failed" else self._handle.metrics().loss[self._told : status.step]
        ended = status.state not in RUNNING
        more: Mapping[str, Any] = self._handle.wait(END_S).metrics if ended else {}
        self._told = status.step
        reported: dict[str, Any] = {"step": status.step, "samples_per_s": status.samples_per_s}
        reported |= {"path": status.path, "checkpoint": status.checkpoint}
        return {**more, **reported, "loss": math.fsum(losses) / max(1, len(losses)), "done": ended}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the path of the run's folder, which has the run's own checkpoints, to a file in ``checkpoint_dir``."""
        assert self._handle is not None
        Path(checkpoint_dir, POINTER).write_text(json.dumps({"path": self._handle.path}), encoding="utf-8")

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Do nothing for a checkpoint of this trial, because ``setup`` has already resumed the run.

        Raises:
            ConfigError: ``checkpoint`` is of another trial, as in population based training.
        """
        assert self._handle is not None
        other = json.loads(Path(checkpoint, POINTER).read_text(encoding="utf-8"))["path"]
        if other != self._handle.path:
            raise ConfigError(
                f"This trial's run {self._handle.path} cannot take over the weights of {other} while it trains, as "
                "population based training requires. Use a scheduler that stops trials, such as ASHAScheduler."
            )

    def cleanup(self) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            return
        # step() reports the end of the run.
        with contextlib.suppress(RaypipeError, TimeoutError), contextlib.closing(handle):
            handle.stop("Tune stopped its trial")
            handle.wait(END_S)
