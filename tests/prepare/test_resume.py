"""A run that was stopped and goes on, at any number of stages, is the run that was never stopped: step by step."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.errors import CheckpointError
from raypipe.profiling.profile_cache import cached_profile
from tests.exactness import SHAPES, config_of, same_bits, unequal
from tests.models import CASES
from tests.trainers import adamw
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures"), pytest.mark.slow]

STEPS, SAVED = 5, 3


def broken_adamw(named: Any) -> torch.optim.Optimizer:
    """AdamW whose third step fails."""
    made = adamw(named)
    steps = iter(range(100))

    def count(*_: Any) -> None:
        if next(steps) == 2:
            raise RuntimeError("the optimizer is broken")

    made.register_step_pre_hook(count)
    return made


def unhurried(named: Any) -> torch.optim.Optimizer:
    """The same bits at 50 steps a second or less: what trains until it is stopped has not gone far by then."""
    made = adamw(named)
    made.register_step_pre_hook(lambda *_: time.sleep(0.02))
    return made


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)


def trainer(name: str, folder: Path, run: str, stages: int, **more: Any) -> PipelineTrainer:
    found, shape = CASES[name], SHAPES["ragged-epoch"]
    arguments: dict[str, Any] = {
        "model": found.model(),
        "loss_fn": found.loss_fn,
        "optimizer": adamw,
        "lr_scheduler": cosine,
        "train_data": found.data(shape.samples),
        "pipeline": config_of(shape, stages, "slack", max_grad_norm=0.5),
        "run_config": SimpleNamespace(name=run, storage_path=str(folder)),
        **more,
    }
    return PipelineTrainer(arguments.pop("model"), **arguments)


def outcome(folder: Path) -> tuple[list[tuple[Any, ...]], dict[str, torch.Tensor]]:
    rows = pq.read_table(folder / "metrics.parquet").to_pylist()
    return [(r["step"], r["samples"], r["loss"], r["grad_norm"]) for r in rows], load_state_dict(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Five steps without a break, of a model with batch statistics and of one with dropout."""
    folder = tmp_path_factory.mktemp("whole")
    for name in ("cnn", "noisy"):
        trainer(name, folder, name, 2).fit(num_steps=STEPS, local=True, progress=False)
    return {name: outcome(folder / name) for name in ("cnn", "noisy")}


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [("cnn", 2, 2), *((name, first, 5 - first) for name in ("cnn", "noisy") for first in (1, 2, 3, 4))],
)
def test_the_same_steps(name: str, first: int, then: int, tmp_path: Path, whole: dict[str, Any]) -> None:
    """Every pair of schedules: tests/runs/test_resumed_layouts.py."""
    trainer(name, tmp_path, "run", first).fit(num_steps=SAVED, local=True, progress=False)
    saved = load_state_dict(tmp_path / "run")
    result = trainer(name, tmp_path, "run", then).fit(num_steps=STEPS, local=True, progress=False)
    rows, state = outcome(tmp_path / "run")
    expected_rows, expected = whole[name]
    assert rows == expected_rows
    assert [r.step for r in result.records] == list(range(STEPS))
    assert unequal(state, expected) == []
    assert any(not same_bits(state[n], saved[n]) for n in state), "the second half changed nothing"


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    once = trainer("mlp", tmp_path, "run", 2).fit(num_steps=SAVED, local=True, progress=False)
    again = trainer("mlp", tmp_path, "run", 2).fit(num_steps=SAVED, local=True, progress=False)
    assert again.checkpoint == once.checkpoint
    assert [r.loss for r in again.records] == [r.loss for r in once.records]


def test_stopping_and_going_on(tmp_path: Path) -> None:
    """stop() from another thread, at whatever step it meets: nothing is lost and nothing done twice."""
    trainer("mlp", tmp_path, "whole", 2).fit(num_steps=150, local=True, progress=False)
    handle = trainer("mlp", tmp_path, "run", 2).start(num_steps=150, local=True)
    while handle.status().step < 3:
        assert handle.status().state in ("starting", "running")
    handle.stop("enough")
    stopped = handle.wait(timeout_s=240)
    assert stopped.stopped == "enough"
    assert handle.status().state == "stopped"
    assert 3 <= len(stopped.records) < 150
    assert stopped.checkpoint.endswith(f"step_{len(stopped.records):07d}")
    trainer("mlp", tmp_path, "run", 3).fit(num_steps=150, local=True, progress=False)
    rows, state = outcome(tmp_path / "run")
    expected_rows, expected = outcome(tmp_path / "whole")
    assert rows == expected_rows
    assert unequal(state, expected) == []


