"""Trials of optimizers: refused if stages step otherwise than one optimizer of the whole model, or after a load."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import TensorDataset

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.errors import ConfigError, StageError
from raypipe.preflight.optimizer import try_optimizers
from raypipe.testing import reference
from tests.exactness import captured, programs
from tests.models import CASES

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("captures_of_a_test")]

Named = list[tuple[str, nn.Parameter]]
CONFIG = PipelineConfig(num_stages=2, minibatch_size=8, num_microbatches=2, partitioner="parameters")
WARM_UPS: list[Callable[[Any], Any]] = [
    lambda o: schedulers.LambdaLR(o, lambda step: min(1.0, step / 1000)),
    lambda o: schedulers.LinearLR(o, 1e-6, total_iters=500),
    lambda o: schedulers.LambdaLR(o, lambda step: float(step > 500)),
]
SGD = partial(torch.optim.SGD, lr=0.1)


def tried(
    optimizer: Callable[[Any], Any], scheduler: Any = None, model: str = "mlp", *, replicated: bool = False
) -> bool:
    parameters = captured(model)[1].parameters
    return try_optimizers(programs(model, 2), parameters, optimizer, scheduler, replicated=replicated)


def settings(optimizer: Any, scheduler: Any = None, **fields: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 3)),
        "loss_fn": functional.cross_entropy, "optimizer": optimizer, "lr_scheduler": scheduler,
        "train_data": TensorDataset(torch.randn(16, 6), torch.arange(16) % 3),
        "pipeline": dataclasses.replace(CONFIG, **fields),
    }  # fmt: skip


def trainer(folder: Path | None, optimizer: Any, scheduler: Any = None, **fields: Any) -> PipelineTrainer:
    run = SimpleNamespace(name="run", storage_path=folder and str(folder))
    return PipelineTrainer(**settings(optimizer, scheduler, **fields), run_config=run)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


# Optimizers whose step on parts of the model differs from its step on the whole.


def by_position(named: Named) -> torch.optim.Optimizer:
    """Layer-wise rates, as they are often written."""
    return SGD([{"params": [p], "lr": 0.1 * 0.5**at} for at, (_, p) in enumerate(named)])


def by_number(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1 / len(named))


def clipping(named: Named) -> torch.optim.Optimizer:
    """Clip the norm of all parameters that it was called with, which are those of a stage."""
    optimizer = SGD(named)
    parameters = [p for _, p in named]
    optimizer.register_step_pre_hook(lambda *_: (nn.utils.clip_grad_norm_(parameters, 1.0), None)[1])
    return optimizer


class Dividing(torch.optim.SGD):
    """Divide by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        norm = nn.utils.get_total_norm([p.grad for p in parameters_of(self) if p.grad is not None])
        for parameter in parameters_of(self):
            parameter.grad = parameter.grad / norm  # type: ignore[operator]
        return super().step(closure)


class Estimating(torch.optim.SGD):
    """Keep a number of all parameters in the groups, as Prodigy and D-Adaptation do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["d"] = group.get("d", 1e-6) + sum(float(p.grad.abs().sum()) for p in group["params"])
        return super().step(closure)


def by_python(named: Named) -> torch.optim.Optimizer:
    optimizer = SGD(named)
    optimizer.register_step_post_hook(lambda *_: named[0][1].data.mul_(random.random()))
    return optimizer


# Optimizers that differ after a load.


class Warming(torch.optim.SGD):
    """Count steps outside of the state."""

    done = 0

    def step(self, closure: Any = None) -> Any:
        self.done += 1
        for group in self.param_groups:
            group["lr"] = 0.01 * self.done
        return super().step(closure)


class LookingAhead(torch.optim.SGD):
    """Return half of the way at every few steps, which are counted outside of the state."""

    done, every = 0, 10

    def step(self, closure: Any = None) -> Any:
        self.done += 1
        for parameter in parameters_of(self):
            slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
            if self.done % self.every == 0:
                parameter.data.copy_(slow.lerp_(parameter.detach(), 0.5))
        return super().step(closure)


class Noisy(torch.optim.SGD):
    """Langevin dynamics: each step adds random numbers."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for parameter in parameters_of(self):
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        return super().step(closure)


