"""Ray Tune over pipelines: each trial is a run of its own, and a trial that is stopped stops its run.

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

Stages have places of their own, of which Tune knows nothing: max_concurrent_trials says how many runs the cluster has
room for. A trial that Tune starts again goes on with its run, because it has the same name.
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

__all__ = ["MakeTrainer", "trainable"]

MakeTrainer = Callable[[dict[str, Any], str], PipelineTrainer]
"""(config of the trial, name for its run) -> the trainer of its run, named so by run_config."""

TRIAL = {"memory": 1.0}
"""What the process that waits for a run takes: a byte, because Ray has no placement group of nothing, and a share of a
CPU would keep a stage from the last one."""
POLL_S = 0.2
END_S = 120.0
"""That a stopped run has for the step it is in and its checkpoint; then its driver and stages are ended."""
POINTER = "run.json"
RUNNING = ("starting", "running", "stopping")


def trainable(make_trainer: MakeTrainer, num_steps: int, report_interval_steps: int = 10) -> type[tune.Trainable]:
    """What ``ray.tune.Tuner`` takes: a class whose trials are runs of the trainers that ``make_trainer`` makes.

    A trial reports ``loss``, the mean over the steps since the last report, ``step``, ``samples_per_s``, ``path`` of
    the run's folder and its newest ``checkpoint``; the last report has the run's ``metrics`` too, evaluations among
    them. A run that fails is a trial that fails, with the run's own message.

    Args:
        num_steps: of every run.
        report_interval_steps: how often a trial reports, and so how often a scheduler may stop it.

    Raises:
        ConfigError: a number that is not possible.
    """
    for name, value in (("num_steps", num_steps), ("report_interval_steps", report_interval_steps)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name}={value!r} is not possible: give an integer of at least 1.")

    class PipelineTrial(_Trial):
        make = staticmethod(make_trainer)
        steps, interval = num_steps, report_interval_steps

    return PipelineTrial


class _Trial(tune.Trainable):
    """One run, watched for Tune."""

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
        if (given := getattr(trainer._run, "name", None)) != name:
            raise ConfigError(
                f"make_trainer named its run {given!r} instead of {name!r}: give the name that it is called with to "
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
        found: dict[str, Any] = {"step": status.step, "samples_per_s": status.samples_per_s}
        found |= {"path": status.path, "checkpoint": status.checkpoint}
        return {**more, **found, "loss": math.fsum(losses) / max(1, len(losses)), "done": ended}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Where the run is: its own folder has its checkpoints."""
        assert self._handle is not None
        Path(checkpoint_dir, POINTER).write_text(json.dumps({"path": self._handle.path}), encoding="utf-8")

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Of the same trial there is nothing to load, for its run went on with ``setup``.

        Raises:
            ConfigError: it is another trial's, as population based training has it.
        """
        assert self._handle is not None
        other = json.loads(Path(checkpoint, POINTER).read_text(encoding="utf-8"))["path"]
        if other != self._handle.path:
            raise ConfigError(
                f"This trial's run {self._handle.path} cannot take over the weights of {other} while it trains, as "
                "population based training asks for. Take a scheduler that stops trials, such as ASHAScheduler."
            )

    def cleanup(self) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            return
        # What the run says of its end is told by step(), not by who ends it.
        with contextlib.suppress(RaypipeError, TimeoutError), contextlib.closing(handle):
            handle.stop("Tune stopped its trial")
            handle.wait(END_S)
