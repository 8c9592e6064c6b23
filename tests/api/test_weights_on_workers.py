"""On Ray actors, weights that only the workers hold: the store is given buffers, and the run is that of threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.train import FailureConfig
from safetensors.torch import save_file
from torch import nn

from raypipe import PipelineTrainer, load_state_dict
from raypipe.runtime.fleet.fleet import Fleet
from raypipe.runtime.worker.packing import stored
from tests.exactness import unequal
from tests.runtime.fleet.test_recovery import WAIT_S, events, kill, reached
from tests.runtime.on_fleet import start_on
from tests.trainers import trainer_of

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def layered() -> nn.Module:
    """Without statistics, which 16 bits are too coarse for."""
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))


class Rows(torch.utils.data.Dataset[Any]):
    """Random ones, of which each takes a while, so that a run is not over too soon."""

    def __init__(self, count: int, seconds: float) -> None:
        drawn = torch.Generator().manual_seed(3)
        self._x, self._y = torch.randn(count, 6, generator=drawn), torch.randint(0, 3, (count,), generator=drawn)
        self._seconds = seconds

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self._seconds)
        return self._x[index], self._y[index]


def trainer(
    folder: Path, name: str, on: str, weights: Path | None, precision: str = "fp32", seconds: float = 0.0,
    failures: int = 0, build: Callable[[], nn.Module] = model,
) -> PipelineTrainer:  # fmt: skip
    kept = FailureConfig(max_failures=failures)
    return trainer_of(
        build, init_from=weights, train_data=Rows(16, seconds), num_microbatches=2, weights_on=on, precision=precision,
        run_config=SimpleNamespace(name=name, storage_path=str(folder), failure_config=kept),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("from_file", "build", "precision"),
    [(True, model, "bf16-autocast"), (False, model, "fp32"), (False, layered, "fp16"), (True, layered, "bf16")],
    ids=["from a file", "by initialisers", "fp16", "bf16"],
)
def test_workers_fill_their_own(
    fleet: Fleet, tmp_path: Path, *, from_file: bool, build: Callable[[], nn.Module], precision: str
) -> None:
    """In 16 bits too; the scale of an fp16 loss is one for all actors."""
    weights = tmp_path / "weights.safetensors" if from_file else None
    if weights is not None:
        save_file(build().state_dict(), weights)
    threads: Any = trainer(tmp_path, "threads", "client" if from_file else "workers", weights, precision, build=build)
    expected = threads.fit(num_steps=3, local=True, progress=False)
    made = trainer(tmp_path, "actors", "workers", weights, precision, build=build)
    put: list[str] = []
    held = stored(made._prepared().initial, lambda packed: put.extend(packed))
    assert put == ([] if from_file else [name for name, _ in build().named_buffers()])
    assert held.names == build().state_dict().keys()
    assert held.info("0.weight").shape == (8, 6)
    found = start_on(fleet, made, 3).wait()
    assert [record.loss for record in found.records] == [record.loss for record in expected.records]
    ours, theirs = load_state_dict(tmp_path / "actors"), load_state_dict(tmp_path / "threads")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_all_stages_are_lost_before_a_checkpoint_and_then_there_are_more(local_ray: None, tmp_path: Path) -> None:
    """Nobody has a copy: workers make their weights once more, as they began, and hand them over in another cut."""
    handle = trainer(tmp_path, "lost", "workers", None, seconds=0.004, failures=-1).start(60)
    reached(handle, 4)
    for stage in (0, 1):
        kill(handle, stage)
    reached(handle, 12)
    handle.resize(3, timeout_s=WAIT_S)
    found = load_state_dict(handle.wait(timeout_s=WAIT_S).checkpoint)
    (recovery,) = events(tmp_path / "lost", "recovery")
    assert "the parameters that the run began with" in recovery["reason"]
    trainer(tmp_path, "threads", "workers", None).fit(num_steps=60, local=True, progress=False)
    wanted = load_state_dict(tmp_path / "threads")
    assert unequal(found, wanted) == []