class Remembering(Noisy):
    """Keep a momentum outside of the state."""

    def __init__(self, named: Named) -> None:
        super().__init__(named, lr=0.1)
        self.speed: dict[nn.Parameter, torch.Tensor] = {}

    def step(self, closure: Any = None) -> Any:
        for parameter in parameters_of(self):
            speed = self.speed.setdefault(parameter, torch.zeros_like(parameter))
            parameter.grad = speed.mul_(0.9).add_(parameter.grad).clone()  # type: ignore[arg-type]
        return super().step(closure)


class NoisyNorm(Noisy):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(parameters_of(self), 1.0)
        return super().step(closure)


noisy = partial(Noisy, lr=0.1)
NORM = r"the step of \w+ moves 'layers\.0\.weight' on stage 0 otherwise than .*max_grad_norm=.* num_stages=1"
RELOADED = r"^optimizer: \w+ moves .* otherwise after its state_dict\(\) was loaded .* self\.state"


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (by_position, r"gives 'layers\.2\.weight' lr=0\.1 on stage 1, and lr=0\.00625 when it is made of all"),
        (by_number, r"gives 'layers\.0\.weight' lr=0\.0\d+ on stage 0, and lr=0\.0125 .*let a parameter's name, shape"),
        (partial(Estimating, lr=0.1), r"gives 'layers\.0\.\w+' d=\d+.* on stage 0.*torch\.optim\.AdamW.*num_stages=1"),
        (clipping, NORM),
        (partial(NoisyNorm, lr=0.1), NORM),
        (by_python, r"the step of SGD moves .* otherwise than .* Python's random numbers"),
        (partial(Warming, lr=0.1), RELOADED),
        (partial(LookingAhead, lr=0.1), RELOADED),
        (Remembering, RELOADED),
    ],
)
def test_steps_that_differ_in_stages_or_after_a_load_are_refused(optimizer: Any, words: str) -> None:
    for scheduler in (None, WARM_UPS[2]):  # also while its rate is still 0
        with pytest.raises(ConfigError, match=words):
            tried(optimizer, scheduler)


@pytest.mark.parametrize("warm_up", [*WARM_UPS, None])
@pytest.mark.parametrize("type_", [torch.float32, torch.bfloat16])
def test_norms_show_at_small_rates(type_: torch.dtype, warm_up: Callable[[Any], Any] | None) -> None:
    """Parameters in 16 bits would not move at all."""
    parameters = {n: nn.Parameter(p.detach().to(type_)) for n, p in captured("mlp")[1].parameters.items()}
    with pytest.raises(ConfigError, match="moves 'layers"):
        try_optimizers(programs("mlp", 2), parameters, partial(Dividing, lr=1e-5), warm_up)


class Counting(torch.optim.SGD):
    """Count steps in an option of the group; the attribute follows from it."""

    now = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = self.now = group.get("steps", 0) + 1
        return super().step(closure)


def by_name(named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [p], "weight_decay": 0.1 * ("weight" in name)} for name, p in named], lr=0.1)


def bounding(named: Named) -> torch.optim.Optimizer:
    optimizer = SGD(named)
    parameters = [p for _, p in named]
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(parameters, 1.0))
    return optimizer


@pytest.mark.parametrize("optimizer", [by_name, bounding, noisy, partial(Counting, lr=0.1)])
def test_steps_of_each_parameter_alone_are_accepted(optimizer: Callable[[Any], Any]) -> None:
    before = torch.get_rng_state()
    assert tried(optimizer, lambda o: schedulers.ExponentialLR(o, 0.5)) is (optimizer is noisy)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("warm_up", WARM_UPS)
@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        partial(torch.optim.SGD, momentum=0.9, foreach=True),
        partial(torch.optim.AdamW, fused=True),
        partial(torch.optim.Adam, amsgrad=True),
        lambda named: torch.optim.AdamW(named, lr=torch.tensor(1e-3)),
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adafactor,
        torch.optim.Rprop,
        torch.optim.ASGD,
    ],
)
def test_optimizers_of_torch_are_accepted(optimizer: Callable[..., Any], warm_up: Callable[[Any], Any]) -> None:
    assert not tried(optimizer, warm_up)


@pytest.mark.parametrize("warm_up", WARM_UPS)
def test_a_rate_that_is_one_tensor_is_not_changed(warm_up: Callable[[Any], Any]) -> None:
    rate = torch.tensor(1e-3)
    assert not tried(partial(torch.optim.AdamW, lr=rate), warm_up)
    assert rate == torch.tensor(1e-3)


# Schedulers.


