"""Stages that run their forwards again change no bit: against eager PyTorch, the emulators and the run without."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.engine.stage.activation_checkpointing import Recomputation
from tests.exactness import SHAPES, STEPS, differences, expected, faults, same_bits, train
from tests.models import CASES, FAST, TIED, case, vectors
from tests.runs.test_asynchronous import Setup, emulated, trained

pytestmark = [pytest.mark.xdist_group("tracing"), pytest.mark.usefixtures("shared_captures"), pytest.mark.slow]

ONES = [name for name in CASES if name not in (*TIED, "masked")]
SCHEDULES = ("gpipe", "1f1b", "kfkb2", "slack", "zb-h1")
NORM = "normed-sequential"  # spectral norms are in it, whose buffers a forward reads and changes
DRAWS = ("lstm-deep", "sequential-reentrant", "not-reentrant")


def compare(name: str, stages: int, schedule: str, shape: str, **more: Any) -> list[str]:
    wanted = expected(name, SHAPES[shape], "sgd", max_grad_norm=0.5)
    run = train(name, stages, SHAPES[shape], schedule, "sgd", max_grad_norm=0.5, **more)
    return [f"{schedule}, {shape}, {stages} stages: {fault}" for fault in faults(name, run, wanted)]


@pytest.mark.parametrize("name", [*ONES, NORM, *DRAWS])
def test_every_model(name: str) -> None:
    start = [*ONES, NORM, *DRAWS].index(name)
    turns = itertools.islice(itertools.cycle(itertools.product((2, 3), SCHEDULES)), start, start + 2)
    for turn, (stages, schedule) in enumerate(turns):
        shape = list(SHAPES)[(start + turn) % len(SHAPES)]
        assert compare(name, stages, schedule, shape, recompute="always") == []


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [*FAST, "noisy"])
def test_every_schedule(name: str, schedule: str) -> None:
    assert compare(name, 3, schedule, "even", recompute="always") == []


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
@pytest.mark.parametrize("name", ["noisy", "unet"])
def test_several_stages_on_a_worker(name: str, schedule: str, stages: int, workers: int) -> None:
    assert compare(name, stages, schedule, "even", workers=workers, recompute="always") == []


def test_a_micro_batch_without_a_valid_target() -> None:
    shape = SHAPES["indivisible-by-k"]
    wanted = expected("masked", shape, "sgd", loss_reduction="valid_tokens")
    for schedule in ("1f1b", "zb-h1"):
        run = train("masked", 3, shape, schedule, "sgd", loss_reduction="valid_tokens", recompute="always")
        assert faults("masked", run, wanted) == []


@pytest.mark.parametrize("policy", ["stashing", "two versions", "vertical sync", "2bw", "stashing, deeper"])
@pytest.mark.parametrize("net", ["cnn", "transformer"])
def test_the_version_of_the_forward_is_used_again(net: str, policy: str, tmp_path: Path) -> None:
    setup = Setup(net, 3, policy, shape="ragged epochs", recompute="always")
    found, wanted = trained(setup, tmp_path), emulated(setup)
    assert [n for n, t in {**wanted.parameters, **wanted.buffers}.items() if not same_bits(found[n], t)] == []


def state_of(name: str, schedule: str, recompute: str, folder: Path) -> dict[str, torch.Tensor]:
    """What a run with dropout ends with."""
    found = case(name)
    trainer = PipelineTrainer(
        found.model(), loss_fn=found.loss_fn, optimizer=lambda named: torch.optim.SGD(named, lr=5e-2, momentum=0.9),
        train_data=found.data(40),
        pipeline=PipelineConfig(
            num_stages=3, minibatch_size=8, num_microbatches=4, partitioner=("1", "3"), schedule=schedule,
            loss_reduction="mean", recompute=recompute,
        ),
        run_config=SimpleNamespace(name=recompute, storage_path=str(folder)),
    )  # fmt: skip
    trainer.fit(num_steps=2 * STEPS, local=True, progress=False)
    return load_state_dict(str(folder / recompute))


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
@pytest.mark.parametrize("name", ["sequential-not-checkpointed", "sequential-reentrant"])
def test_dropout_with_several_versions(name: str, schedule: str, tmp_path: Path) -> None:
    kept, again = (state_of(name, schedule, recompute, tmp_path) for recompute in ("never", "always"))
    assert [n for n in kept if not same_bits(kept[n], again[n])] == []


def test_a_second_change_of_a_buffer_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is worth something: where B is given the buffers themselves, statistics are others."""
    monkeypatch.setattr(Recomputation, "_copied", lambda self, kind, tensors: dict(tensors))
    run = train("cnn", 2, SHAPES["even"], "1f1b", "sgd", max_grad_norm=0.5, recompute="always")
    found = differences(run, expected("cnn", SHAPES["even"], "sgd", max_grad_norm=0.5))
    assert any("running_mean" in name for name in found)


@pytest.mark.parametrize("traced", [True, False])
def test_statistics_that_the_first_micro_batch_does_not_move(tmp_path: Path, traced: bool) -> None:
    """A layer that begins with zeros in front of a batch norm, as in ControlNet, whose first mean is 0."""

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        still = torch.nn.Linear(6, 6)
        torch.nn.init.zeros_(still.weight)
        torch.nn.init.zeros_(still.bias)
        layers = [torch.nn.Linear(6, 6), still, torch.nn.BatchNorm1d(6), torch.nn.Tanh(), torch.nn.Linear(6, 3)]
        net = torch.nn.Sequential(*layers)
        return Wrapped(net) if traced else net

    states = []
    for again in ("never", "always"):
        made = PipelineTrainer(
            model(),
            loss_fn=torch.nn.functional.cross_entropy,
            optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
            train_data=vectors(32),
            pipeline=PipelineConfig(
                num_stages=2, minibatch_size=8, num_microbatches=4, partitioner="parameters", schedule="1f1b",
                loss_reduction="mean", recompute=again,
            ),
            run_config=SimpleNamespace(name=again, storage_path=str(tmp_path)),
        )  # fmt: skip
        made.fit(6, local=True, progress=False)
        states.append(load_state_dict(tmp_path / again))
    assert [name for name in states[0] if not same_bits(states[0][name], states[1][name])] == []


class Wrapped(torch.nn.Module):
    """A model that is traced, for it is no Sequential."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x)
        return found
