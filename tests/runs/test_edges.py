"""Unusual models and optimizers: changes in place, other outputs, assigned buffers, what an optimizer leaves out."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.capture import capture
from raypipe.errors import CaptureError
from raypipe.testing import reference
from tests.exactness import same_bits
from tests.trainers import sgd, trainer_of

X, Y = torch.randn(16, 6), torch.randint(0, 3, (16,))
SETTINGS = PipelineConfig(num_stages=3, minibatch_size=8, num_microbatches=4)


def linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def fit(model: nn.Module, folder: Path, num_steps: int = 4, **options: Any) -> Any:
    chosen = {"loss_fn": functional.cross_entropy, "optimizer": sgd, "train_data": TensorDataset(X, Y)}
    chosen |= {"pipeline": SETTINGS, "run_config": SimpleNamespace(name="run", storage_path=str(folder))}
    return PipelineTrainer(model, **chosen | options).fit(num_steps=num_steps, local=True, progress=False)


def differences(model: nn.Module, folder: Path, **options: Any) -> list[str]:
    """What a run and plain PyTorch do not have in common."""
    usual = {"loss_fn": functional.cross_entropy, "optimizer": sgd, "train_data": TensorDataset(X, Y)}
    plain = reference(model, num_steps=4, **{**usual, "pipeline": SETTINGS, **options})
    result = fit(model, folder, **options)
    found, wanted = load_state_dict(result.checkpoint), {**plain.parameters, **plain.buffers}
    assert found.keys() == wanted.keys()
    told = [("losses", [r.loss for r in result.records], list(plain.losses))]
    told += [("norms", [r.grad_norm for r in result.records], list(plain.grad_norms))]
    unequal = [what for what, ours, theirs in told if ours != theirs]
    return unequal + [name for name in wanted if not same_bits(found[name], wanted[name])]


class QuietChange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        with torch.no_grad():
            h.mul_(2)
        return self.b(h)


def test_a_change_that_autograd_must_not_see_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"in place under torch\.no_grad \(aten\.mul_"):
        capture(QuietChange(), (X[:4], Y[:4]), (0, 1), functional.cross_entropy)


class Interrupting(torch.optim.lr_scheduler.ExponentialLR):
    def step(self, epoch: Any = None) -> None:
        # torch takes a step of its own when it makes one, and planning tries others in the thread that plans.
        if self.last_epoch >= 1 and threading.current_thread() is not threading.main_thread():
            raise KeyboardInterrupt
        super().step(epoch)


def test_an_interruption_stays_one_and_is_written_down(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(linears(), tmp_path, lr_scheduler=lambda optimizer: Interrupting(optimizer, gamma=0.5))
    assert '"fail"' in (tmp_path / "run" / "events.jsonl").read_text()


class Assigning(torch.optim.SGD):
    """As some optimizers of third parties do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


def test_an_optimizer_may_assign_its_parameters(tmp_path: Path) -> None:
    assert differences(linears(), tmp_path, optimizer=lambda named: Assigning(named, lr=0.1)) == []


def test_what_the_optimizer_leaves_out_has_one_gradient_a_step_in_the_reference_too(tmp_path: Path) -> None:
    """It is part of the norm that is clipped."""
    settings = dataclasses.replace(SETTINGS, max_grad_norm=0.3)
    found = differences(
        linears(), tmp_path, optimizer=lambda named: torch.optim.SGD([p for _, p in named if p.dim() > 1], lr=0.1),
        pipeline=settings,
    )  # fmt: skip
    assert found == []


class WithExtras(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"aux": None, "logits": self.b(self.a(x).relu()), "kind": 7}


def test_outputs_that_are_no_tensors_reach_the_loss(tmp_path: Path) -> None:
    def loss_fn(output: dict[str, Any], target: torch.Tensor) -> torch.Tensor:
        assert (output["aux"], output["kind"]) == (None, 7)
        return functional.cross_entropy(output["logits"], target)

    settings = PipelineConfig(num_stages=2, minibatch_size=8, num_microbatches=2)
    assert len(fit(WithExtras(), tmp_path, loss_fn=loss_fn, pipeline=settings).records) > 0


class WithScale(nn.Module):
    """Returns a parameter as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(6, 6), nn.Linear(6, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.b(self.a(x).relu()), self.scale


def test_a_parameter_that_is_returned_learns(tmp_path: Path) -> None:
    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output[0] * output[1], target)

    settings = PipelineConfig(num_stages=2, minibatch_size=8, num_microbatches=2)
    assert differences(WithScale(), tmp_path, loss_fn=loss_fn, pipeline=settings) == []


def test_a_norm_that_is_called_twice_on_a_stage_is_verified(tmp_path: Path) -> None:
    norm = nn.BatchNorm1d(6)
    model = nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 6), norm, nn.Linear(6, 3))
    settings = PipelineConfig(partitioner=["4"], minibatch_size=8, num_microbatches=2, verify="first_step")
    result = fit(model, tmp_path, pipeline=settings, num_steps=1)
    assert int(load_state_dict(result.checkpoint)["1.num_batches_tracked"]) == 4


class Forgetting(nn.Module):
    """An average that is in no state_dict."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.average.lerp_(x.detach().mean(0), 0.1)
        return x - self.average


@pytest.mark.parametrize("traced", [True, False])
def test_a_plan_tells_of_buffers_that_no_checkpoint_keeps(traced: bool) -> None:
    layers: nn.Module = nn.Sequential(nn.Linear(6, 6), Forgetting(), nn.Linear(6, 3))
    if traced:
        layers.register_forward_hook(lambda *_: None)
    trainer = trainer_of(layers, train_data=TensorDataset(X, Y), partitioner="auto")
    (note,) = [note for note in trainer.plan().notes if "not persistent" in note]
    assert "forwards change the buffer '1.average', which is not persistent" in note


def test_every_name_of_a_shared_parameter_is_in_the_checkpoint(tmp_path: Path) -> None:
    model = linears()
    model[2].weight = model[0].weight
    result = fit(model, tmp_path)
    model.load_state_dict(load_state_dict(result.checkpoint))  # strict: all names, no others


Step = Callable[["Net", torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Does something with its buffers before the second of four layers."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.step = nn.Linear(6, 8), nn.Linear(8, 3), step
        self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.step(self, self.first(x))
        for layer in self.inner:
            x = torch.tanh(layer(x))
        return self.last(x)


def counts(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.steps += 1
    return x


def averages_without_gradients(net: Net, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        net.mean = 0.9 * net.mean + 0.1 * x.mean(0)
    return x


def multiplies_before(net: Net, x: torch.Tensor) -> torch.Tensor:
    """The backward needs the old one."""
    x = x * net.mean
    net.mean = 0.9 * net.mean + 0.1 * x.detach().mean(0)
    return x


def changes_later(net: Net, x: torch.Tensor) -> torch.Tensor:
    new = 0.9 * net.mean
    net.mean = new
    x = torch.tanh(x)
    new.add_(x.detach().mean(0), alpha=0.1)
    return x


@pytest.mark.parametrize(
    "step", [counts, averages_without_gradients, multiplies_before, changes_later], ids=lambda step: step.__name__
)
def test_what_forward_assigns_is_written_and_the_model_is_cut_behind_it(step: Step, tmp_path: Path) -> None:
    pipeline = dataclasses.replace(SETTINGS, partitioner="parameters")
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    assert differences(Net(step), tmp_path, pipeline=pipeline, optimizer=optimizer) == []
