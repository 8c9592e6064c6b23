"""Corners of a run that were once wrong: frozen stages, odd outputs, odd optimizers, names, and sums."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.engine.capture import capture
from raypipe.errors import CaptureError
from raypipe.testing import reference
from tests import nets

X, Y = torch.randn(16, 6), torch.randint(0, 3, (16,))
SETTINGS = PipelineConfig(num_stages=3, minibatch_size=8, num_microbatches=4)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


def linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def fit(model: nn.Module, folder: Path, num_steps: int = 4, **options: Any) -> Any:
    chosen = {"loss_fn": functional.cross_entropy, "optimizer": sgd, "train_data": TensorDataset(X, Y)}
    chosen |= {"pipeline": SETTINGS, "run_config": SimpleNamespace(name="run", storage_path=str(folder))}
    return PipelineTrainer(model, **chosen | options).fit(num_steps=num_steps, local=True, progress=False)


def test_frozen_stages_keep_no_activations(tmp_path: Path) -> None:
    result = fit(nets.frozen(linears(), "0", "2"), tmp_path, num_steps=6)
    assert max(record.peak_in_flight for record in result.records) <= 4


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


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 6), nn.InstanceNorm1d(2, track_running_stats=True), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x).view(-1, 2, 3)).view(-1, 6))


def test_statistics_of_instance_norm_are_updated_where_evaluation_reads_them(tmp_path: Path) -> None:
    settings = PipelineConfig(partitioner=["b"], minibatch_size=8, num_microbatches=4)
    model = Normed()
    result = fit(model, tmp_path, pipeline=settings, eval_data=TensorDataset(X, Y))
    trained = Normed()
    trained.load_state_dict(load_state_dict(result.checkpoint))
    with torch.no_grad():
        expected = functional.cross_entropy(trained.eval()(X), Y)
    assert result.metrics["eval_loss"] == pytest.approx(float(expected), rel=1e-5)
    assert not torch.equal(trained.norm.running_mean, model.norm.running_mean)  # type: ignore[arg-type]


def test_a_run_of_the_same_name_is_the_one_that_is_loaded(tmp_path: Path) -> None:
    fit(linears(), tmp_path, num_steps=5)
    second = fit(linears(), tmp_path, num_steps=7)
    newest, named = load_state_dict(second.path), load_state_dict(second.checkpoint)
    assert all(torch.equal(newest[name], named[name]) for name in named)


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
    model, make = linears(), lambda named: Assigning(named, lr=0.1)
    plain = reference(
        model, optimizer=make, train_data=TensorDataset(X, Y), loss_fn=functional.cross_entropy, pipeline=SETTINGS,
        num_steps=4,
    )  # fmt: skip
    assert [record.loss for record in fit(model, tmp_path, optimizer=make).records] == list(plain.losses)


def test_what_the_optimizer_leaves_out_has_one_gradient_a_step_in_the_reference_too(tmp_path: Path) -> None:
    """It is part of the norm that is clipped."""
    model, make = linears(), lambda named: torch.optim.SGD([p for _, p in named if p.dim() > 1], lr=0.1)
    settings = dataclasses.replace(SETTINGS, max_grad_norm=0.3)
    plain = reference(
        model, optimizer=make, train_data=TensorDataset(X, Y), loss_fn=functional.cross_entropy, pipeline=settings,
        num_steps=4,
    )  # fmt: skip
    found = fit(model, tmp_path, optimizer=make, pipeline=settings)
    assert [record.grad_norm for record in found.records] == list(plain.grad_norms)
    assert [record.loss for record in found.records] == list(plain.losses)


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

    model, settings = WithScale(), PipelineConfig(num_stages=2, minibatch_size=8, num_microbatches=2)
    result = fit(model, tmp_path, loss_fn=loss_fn, pipeline=settings)
    data = TensorDataset(X, Y)
    plain = reference(model, optimizer=sgd, train_data=data, loss_fn=loss_fn, pipeline=settings, num_steps=4)
    trained = load_state_dict(result.checkpoint)
    assert all(torch.equal(trained[name], parameter) for name, parameter in plain.parameters.items())
    assert not torch.equal(trained["scale"], model.scale)


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
    trainer = PipelineTrainer(
        layers, loss_fn=functional.cross_entropy, optimizer=sgd, train_data=TensorDataset(X, Y),
        pipeline=PipelineConfig(num_stages=2, minibatch_size=8, num_microbatches=2),
    )  # fmt: skip
    (note,) = [note for note in trainer.plan().notes if "not persistent" in note]
    assert "forwards change the buffer '1.average', which is not persistent" in note


def test_every_name_of_a_shared_parameter_is_in_the_checkpoint(tmp_path: Path) -> None:
    model = linears()
    model[2].weight = model[0].weight
    result = fit(model, tmp_path)
    model.load_state_dict(load_state_dict(result.checkpoint))  # strict: all names, no others


def test_sums_are_added_up_in_evaluation(tmp_path: Path) -> None:
    losses = []
    for minibatch in (8, 5):
        settings = PipelineConfig(num_stages=2, minibatch_size=minibatch, loss_reduction="sum")
        result = fit(
            linears().requires_grad_(True), tmp_path / str(minibatch), num_steps=1, pipeline=settings,
            eval_data=TensorDataset(X, Y),
            optimizer=lambda named: torch.optim.SGD(named, lr=0.0), loss_fn=nn.CrossEntropyLoss(reduction="sum"),
        )  # fmt: skip
        trained = linears()
        trained.load_state_dict(load_state_dict(result.checkpoint))
        losses.append((result.metrics["eval_loss"], functional.cross_entropy(trained(X), Y, reduction="sum").item()))
    for found, expected in losses:
        assert found == pytest.approx(expected, rel=1e-5)
