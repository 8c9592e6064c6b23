"""Stages that run their forwards again change no bit: against eager PyTorch, and the run without."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from raypipe import load_state_dict
from raypipe.engine.stage.activation_checkpointing import Recomputation
from tests.exactness import SHAPES, STEPS, differences, expected, faults, train, unequal
from tests.models import CASES, TIED, case
from tests.trainers import trainer_of

pytestmark = [pytest.mark.xdist_group("tracing"), pytest.mark.usefixtures("shared_captures"), pytest.mark.slow]

ONES = [name for name in CASES if name not in TIED]
SCHEDULES = ("gpipe", "1f1b", "kfkb2", "slack", "zb-h1")
NORM = "normed-sequential"  # spectral norms are in it, whose buffers a forward reads and changes
CHECKPOINTED = ("sequential-reentrant", "sequential-not-reentrant")
DRAWS = ("lstm-deep", "sequential-reentrant", "not-reentrant")


def compare(name: str, stages: int, schedule: str, shape: str, **more: Any) -> list[str]:
    manner: dict[str, Any] = {"max_grad_norm": 0.5, "loss_reduction": "valid_tokens" if name == "masked" else "mean"}
    wanted = expected(name, SHAPES[shape], "sgd", **manner)
    run = train(name, stages, SHAPES[shape], schedule, "sgd", **manner, **more)
    return [f"{schedule}, {shape}, {stages} stages: {fault}" for fault in faults(name, run, wanted)]


@pytest.mark.parametrize("name", [*ONES, NORM, *DRAWS])
def test_every_model(name: str) -> None:
    """Schedules, shapes and numbers of stages take turns."""
    start = [*ONES, NORM, *DRAWS].index(name)
    turns = itertools.islice(itertools.cycle(itertools.product((2, 3), SCHEDULES)), start, start + 2)
    for turn, (stages, schedule) in enumerate(turns):
        shape = list(SHAPES)[(start + turn) % len(SHAPES)]
        assert compare(name, stages, schedule, shape, recompute="always") == []


@pytest.mark.parametrize("name", ["noisy", "unet"])
def test_by_stage(name: str) -> None:
    for again in ([True, False, False], [0, 2], ["never", "always", "never"], ["auto", "never", "always"]):
        assert compare(name, 3, "zb-h1", "ragged-epoch", recompute=again) == []


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", [*TIED, "normed"])  # the old spectral norm reads its weight twice
def test_tied_parameters(name: str, schedule: str) -> None:
    """Within rounding of plain PyTorch, and equal to the bit to the same stages that keep their activations."""
    for stages in (1, 3):
        runs = [train(name, stages, SHAPES["even"], schedule, "adamw", recompute=r) for r in ("never", "always")]
        assert differences(*runs) == []


@pytest.mark.parametrize(
    ("schedule", "stages", "workers"), [("interleaved", 4, 2), ("zb-v", 4, 2), ("interleaved", 3, 1)]
)
def test_several_stages_on_a_worker(schedule: str, stages: int, workers: int) -> None:
    assert compare("noisy", stages, schedule, "even", workers=workers, recompute="always") == []


def state_of(name: str, schedule: str, recompute: str, folder: Path) -> dict[str, torch.Tensor]:
    """What a run with dropout ends with."""
    found = case(name)
    trainer = trainer_of(
        found.model(), folder, recompute, loss_fn=found.loss_fn, train_data=found.data(40),
        optimizer=lambda named: torch.optim.SGD(named, lr=5e-2, momentum=0.9), num_stages=3, partitioner=("1", "3"),
        schedule=schedule, loss_reduction="mean", recompute=recompute,
    )  # fmt: skip
    trainer.fit(num_steps=2 * STEPS, local=True, progress=False)
    return load_state_dict(str(folder / recompute))


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_dropout_with_several_versions(schedule: str, tmp_path: Path) -> None:
    """Other weights are bound to the children by the time that a forward, or torch.utils.checkpoint, runs again."""
    plain = state_of("sequential-not-checkpointed", schedule, "never", tmp_path)
    for name, recompute in itertools.product((*CHECKPOINTED, "sequential-not-checkpointed"), ("never", "always")):
        found = state_of(name, schedule, recompute, tmp_path / name)
        assert unequal(found, plain) == [], (name, recompute)


def test_a_second_change_of_a_buffer_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is worth something: where B is given the buffers themselves, statistics are others."""
    monkeypatch.setattr(Recomputation, "_copied", lambda self, kind, tensors: dict(tensors))
    run = train("cnn", 2, SHAPES["even"], "1f1b", "sgd", max_grad_norm=0.5, recompute="always")
    found = differences(run, expected("cnn", SHAPES["even"], "sgd", max_grad_norm=0.5))
    assert any("running_mean" in name for name in found)
