"""A run that is stopped or fails in an evaluation: what was trained counts, and the evaluation is made up for."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from raypipe import PipelineTrainer, load_state_dict
from raypipe.api.handle import RunHandle
from raypipe.engine.io.checkpoint.find_checkpoint import read_manifest
from raypipe.engine.io.storage import Place
from raypipe.errors import CheckpointError, DataError, PlanError, StageError
from tests.trainers import trainer_of
from tests.waiting import wait_until

pytestmark = pytest.mark.engine

STEPS = 6


class Samples(Dataset):
    """Reading one raises what was planted for it."""

    def __init__(self, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self._x, self._y = torch.randn(16, 4, generator=drawn), torch.randint(0, 3, (16,), generator=drawn)
        self.planted = dict[int, BaseException]()

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if (error := self.planted.get(index)) is not None:
            raise error
        return self._x[index], self._y[index]


class Gate:
    """A metric; evaluation number ``at``, counted from 0, does what was planted and goes on."""

    done, at = 0, -1
    does: Callable[[], None] = staticmethod(lambda: None)

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        if Gate.done == Gate.at:
            Gate.at = -1
            Gate.does()

    def compute(self) -> float:
        Gate.done += 1
        return 1.0

    def reset(self) -> None: ...


def trainer(folder: Path, name: str, data: Any, eval_data: Any, **fields: Any) -> PipelineTrainer:
    torch.manual_seed(0)
    kept = SimpleNamespace(num_to_keep=1, checkpoint_score_attribute="eval_loss", checkpoint_score_order="min")
    return trainer_of(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), train_data=data, eval_data=eval_data,
        metrics={"gate": Gate()}, num_microbatches=2, checkpoint_interval_steps=2, verify="off",
        run_config=SimpleNamespace(name=name, storage_path=str(folder), checkpoint_config=kept), **fields,
    )  # fmt: skip


def checkpoints(folder: Path, name: str) -> dict[int, Any]:
    """eval_loss of the manifests that there are."""
    place = Place.of(folder / name / "checkpoints")
    found = [read_manifest(place / path.name) for path in (folder / name / "checkpoints").iterdir()]
    return {manifest.step: manifest.metrics.get("eval_loss") for manifest in found}


def evaluated(folder: Path, name: str) -> list[float]:
    table = trainer(folder, name, Samples(0), Samples(1)).fit(STEPS, local=True, progress=False).metrics_dataframe
    return list(table["eval_loss"].dropna())


def disturbed(folder: Path, step: int, does: Callable[[], None]) -> RunHandle:
    """A run of which the evaluation after this step does something."""
    made = trainer(folder, "run", Samples(0), Samples(1))
    made.plan()  # it tries the metric
    Gate.done, Gate.at, Gate.does = 0, step // 2 - 1, staticmethod(does)
    return made.start(STEPS, local=True)


@pytest.mark.parametrize("step", [4, STEPS])
def test_a_stop_in_an_evaluation_is_one_and_the_checkpoint_is_scored_later(step: int, tmp_path: Path) -> None:
    wanted = evaluated(tmp_path, "alone")
    begun, asked = threading.Event(), threading.Event()

    def wait_for_the_stop() -> None:
        begun.set()
        assert asked.wait(60.0)

    handle = disturbed(tmp_path, step, wait_for_the_stop)
    assert begun.wait(60.0)
    handle.stop()
    asked.set()
    result = handle.wait(timeout_s=60.0)
    assert (result.stopped != "", handle.status().state) == (True, "stopped")
    assert checkpoints(tmp_path, "run")[step] is None
    assert evaluated(tmp_path, "run") == wanted
    assert checkpoints(tmp_path, "run") == checkpoints(tmp_path, "alone")


@pytest.mark.parametrize("error", [KeyError("boo"), type("Panic", (BaseException,), {})("unwrap")])
def test_what_was_trained_counts_where_the_last_evaluation_fails(error: BaseException, tmp_path: Path) -> None:
    wanted = evaluated(tmp_path, "alone")

    def fail() -> None:
        raise error

    with pytest.raises(StageError, match="The metric 'gate' failed"):
        disturbed(tmp_path, STEPS, fail).wait(timeout_s=60.0)
    assert checkpoints(tmp_path, "run")[STEPS] is None
    assert evaluated(tmp_path, "run") == wanted
    assert checkpoints(tmp_path, "run") == checkpoints(tmp_path, "alone")
    ours, theirs = (load_state_dict(tmp_path / name) for name in ("run", "alone"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    lines = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if line["decision"] == "resume"] == [STEPS]


@pytest.mark.parametrize("error", [type("Panic", (BaseException,), {})("unwrap"), SystemExit("enough")])
def test_a_sample_that_raises_no_exception_ends_the_run_at_its_step(error: BaseException, tmp_path: Path) -> None:
    broken = Samples(0)
    handle = trainer(tmp_path, "run", broken, Samples(1)).start(10**6, local=True)
    wait_until(lambda: handle.status().step >= 3)
    broken.planted.update(dict.fromkeys(range(16), error))
    with pytest.raises((DataError, StageError), match=r"Item \d+ of Samples .*Panic: unwrap|SystemExit: enough"):
        handle.wait(timeout_s=60.0)


def test_what_is_asked_of_a_run_that_is_over_is_refused_at_once(tmp_path: Path) -> None:
    handle = trainer(tmp_path, "run", Samples(0), Samples(1)).start(STEPS, local=True)
    handle.wait(timeout_s=60.0)
    with pytest.raises(CheckpointError, match=r"is over. Its newest checkpoint is .*step_0000006"):
        handle.checkpoint(timeout_s=60.0)
    with pytest.raises(PlanError, match=r"Stages in threads of one process stay as they are; .*local=False"):
        handle.resize(1, timeout_s=60.0)