def by_norm(optimizer: torch.optim.Optimizer) -> Any:
    held = optimizer.param_groups[0]["params"]
    return schedulers.LambdaLR(optimizer, lambda step: float(1 / (1 + sum(p.detach().norm() for p in held))))


@pytest.mark.parametrize(
    "scheduler",
    [
        by_norm,
        lambda o: schedulers.LambdaLR(o, lambda _: random.random()),
        lambda o: schedulers.LambdaLR(o, lambda _: float(torch.rand(()))),
    ],
)
def test_rates_that_differ_between_stages_are_refused(scheduler: Callable[[Any], Any]) -> None:
    words = r"^lr_scheduler: LambdaLR sets lr=0\.\d+ for 'layers\.0\.weight' on stage 0, and lr=.*number of steps alone"
    with pytest.raises(ConfigError, match=words):
        tried(SGD, scheduler)
    with pytest.raises(ConfigError, match=r"^optimizer: the step of SGD "):
        tried(clipping, scheduler)


def test_a_scheduler_that_ends_before_the_run_is_named_at_its_step(tmp_path: Path) -> None:
    made = trainer(tmp_path, SGD, lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=2), checkpoint_interval_steps=1)
    with pytest.raises(StageError, match=r"lr_scheduler: step 3 of OneCycleLR fails.*Tried to step 3.*newest check"):
        made.fit(num_steps=5, local=True, progress=False)
    assert list((tmp_path / "run/checkpoints").glob("step_*/manifest.json"))


# Random steps.


def trained(folder: Path, num_steps: int = 4) -> dict[str, torch.Tensor]:
    case = CASES["mlp"]
    made = PipelineTrainer(
        captured("mlp")[0], loss_fn=case.loss_fn, optimizer=noisy, train_data=case.data(12),
        pipeline=dataclasses.replace(CONFIG, minibatch_size=6),
        run_config=SimpleNamespace(name="noisy", storage_path=str(folder)),
    )  # fmt: skip
    assert any("steps of the optimizer draw random numbers" in note for note in made.plan().notes)
    return load_state_dict(made.fit(num_steps=num_steps, local=True, progress=False).checkpoint)


def test_random_steps_repeat(tmp_path: Path) -> None:
    """Draw the same in another run, in a run that resumes, and at any state of the process's own generator."""
    once = trained(tmp_path / "once")
    trained(tmp_path / "parts", num_steps=2)
    torch.rand(5)
    for again in (trained(tmp_path / "again"), trained(tmp_path / "parts")):
        assert all(torch.equal(tensor, again[name]) for name, tensor in once.items())


def test_copies_of_a_parameter_must_not_draw() -> None:
    with pytest.raises(ConfigError, match=r"draws random numbers, and every stage has replicas.*num_replicas=1"):
        tried(noisy, replicated=True)
    with pytest.raises(ConfigError, match=r"draws random numbers, and 'embed\.weight' is held by stages \[0, 1\]"):
        tried(noisy, model="tied-lm")


# State that checkpoints cannot hold.


class Keeping(torch.optim.SGD):
    """Keep for each parameter what a function makes."""

    def __init__(self, named: Named, make: Callable[[torch.Tensor], Any], **options: Any) -> None:
        super().__init__(named, lr=0.1)
        self.make = make
        for group in self.param_groups:
            group.update(options)

    def step(self, closure: Any = None) -> Any:
        for parameter in parameters_of(self):
            self.state[parameter].setdefault("kept", self.make(parameter))
        return super().step(closure)