def test_checkpoints_on_the_way_and_what_is_kept(tmp_path: Path) -> None:
    keep = SimpleNamespace(
        name="run", storage_path=str(tmp_path),
        checkpoint_config=SimpleNamespace(
            num_to_keep=2, checkpoint_score_attribute="eval_loss", checkpoint_score_order="min"
        ),
    )  # fmt: skip
    found, shape = CASES["mlp"], SHAPES["even"]
    pipeline = config_of(shape, 2, "1f1b", checkpoint_interval_steps=2)
    made = trainer("mlp", tmp_path, "run", 2, pipeline=pipeline, run_config=keep, eval_data=found.data(13))
    result = made.fit(num_steps=9, local=True, progress=False)
    names = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert names[-1] == "step_0000009"
    assert len(names) in (2, 3)  # the best two, and the newest where it is not among them
    assert "eval_loss" in result.metrics
    plain = trainer("mlp", tmp_path, "plain", 2, pipeline=config_of(shape, 2, "1f1b")).fit(
        num_steps=9, local=True, progress=False
    )
    assert [r.loss for r in plain.records] == [r.loss for r in result.records], "evaluating on the way changes nothing"


def test_a_checkpoint_on_demand(tmp_path: Path) -> None:
    handle = trainer("mlp", tmp_path, "run", 2).start(num_steps=100_000, local=True)
    while handle.status().step < 2:
        pass
    path = Path(handle.checkpoint(timeout_s=240))
    # The driver may die now, and whoever goes on from here needs the steps before it.
    assert pq.read_table(tmp_path / "run/metrics.parquet").num_rows >= int(path.name.removeprefix("step_"))
    assert load_state_dict(path).keys() == CASES["mlp"].model().state_dict().keys()
    assert len(handle.metrics()) >= 2
    assert "<svg" in handle.plot()._repr_svg_()
    assert handle.timeline() is not None
    handle.stop()
    assert handle.wait(timeout_s=240).stopped


def test_micro_batches_left_to_the_planner_stay_what_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second submission measures a machine on which small micro-batches cost nothing extra."""
    pipeline = PipelineConfig(num_stages=2, minibatch_size=8)

    def measured(captured: Any, example: Any, larger: Any, **_: Any) -> Any:
        profile, read = cached_profile(captured, example)
        return dataclasses.replace(profile, seconds_by_size=tuple((b, overhead_s + b) for b in (1, 2, 4))), read

    monkeypatch.setattr("raypipe.prepare.model_profile.cached_profile", measured)
    chosen = []
    for overhead_s, steps in ((1000.0, SAVED), (0.0, STEPS)):  # noqa: B007  (measured() reads it)
        made = trainer("mlp", tmp_path, "run", 2, pipeline=pipeline)
        made.fit(num_steps=steps, local=True, progress=False)
        chosen.append(made.plan().num_microbatches)
        fresh = trainer("mlp", tmp_path, f"fresh-{steps}", 2, pipeline=pipeline).plan().num_microbatches
        assert (fresh == chosen[0]) == (steps == SAVED), "the planner would have chosen otherwise"
    assert chosen[0] == chosen[1]
    assert len(outcome(tmp_path / "run")[0]) == STEPS


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True, timeout=60)
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=60)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small file system")
@pytest.mark.parametrize("freed", [True, False])
def test_a_full_disk_ends_no_training(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, freed: bool
) -> None:
    """Events, metrics and checkpoints cannot be written for a while: steps go on. At the end there must be room."""
    monkeypatch.setattr("raypipe.engine.io.run_files.WRITE_S", 0.05)
    steps = 250
    pipeline = config_of(SHAPES["ragged-epoch"], 2, "slack", max_grad_norm=0.5, checkpoint_interval_steps=20)
    made = partial(trainer, "mlp", stages=2, pipeline=pipeline)
    made(folder=tmp_path, run="whole").fit(num_steps=steps, local=True, progress=False)
    handle = made(folder=small_disk, run="run").start(num_steps=steps, local=True)
    wait_until(lambda: handle.status().step >= 10)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    full_at = handle.status().step
    wait_until(lambda: any("No space left" in alert.message for alert in handle.status().alerts))
    wait_until(lambda: handle.status().step >= min(full_at + 40, steps))
    if freed:
        filler.unlink()
        assert len(handle.wait(timeout_s=240).records) == steps
    else:
        with pytest.raises(CheckpointError, match="No space left"):
            handle.wait(timeout_s=240)
        filler.unlink()
        made(folder=small_disk, run="run").fit(num_steps=steps, local=True, progress=False)
    (rows, state), (expected_rows, expected) = outcome(small_disk / "run"), outcome(tmp_path / "whole")
    assert rows == expected_rows
    assert unequal(state, expected) == []
