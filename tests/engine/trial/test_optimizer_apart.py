"""Optimizers that would train otherwise in stages than in one piece, or otherwise after a resume, are refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.engine.trial.optimizer_trial import try_optimizers
from raypipe.errors import ConfigError
from tests.exactness import captured, programs
from tests.models import CASES

pytestmark = pytest.mark.engine


def tried(
    optimizer: Callable[[Any], Any], scheduler: Any = None, model: str = "mlp", *, replicated: bool = False
) -> bool:
    parameters = captured(model)[1].parameters
    return try_optimizers(programs(model, 2), parameters, optimizer, scheduler, replicated=replicated)


def by_position(named: Any) -> torch.optim.Optimizer:
    """Layer-wise rates, as they are often written."""
    return torch.optim.SGD([{"params": [p], "lr": 0.1 * 0.5**at} for at, (_, p) in enumerate(named)], lr=0.1)


def by_name(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [p], "weight_decay": 0.1 * ("weight" in name)} for name, p in named], lr=0.1)


def by_number(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1 / len(named))


def clipping(named: Any) -> torch.optim.Optimizer:
    """By the norm of what it was called with, which is that of a stage."""
    made = torch.optim.SGD(named, lr=0.1)
    parameters = [p for _, p in named]

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)

    made.register_step_pre_hook(clip)
    return made


def bounding(named: Any) -> torch.optim.Optimizer:
    """Each number by itself."""
    made = torch.optim.SGD(named, lr=0.1)
    parameters = [p for _, p in named]

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_value_(parameters, 1.0)

    made.register_step_pre_hook(clip)
    return made


class Warming(torch.optim.SGD):
    """Counts its steps where no checkpoint looks."""

    done = 0

    def step(self, closure: Any = None) -> Any:
        self.done += 1
        for group in self.param_groups:
            group["lr"] = 0.01 * self.done
        return super().step(closure)


class LookingAhead(torch.optim.SGD):
    """Goes back half of the way at every tenth step, which it counts where no checkpoint looks."""

    done = 0

    def step(self, closure: Any = None) -> Any:
        self.done += 1
        for parameter in (p for group in self.param_groups for p in group["params"]):
            slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
            if self.done % 10 == 0:
                parameter.data.copy_(slow.lerp_(parameter.detach(), 0.5))
        return super().step(closure)


def shrinking(named: Any) -> torch.optim.Optimizer:
    """At every tenth step, by a hook."""
    made, calls = torch.optim.SGD(named, lr=0.1), [0]

    def shrink(*_: Any) -> None:
        calls[0] += 1
        for _, parameter in named if calls[0] % 10 == 0 else ():
            parameter.data.mul_(0.5)

    made.register_step_post_hook(shrink)
    return made


class Counting(torch.optim.SGD):
    """As it should be: in an option of the group; what is an attribute follows from it."""

    now = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = self.now = group.get("steps", 0) + 1
        return super().step(closure)


def counting(named: Any) -> torch.optim.Optimizer:
    return Counting(named, lr=0.1)


class Noisy(torch.optim.SGD):
    """Langevin's: each step adds a drawn number."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        return super().step(closure)


def noisy(named: Any) -> torch.optim.Optimizer:
    return Noisy(named, lr=0.1)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (by_position, r"gives 'layers\.2\.weight' lr=0\.1 on stage 1, and lr=0\.00625 where it is called with all"),
        (by_number, r"gives 'layers\.0\.weight' lr=0\.0\d+ on stage 0, and lr=0\.0125 where .*let names and shapes"),
        (clipping, r"the step of SGD moves 'layers\.0\.weight' on stage 0 otherwise .*max_grad_norm=.* num_stages=1"),
        (lambda named: Warming(named, lr=0.1), r"Warming steps .* after its state_dict\(\) was loaded .* self\.state"),
        (
            lambda named: LookingAhead(named, lr=0.1),
            r"LookingAhead counts on in self\.done, which is 3 after 3 steps, and 1 ",
        ),
        (
            shrinking,
            r"SGD counts on in shrinking\.<locals>\.shrink:calls\[0\], which is 3 after 3 steps.*group\['steps'\]",
        ),
    ],
)
def test_what_stages_would_do_otherwise_is_refused(optimizer: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tried(optimizer)


@pytest.mark.parametrize("optimizer", [by_name, bounding, noisy, counting], ids=lambda made: made.__name__)
def test_what_decides_for_each_parameter_alone_is_taken(optimizer: Callable[[Any], Any]) -> None:
    before = torch.get_rng_state()
    assert tried(optimizer, lambda made: schedulers.ExponentialLR(made, 0.5)) is (optimizer is noisy)
    assert torch.equal(before, torch.get_rng_state())


def test_draws_that_nothing_keys_are_refused() -> None:
    def by_python(named: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(named, lr=0.1)
        made.register_step_post_hook(lambda *_: named[0][1].data.mul_(random.random()))
        return made

    with pytest.raises(ConfigError, match=r"the step of SGD draws from Python's or numpy's generator"):
        tried(by_python)


def trained(folder: Path, num_steps: int = 4) -> dict[str, torch.Tensor]:
    case = CASES["mlp"]
    trainer = PipelineTrainer(
        captured("mlp")[0], loss_fn=case.loss_fn, optimizer=noisy, train_data=case.data(12),
        pipeline=PipelineConfig(num_stages=2, minibatch_size=6, num_microbatches=2, partitioner="parameters"),
        run_config=SimpleNamespace(name="noisy", storage_path=str(folder)),
    )  # fmt: skip
    assert any("steps of the optimizer draw random numbers" in note for note in trainer.plan().notes)
    return load_state_dict(trainer.fit(num_steps=num_steps, local=True, progress=False).checkpoint)


def test_an_optimizer_that_draws_draws_the_same_again(tmp_path: Path) -> None:
    """In another run, in one that goes on, and wherever the process's own generator stands."""
    once = trained(tmp_path / "once")
    trained(tmp_path / "parts", num_steps=2)
    torch.rand(5)
    for again in (trained(tmp_path / "again"), trained(tmp_path / "parts")):
        assert all(torch.equal(tensor, again[name]) for name, tensor in once.items())


@pytest.mark.parametrize("rate", [lambda _: random.random(), lambda _: float(torch.rand(()))])
def test_a_rate_that_is_drawn_is_refused(rate: Callable[[int], float]) -> None:
    with pytest.raises(ConfigError, match=r"the step of LambdaLR draws random numbers: every stage would draw others"):
        tried(by_name, lambda made: schedulers.LambdaLR(made, rate))


def test_copies_of_a_parameter_must_not_draw() -> None:
    with pytest.raises(ConfigError, match=r"Noisy draws random numbers, and every stage has replicas.*num_replicas=1"):
        tried(noisy, replicated=True)
    with pytest.raises(
        ConfigError, match=r"Noisy draws random numbers, and 'embed\.weight' is held by stages \[0, 1\]"
    ):
        tried(noisy, model="tied-lm")
