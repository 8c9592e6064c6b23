"""Unusual models and optimizers: frozen stages, other outputs, assigned buffers, draws, recurrent networks."""

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
from raypipe.engine.stage.randomness import num_draws
from raypipe.errors import CaptureError
from raypipe.testing import reference
from tests import nets
from tests.exactness import captured, same_bits
from tests.models import vectors
from tests.operations import as_in_plain_pytorch

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


STEPS = 3


class Dropping(nn.Module):
    """Layers that are left out with a probability, or kept with one, as written in Hugging Face's models."""

    def __init__(self, dropped: float, *, kept: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.last, self.dropped, self.kept = nn.Linear(6, 3), dropped, kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training:
                drawn = torch.rand([])
                if drawn < self.dropped:
                    continue
                if self.kept and not drawn >= self.dropped:
                    continue
            x = functional.dropout(torch.relu(layer(x)), 0.2, self.training)
        return self.last(x)


def given(dropped: float, *, kept: bool = False) -> dict[str, object]:
    torch.manual_seed(3)
    return {
        "model": Dropping(dropped, kept=kept), "loss_fn": functional.cross_entropy,
        "optimizer": partial(torch.optim.SGD, lr=0.1), "train_data": vectors(40),
        "pipeline": PipelineConfig(num_stages=2, minibatch_size=8, num_microbatches=4, partitioner="parameters",
                                   loss_reduction="mean"),
    }  # fmt: skip


@pytest.mark.parametrize(("dropped", "kept"), [(0.0, False), (0.0, True), (0, False), (1.0, False)])
def test_the_bits_of_plain_pytorch(dropped: float, *, kept: bool, tmp_path: Path) -> None:
    asked = given(dropped, kept=kept)
    place = SimpleNamespace(name="run", storage_path=str(tmp_path))
    if dropped == 1.0:  # every layer, and with it all that could be a first stage
        asked["pipeline"] = PipelineConfig(num_stages=1, minibatch_size=8, num_microbatches=4, loss_reduction="mean")
    result = PipelineTrainer(**asked, run_config=place).fit(STEPS, local=True, progress=False)  # type: ignore[arg-type]
    plain = reference(**given(dropped, kept=kept), num_steps=STEPS)  # type: ignore[arg-type]
    assert [record.loss for record in result.records] == list(plain.losses)
    trained = load_state_dict(str(tmp_path / "run"))
    assert all(same_bits(trained[name], x) for name, x in plain.parameters.items())


def test_a_branch_that_may_go_either_way_is_refused(tmp_path: Path) -> None:
    place = SimpleNamespace(name="run", storage_path=str(tmp_path))
    with pytest.raises(CaptureError, match="decides by values of its data"):
        PipelineTrainer(**given(0.5), run_config=place).plan()  # type: ignore[arg-type]


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
        self.register_buffer("square", torch.arange(16.0).view(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.step(self, self.first(x))
        for layer in self.inner:
            x = torch.tanh(layer(x))
        return self.last(x)


def counts(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.steps += 1
    return x


def counts_anew(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.steps = net.steps + 1
    return x


def averages(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.mean *= 0.9
    net.mean += 0.1 * x.detach().mean(0)
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


def turns(net: Net, x: torch.Tensor) -> torch.Tensor:
    net.square = net.square.t()
    return x


STEPS_BUFFER_WRITES: list[Step] = [
    counts, counts_anew, averages, averages_without_gradients, multiplies_before, changes_later, turns,
]  # fmt: skip


@pytest.mark.engine
@pytest.mark.parametrize("step", STEPS_BUFFER_WRITES, ids=lambda step: step.__name__)
def test_what_forward_assigns_is_written_and_the_model_is_cut_behind_it(step: Step, tmp_path: Path) -> None:
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 6, generator=drawn), torch.randint(0, 3, (24,), generator=drawn))
    pipeline = PipelineConfig(num_stages=3, minibatch_size=8, num_microbatches=4, partitioner="parameters")
    what = {"loss_fn": functional.cross_entropy, "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}
    wanted = reference(Net(step), **what, train_data=data, pipeline=pipeline, num_steps=6)
    place = SimpleNamespace(name="run", storage_path=str(tmp_path))
    trainer = PipelineTrainer(Net(step), **what, train_data=data, pipeline=pipeline, run_config=place)
    trainer.fit(num_steps=6, local=True, progress=False)
    found = load_state_dict(tmp_path / "run")
    expected = {**wanted.parameters, **wanted.buffers}
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    begun = Net(step).state_dict()
    assert any(not torch.equal(tensor, begun[name]) for name, tensor in wanted.buffers.items()) or step is turns


aten = torch.ops.aten


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "lstm", "lstm-deep", "lstm-both-ways", "lstm-projected", "gru", "gru-deep", "rnn-deep", "recurrent-sequential",
    ],
)  # fmt: skip
def test_recurrent_networks(name: str) -> None:
    # One state before the last step of the last layer is zero in the reverse direction, so nothing learns from it.
    assert as_in_plain_pytorch(name, still=("recurrent.weight_hh_l1_reverse",)) == []


def test_draws_are_counted_by_layers() -> None:
    """And what comes behind has the number behind."""
    graph = captured("lstm-deep")[1].model.train.traced  # type: ignore[union-attr]
    assert graph.num_draws == 3
    assert captured("lstm-deep")[1].model.eval.traced.num_draws == 0  # type: ignore[union-attr]
    x, state, weights = torch.ones(1, 2, 3), [torch.ones(4, 2, 5)] * 2, [torch.ones(1)]
    counted = {
        (layers, dropout, train): num_draws(
            aten.lstm.input, (x, state, weights, True, layers, dropout, train, False, True), {}
        )
        for layers in (1, 4)
        for dropout in (0.0, 0.5, 1.0)
        for train in (True, False)
    }
    assert {case for case, count in counted.items() if count} == {(4, 0.5, True)}
    assert counted[4, 0.5, True] == 3