class Chained(torch.optim.Optimizer):
    """Two optimizers, each with a part of the state."""

    def __init__(self, named: Named) -> None:
        self.both = [torch.optim.SGD([p], lr=0.1, momentum=0.9) for _, p in named]
        super().__init__([group for one in self.both for group in one.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        groups = iter(self.param_groups)
        for one in self.both:
            one.state, one.param_groups = self.state, [next(groups) for _ in one.param_groups]
            one.step()


class Apart(Chained):
    """Two optimizers that keep their own state, as chained Muon and AdamW."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.both:
            one.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(number): one.state_dict() for number, one in enumerate(self.both)}


class Renamed(torch.optim.SGD):
    """A state_dict of another form, of which no optimizer inside gives the reason."""

    def state_dict(self) -> dict[str, Any]:
        return {"fast": super().state_dict()}


class Free(torch.optim.SGD):
    """Schedule-free training."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (partial(Renamed, lr=0.1), r"Renamed.state_dict\(\) has the keys 'fast' instead of 'state' and 'param_groups'"),
        (partial(Keeping, make=lambda p: [torch.eye(d) for d in p.shape]), "keeps a list under 'kept'"),
        (partial(Keeping, make=lambda p: {"inner": p.detach()}), "is a dict, which a checkpoint cannot hold"),
        (partial(Keeping, make=lambda p: p.detach().to_sparse()), "a checkpoint holds dense tensors"),
        (partial(Keeping, make=torch.zeros_like, function=torch.relu), "option 'function' of Keeping is"),
        (partial(Free, lr=0.1), r"Free, which has other weights for evaluation.*AdamW"),
        (torch.optim.LBFGS, r"step of LBFGS fails.*argument: 'closure'.*or a loss that it computes again"),
    ],
)
def test_optimizers_that_no_run_can_hold_are_refused(optimizer: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trainer(None, optimizer).plan()


@pytest.mark.parametrize("optimizer", [Chained, Apart])
def test_chained_optimizers_train_and_resume(optimizer: Any, tmp_path: Path) -> None:
    first = trainer(tmp_path, optimizer).fit(num_steps=2, local=True, progress=False)
    again = trainer(tmp_path, optimizer).fit(num_steps=4, local=True, progress=False)
    assert [record.loss for record in again.records] == list(reference(**settings(optimizer), num_steps=4).losses)
    assert again.records[:2] == first.records[:2]


# Adafactor finds its rate itself.


def adafactor(named: Named) -> Any:
    from transformers.optimization import Adafactor

    return Adafactor([p for _, p in named], scale_parameter=True, relative_step=True, warmup_init=True, lr=None)


@pytest.mark.slow
def test_an_optimizer_without_a_rate_trains_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    trainer(tmp_path, adafactor).fit(num_steps=2, local=True, progress=False)
    result = trainer(tmp_path, adafactor).fit(num_steps=4, local=True, progress=False)
    assert [record.lr for record in result.records] == [None] * 4
    plain = reference(**settings(adafactor), num_steps=4)
    assert [record.loss for record in result.records] == list(plain.losses)
    state = load_state_dict(result.checkpoint)
    assert all(torch.equal(state[name], value) for name, value in plain.parameters.items())


def test_schedulers_of_an_optimizer_without_a_rate_are_refused() -> None:
    optimization = pytest.importorskip("transformers.optimization")
    for step_size in (1, 1000):
        with pytest.raises(ConfigError, match=r"param group 0 of Adafactor has lr=None.*Leave lr_scheduler out, or"):
            trainer(None, adafactor, partial(schedulers.StepLR, step_size=step_size)).plan()
    with pytest.raises(ConfigError, match=r"Let rates follow from the number of steps alone, not from parameters"):
        trainer(None, adafactor, optimization.AdafactorSchedule).plan()


# Slices of parameters, as replicas step them under shard_optimizer.


class Whole(torch.optim.SGD):
    """Divide large matrices by their norm."""

    def step(self, closure: Any = None) -> Any:
        for parameter in parameters_of(self):
            assert parameter.grad is not None
            if parameter.dim() == 2 and min(parameter.shape) > 8:
                parameter.grad = parameter.grad / parameter.grad.norm()
        return super().step(closure)


def test_slices_are_tried_at_full_size() -> None:
    trainer(None, partial(Whole, lr=0.1)).plan()
    with pytest.raises(ConfigError, match="shard_optimizer=True is not possible with Whole"):
        trainer(None, partial(Whole, lr=0.1), num_replicas=2, shard_optimizer=True).plan()


def test_muon_beside_adamw_takes_no_slices_of_its_matrices() -> None:
    trainer(None, MuonAndAdamW, num_replicas=2).plan()
    with pytest.raises(ConfigError, match=r"shard_optimizer=True is not possible with MuonAndAdamW.* 2D matrix"):
        trainer(None, MuonAndAdamW, num_replicas=2, shard_optimizer=True).plan()


class MuonAndAdamW:
    """Two optimizers, as docs/checkpoints.md shows them."""

    def __init__(self, named: Any) -> None:
        named = list(named)
        matrices, others = ([p for _, p in named if (p.ndim == 2) is wanted] for wanted in (True, False))
        self.both = [torch.optim.Muon(matrices, lr=0.02)] * bool(matrices) + [torch.optim.AdamW(others)] * bool(others)

    def step(self) -> None:
        for one in self.both:
            one.step()
