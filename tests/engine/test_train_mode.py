"""What was put into evaluation mode before training: norms are refused, the rest noted, a train() of its own counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Self

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.errors import CaptureError

pytestmark = pytest.mark.engine


def layers(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), *middle, nn.Linear(4, 4))


def trainer(model: nn.Module, folder: Path) -> PipelineTrainer:
    drawn = torch.Generator().manual_seed(1)
    return PipelineTrainer(
        model, loss_fn=functional.cross_entropy, optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        train_data=TensorDataset(torch.randn(8, 4, generator=drawn), torch.arange(8) % 4),
        pipeline=PipelineConfig(num_stages=2, minibatch_size=8, num_microbatches=2, partitioner="parameters"),
        run_config=SimpleNamespace(name="modes", storage_path=str(folder)),
    )  # fmt: skip


class Wrapped(nn.Module):
    """Traced; its norm stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(nn.BatchNorm1d(4))

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.layers[1].eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def test_a_norm_in_evaluation_mode_is_refused(tmp_path: Path) -> None:
    model = layers(nn.BatchNorm1d(4))
    model[1].eval()
    with pytest.raises(
        CaptureError, match=r"module '1', BatchNorm1d, is in evaluation mode.*get_submodule\('1'\)\.eval"
    ):
        trainer(model, tmp_path).plan()
    assert [module.training for module in model] == [True, False, True]


def test_one_that_train_keeps_there_is_taken(tmp_path: Path) -> None:
    model = Wrapped().train()
    result = trainer(model, tmp_path).fit(num_steps=2, local=True, progress=False)
    assert torch.equal(load_state_dict(result.checkpoint)["layers.1.running_mean"], torch.zeros(4))


def test_anything_else_is_noted_once(tmp_path: Path) -> None:
    model = layers(nn.Sequential(nn.Dropout(0.5), nn.Tanh()))
    model[1].eval()
    (note,) = [note for note in trainer(model, tmp_path).plan().notes if "evaluation mode" in note]
    assert "module '1', which was in evaluation mode, trains in training mode" in note


@pytest.mark.parametrize("training", [True, False])
def test_a_model_all_of_which_is_in_one_mode_has_no_note(training: bool, tmp_path: Path) -> None:
    plan = trainer(layers(nn.BatchNorm1d(4)).train(training), tmp_path).plan()
    assert not any("evaluation mode" in note for note in plan.notes)
