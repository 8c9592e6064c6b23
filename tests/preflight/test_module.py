"""Aliased memory, modules in evaluation mode and changes by a backward, which neither a trace nor two steps show."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from raypipe import load_state_dict
from raypipe.errors import CaptureError
from tests.trainers import trainer_of

pytestmark = pytest.mark.engine

DATA = TensorDataset(torch.linspace(-1, 1, 64).view(16, 4).sin(), torch.arange(16) % 4)


trainer = partial(trainer_of, train_data=DATA)


def layers(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), *middle, nn.Linear(4, 4))


# Tensors over one memory, of which stages would hold copies that drift apart.


class Reading(nn.Module):
    """Two layers; ``more`` changes what the second one reads."""

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


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (as_parameter, r"'one\.weight' and 'two\.weight' are two tensors over the same memory"),
        (as_part, r"'one\.weight' and 'two\.bias' are two tensors"),
        (as_buffer, r"'one\.bias' and 'scale' are two tensors.* Make them one and the same"),
        (as_attribute, r"forward reads a tensor over the memory of 'one\.bias' .* or clone\(\) the tensor"),
    ],
)
def test_tensors_over_one_memory_are_refused(more: Callable[[nn.Module], None], words: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=words):
        trainer(Reading(more), tmp_path, verify="off").plan()


def test_tensors_over_one_memory_are_refused_in_children(tmp_path: Path) -> None:
    model = layers(nn.Tanh())
    model[2].weight.data = model[0].weight.data
    with pytest.raises(CaptureError, match=r"'0\.weight' and '2\.weight'"):
        trainer(model, tmp_path).plan()


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
def test_neighbours_constants_and_one_parameter_twice_are_accepted(
    more: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    trainer(Reading(more), tmp_path, verify="off").plan()


# Modules in evaluation mode before training.


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


def test_a_norm_that_train_keeps_in_evaluation_mode_is_accepted(tmp_path: Path) -> None:
    result = trainer(Wrapped().train(), tmp_path).fit(num_steps=2, local=True, progress=False)
    assert torch.equal(load_state_dict(result.checkpoint)["layers.1.running_mean"], torch.zeros(4))


def test_other_modules_in_evaluation_mode_are_noted_once(tmp_path: Path) -> None:
    model = layers(nn.Sequential(nn.Dropout(0.5), nn.Tanh()))
    model[1].eval()
    (note,) = [note for note in trainer(model, tmp_path).plan().notes if "evaluation mode" in note]
    assert "module '1', which was in evaluation mode, trains in training mode" in note
    assert not any("evaluation mode" in note for note in trainer(model.eval(), tmp_path).plan().notes)


# State that a backward changes.


class Block(nn.Module):
    """Runs its forward again in the backward."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), norm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(lambda h: self.norm(self.linear(h)), x, use_reentrant=False)


class Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, calls: torch.Tensor) -> torch.Tensor:
        ctx.calls = calls
        return x * (1 + calls / 100)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.calls += 1
        return gradient, None


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Counting.apply(x, self.calls)


class Whole(nn.Module):
    """Layers in a model that is traced."""

    def __init__(self, net: nn.Sequential) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


@pytest.mark.parametrize("fields", [{"verify": "off"}, {"recompute": "always", "num_microbatches": 1}])
@pytest.mark.parametrize(
    ("middle", "buffer"), [(lambda: Block(nn.BatchNorm1d), "1.norm.running_mean"), (Counter, "1.calls")]
)
def test_a_backward_that_changes_a_buffer_is_refused_by_the_plan(
    middle: Any, buffer: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(CaptureError, match=f"The backward changes the buffer '{buffer}'"):
        trainer(layers(middle()), tmp_path, **fields).plan()


def test_a_backward_that_changes_a_buffer_is_refused_by_the_first_step_of_a_traced_model(tmp_path: Path) -> None:
    run = trainer(Whole(layers(Block(nn.BatchNorm1d))), tmp_path)
    with pytest.raises(CaptureError, match=r"The backward changes the buffer 'net.1.norm.running_mean'.*recompute="):
        run.fit(num_steps=1, local=True, progress=False)


@pytest.mark.parametrize("kind", [nn.Sequential, Whole])
def test_a_checkpoint_without_buffers_trains(kind: type[nn.Module], tmp_path: Path) -> None:
    trainer(kind(layers(Block(nn.LayerNorm))), tmp_path).fit(num_steps=1, local=True, progress=False)
