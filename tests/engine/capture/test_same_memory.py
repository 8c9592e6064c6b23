"""Tensors over one memory, of which stages would hold copies that drift apart, are refused; neighbours are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raypipe import PipelineConfig, PipelineTrainer
from raypipe.errors import CaptureError

pytestmark = pytest.mark.engine


class Reading(nn.Module):
    """Two layers; ``more`` says what else the second one reads."""

    def __init__(self, more: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale: torch.Tensor = torch.ones(4)
        more(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x))) * self.scale


def as_parameter(net: nn.Module) -> None:
    net.two.weight.data = net.one.weight.data


def as_part(net: nn.Module) -> None:
    net.two.bias = nn.Parameter(net.one.weight.data[2])


def as_buffer(net: nn.Module) -> None:
    del net.scale
    net.register_buffer("scale", net.one.bias.data)


def as_attribute(net: nn.Module) -> None:
    net.scale = net.one.bias.detach()


WRONG: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "two parameters": (as_parameter, r"'one\.weight' and 'two\.weight' are two tensors over the same memory"),
    "a part of a parameter": (as_part, r"'one\.weight' and 'two\.bias' are two tensors"),
    "a buffer": (as_buffer, r"'one\.bias' and 'scale' are two tensors.* Make them one and the same"),
    "an attribute": (as_attribute, r"forward reads a tensor over the memory of 'one\.bias' .* or clone\(\)"),
}


def trainer(model: nn.Module, folder: Path) -> PipelineTrainer:
    drawn = torch.Generator().manual_seed(1)
    return PipelineTrainer(
        model, loss_fn=functional.cross_entropy, optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        train_data=TensorDataset(torch.randn(8, 4, generator=drawn), torch.arange(8) % 4),
        pipeline=PipelineConfig(
            num_stages=2, minibatch_size=8, num_microbatches=4, partitioner="parameters", verify="off"
        ),
        run_config=SimpleNamespace(name="memory", storage_path=str(folder)),
    )  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_would_drift_apart_is_refused(name: str, tmp_path: Path) -> None:
    more, words = WRONG[name]
    with pytest.raises(CaptureError, match=words):
        trainer(Reading(more), tmp_path).plan()


def test_in_an_nn_sequential_too(tmp_path: Path) -> None:
    made = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    made[2].weight.data = made[0].weight.data
    with pytest.raises(CaptureError, match=r"'0\.weight' and '2\.weight'"):
        trainer(made, tmp_path).plan()


def as_columns(net: nn.Module) -> None:
    both = torch.randn(4, 8)
    net.one.weight, net.two.weight = nn.Parameter(both[:, :4]), nn.Parameter(both[:, 4:])


def as_frozen(net: nn.Module) -> None:
    as_parameter(net)
    net.one.weight.requires_grad_(requires_grad=False)
    net.two.weight.requires_grad_(requires_grad=False)


def as_tied(net: nn.Module) -> None:
    net.two.weight = net.one.weight


@pytest.mark.parametrize("more", [as_columns, as_frozen, as_tied])
def test_neighbours_what_never_changes_and_one_parameter_twice_are_taken(
    more: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    trainer(Reading(more), tmp_path).plan()
