"""What loss, metric and optimizer must not read: weights of the user's own model, which stages do not train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import ChainedScheduler, StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from raypipe import PipelineTrainer
from raypipe.errors import RaypipeError
from tests.trainers import sgd, trainer_of

pytestmark = pytest.mark.engine

Given = dict[str, Any]


class Net(nn.Module):
    """Two layers; it may return a parameter beside its output."""

    def __init__(self, *, returns_scale: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("weights", torch.linspace(0.5, 2.0, 4))
        self.returns_scale = returns_scale

    def forward(self, x: torch.Tensor) -> Any:
        y = self.two(torch.tanh(self.one(x)))
        return (y, self.scale) if self.returns_scale else y * self.scale


def trainer(folder: Path, model: nn.Module, given: Given) -> PipelineTrainer:
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(8, 4, generator=drawn), torch.arange(8) % 4)
    evaluated = data if "metrics" in given else None
    return trainer_of(model, folder, train_data=data, eval_data=evaluated, num_microbatches=2, verify="off", **given)


def penalty(model: nn.Module) -> Given:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, target) + sum(p.square().sum() for p in model.parameters())

    return {"loss_fn": loss}


def detached(model: nn.Module) -> Given:
    """No gradient comes of it, but it moves with the weights."""
    held = [p.detach() for p in model.parameters()]
    return {"loss_fn": lambda o, y: functional.cross_entropy(o, y) * (1 + sum(float(p.norm()) for p in held))}


def head(_: nn.Module) -> Given:
    """A layer that nobody trains."""
    own = nn.Linear(4, 4)
    return {"loss_fn": lambda o, y: functional.cross_entropy(own(o), y)}


def metric(model: nn.Module) -> Given:
    return {"metrics": {"size": lambda o, y: float(model.get_parameter("one.weight").norm())}}


def average(model: nn.Module) -> Given:
    """Of weights, as torch's documentation has it for a loop."""
    kept = AveragedModel(model)

    def optimizer(named: Any) -> torch.optim.Optimizer:
        made = sgd(named)
        made.register_step_post_hook(lambda *_: kept.update_parameters(model))
        return made

    return {"optimizer": optimizer}


def clamped(model: nn.Module) -> Given:
    def clamp() -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-0.01, 0.01)

    def optimizer(named: Any) -> torch.optim.Optimizer:
        made = sgd(named)
        made.register_step_post_hook(lambda *_: clamp())
        return made

    return {"optimizer": optimizer}


def of_another(model: nn.Module) -> Given:
    other = StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 1)
    return {"lr_scheduler": lambda _: other}


WRONG: dict[str, tuple[Callable[[nn.Module], Given], str]] = {
    "a penalty": (penalty, r"loss_fn reads 'scale' of the model that the trainer was given.*weight_decay"),
    "a factor": (detached, r"loss_fn reads 'scale' of the model"),
    "a layer of its own": (head, r"loss_fn computes with a parameter of shape \[4, 4\].*requires_grad_\(False\)"),
    "a metric": (metric, r"A metric reads 'one\.weight' of the model"),
    "an average": (average, r"optimizer: the step of SGD reads 'scale'.*self\.state\[parameter\]"),
    "a limit": (clamped, r"optimizer: the step of SGD reads 'scale'"),
    "a scheduler": (of_another, r"lr_scheduler makes StepLR for another optimizer"),
}


@pytest.mark.parametrize("name", WRONG)
def test_reading_weights_that_stages_do_not_train_is_refused(name: str, tmp_path: Path) -> None:
    given, words = WRONG[name]
    model = Net()
    before = {name: x.detach().clone() for name, x in model.state_dict().items()}
    with pytest.raises(RaypipeError, match=words):
        trainer(tmp_path, model, given(model)).plan()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def sizes(model: nn.Module) -> Given:
    """Of the model, and a buffer that nothing changes."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        count = sum(p.numel() for p in model.parameters())
        return functional.cross_entropy(output, target, model.get_buffer("weights"), reduction="sum") / count

    return {"loss_fn": loss}


def teacher(_: nn.Module) -> Given:
    """One that learns nothing, and one that is called without gradients."""
    frozen, still = nn.Linear(4, 4).requires_grad_(requires_grad=False), nn.Linear(4, 4)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            factor = torch.sigmoid(still.weight.mean())
        return functional.cross_entropy(frozen(output), target) * factor

    return {"loss_fn": loss}


def returned(model: Net) -> Given:
    model.returns_scale = True
    return {"loss_fn": lambda both, y: functional.cross_entropy(both[0] * both[1], y)}


def limited(_: nn.Module) -> Given:
    """What a stage trains, after every step; and schedulers of schedulers."""

    def optimizer(named: Any) -> torch.optim.Optimizer:
        made = sgd(named)
        made.register_step_post_hook(lambda own, *_: [p.data.clamp_(-9, 9) for p in parameters_of(own)])
        return made

    return {"optimizer": optimizer, "lr_scheduler": lambda o: ChainedScheduler([StepLR(o, 1)])}


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


@pytest.mark.parametrize("given", [sizes, teacher, returned, limited])
def test_reading_anything_else_is_not(given: Callable[[Any], Given], tmp_path: Path) -> None:
    model = Net()
    trainer(tmp_path, model, given(model)).plan()
