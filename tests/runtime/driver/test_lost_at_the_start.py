"""A worker that is lost while stages receive their parameters, before the first step, is replaced."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.train import FailureConfig

from raypipe import PipelineTrainer
from raypipe.errors import StageLostError
from tests.prepare.test_resume import outcome, trainer
from tests.runtime.fleet.test_recovery import events
from tests.trainers import adamw

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("shared_captures")]


class Deadly:
    """AdamW; the first ``deaths`` stage actors that make it end at that moment."""

    def __init__(self, folder: Path, deaths: int) -> None:
        self.folder, self.deaths = folder, deaths
        folder.mkdir()

    def __call__(self, named: Any) -> torch.optim.Optimizer:
        if ray.get_runtime_context().get_actor_name():
            for death in range(self.deaths):
                with contextlib.suppress(FileExistsError):
                    (self.folder / str(death)).touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)
        return adamw(named)


def surviving(folder: Path, deaths: int, most: int) -> PipelineTrainer:
    config = SimpleNamespace(name="run", storage_path=str(folder), failure_config=FailureConfig(max_failures=most))
    return trainer("mlp", folder, "run", 2, optimizer=Deadly(folder / "deaths", deaths), run_config=config)


def test_a_worker_lost_before_the_first_step_is_replaced(cluster: None, tmp_path: Path) -> None:
    surviving(tmp_path, 1, 2).fit(num_steps=5)
    trainer("mlp", tmp_path, "alone", 2).fit(num_steps=5, local=True)
    (rows, state), (whole, parameters) = outcome(tmp_path / "run"), outcome(tmp_path / "alone")
    assert rows == whole
    assert all(torch.equal(state[name], x) for name, x in parameters.items())
    (failure,) = events(tmp_path / "run", "failure")
    assert failure["step"] == 0


def test_too_many_losses_before_the_first_step_end_the_run(cluster: None, tmp_path: Path) -> None:
    with pytest.raises(StageLostError, match=r"died while(.|\n)*it is failure 2 of this run"):
        surviving(tmp_path, 99, 1).fit(num_steps=5)
    assert len(events(tmp_path / "run", "failure")) == 1
