"""What a trial of an optimizer could miss: small rates, state that acts late, large matrices, what no file holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import TensorDataset

from raypipe import PipelineConfig, PipelineTrainer
from raypipe.engine.trial.optimizer_trial import try_optimizers
from raypipe.errors import ConfigError
from tests.engine.trial.test_optimizer_apart import Noisy, clipping, noisy, tried
from tests.exactness import captured, programs

pytestmark = pytest.mark.engine

Named = list[tuple[str, nn.Parameter]]
WARM_UPS: list[Callable[[Any], Any]] = [
    lambda o: schedulers.LambdaLR(o, lambda step: min(1.0, step / 1000)),
    lambda o: schedulers.LinearLR(o, 1e-6, total_iters=500),
    lambda o: schedulers.LambdaLR(o, lambda step: float(step > 500)),
]


@pytest.mark.parametrize("warm_up", WARM_UPS)
def test_a_norm_of_a_stage_shows_at_the_beginning_of_a_warm_up_too(warm_up: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigError, match="such as a norm"):
        tried(clipping, warm_up)


class Dividing(torch.optim.SGD):
    """By the norm of all gradients that it has, as Lamb does."""

    def step(self, closure: Any = None) -> Any:
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for parameter in held:
            parameter.grad = parameter.grad / norm
        return super().step(closure)


@pytest.mark.parametrize("warm_up", [*WARM_UPS, None])
@pytest.mark.parametrize("type_", [torch.float32, torch.bfloat16])
def test_a_norm_of_a_stage_shows_at_a_small_rate_too(type_: torch.dtype, warm_up: Callable[[Any], Any] | None) -> None:
    """Numbers of 16 bits would not move at all."""
    parameters = {n: nn.Parameter(p.detach().to(type_)) for n, p in captured("mlp")[1].parameters.items()}
    with pytest.raises(ConfigError, match="such as a norm"):
        try_optimizers(programs("mlp", 2), parameters, partial(Dividing, lr=1e-5), warm_up)


def by_kind(named: Named) -> torch.optim.Optimizer:
    """Weights by a norm of all of them, biases by their own numbers."""

    class Norms(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            weights = [p for p in self.param_groups[0]["params"] if p.grad is not None]
            nn.utils.clip_grad_norm_(weights, 1.0)
            return super().step(closure)

    weights, biases = ([(n, p) for n, p in named if n.endswith(end)] for end in ("weight", "bias"))
    return Norms([{"params": weights}, {"params": biases}], lr=0.1)


def test_a_group_whose_rate_is_still_0_is_tried_without_the_scheduler() -> None:
    """The other one moves, so that there is something to compare at once."""
    assert not tried(partial(torch.optim.SGD, lr=0.1), lambda o: schedulers.LambdaLR(o, lambda step: 1.0))
    later = [lambda step: float(step > 500), lambda step: 1.0]
    with pytest.raises(ConfigError, match="such as a norm"):
        tried(by_kind, lambda o: schedulers.LambdaLR(o, later))


def test_a_scheduler_that_looks_at_parameters_is_named_and_not_the_optimizer() -> None:
    def by_norm(optimizer: torch.optim.Optimizer) -> Any:
        held = optimizer.param_groups[0]["params"]
        return schedulers.LambdaLR(optimizer, lambda step: float(1 / (1 + sum(p.detach().norm() for p in held))))

    said = (
        r"^lr_scheduler: without it .* With it, optimizer gives 'layers\.0\.weight' lr=0\.0\d+ on stage 0, .*model\.$"
    )
    with pytest.raises(ConfigError, match=said):
        tried(partial(torch.optim.SGD, lr=0.1), by_norm)
    with pytest.raises(ConfigError, match=r"^optimizer: the step of SGD "):
        tried(clipping, by_norm)


@pytest.mark.parametrize("warm_up", WARM_UPS)
def test_a_rate_that_is_one_tensor_is_changed_by_one_scheduler_only(warm_up: Callable[[Any], Any]) -> None:
    rate = torch.tensor(1e-3)
    assert not tried(partial(torch.optim.AdamW, lr=rate), warm_up)
    assert rate == torch.tensor(1e-3)


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
def test_optimizers_of_torch_warm_up(optimizer: Callable[..., Any], warm_up: Callable[[Any], Any]) -> None:
    assert not tried(optimizer, warm_up)


class Keeping(torch.optim.SGD):
    """Keeps for each parameter what a function makes."""

    def __init__(self, named: Named, make: Callable[[torch.Tensor], Any], **options: Any) -> None:
        super().__init__(named, lr=0.1)
        self.make = make
        for group in self.param_groups:
            group.update(options)

    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter].setdefault("kept", self.make(parameter))
        return super().step(closure)


class Both:
    """Two optimizers behind one face, as of Muon with Adam."""

    def __init__(self, named: Named) -> None:
        self.matrices = torch.optim.SGD([p for _, p in named if p.dim() > 1], lr=0.1)
        self.others = torch.optim.Adam([p for _, p in named if p.dim() < 2], lr=0.1)

    @property
    def param_groups(self) -> list[Any]:
        return self.matrices.param_groups + self.others.param_groups

    def step(self) -> None:
        self.matrices.step()
        self.others.step()

    def state_dict(self) -> dict[str, Any]:
        return {"matrices": self.matrices.state_dict(), "others": self.others.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.matrices.load_state_dict(state["matrices"])
        self.others.load_state_dict(state["others"])


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (Both, "optimizer: Both.state_dict.. has or lacks 'matrices'"),
        (partial(Keeping, make=lambda p: [torch.eye(d) for d in p.shape]), "keeps a list under 'kept'"),
        (partial(Keeping, make=lambda p: {"inner": p.detach()}), "is a dict, which a checkpoint cannot hold"),
        (partial(Keeping, make=lambda p: p.detach().to_sparse()), "a checkpoint holds dense tensors"),
        (partial(Keeping, make=torch.zeros_like, function=torch.relu), "option 'function' of Keeping is"),
    ],
)
def test_what_no_checkpoint_holds_is_refused_by_the_plan(optimizer: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tried(optimizer)
    trainer = PipelineTrainer(
        nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)), loss_fn=functional.cross_entropy, optimizer=optimizer,
        train_data=TensorDataset(torch.ones(8, 6), torch.zeros(8, dtype=torch.int64)),
        pipeline=PipelineConfig(num_stages=2, minibatch_size=4, num_microbatches=2, partitioner="parameters"),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=words):
        trainer.plan()


class Free(torch.optim.SGD):
    """As of schedule-free training."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def test_other_weights_for_evaluation_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Free, which has other weights for evaluation.*AdamW"):
        tried(partial(Free, lr=0.1))


class Looking(torch.optim.SGD):
    """Goes back at every hundredth step to weights that it keeps where no checkpoint looks; counts where one does."""

    def __init__(self, named: Named) -> None:
        super().__init__(named, lr=0.1)
        self.slow: dict[nn.Parameter, torch.Tensor] = {}

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                slow = self.slow.setdefault(parameter, parameter.detach().clone())
                if group["steps"] % 100 == 0:
                    parameter.data.copy_(slow)
        return super().step(closure)


class Remembering(Noisy):
    """Draws, and keeps a momentum where no checkpoint looks."""

    def __init__(self, named: Named) -> None:
        super().__init__(named, lr=0.1)
        self.speed: dict[nn.Parameter, torch.Tensor] = {}

    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            assert parameter.grad is not None
            speed = self.speed.setdefault(parameter, torch.zeros_like(parameter))
            parameter.grad = speed.mul_(0.9).add_(parameter.grad).clone()
        return super().step(closure)


class Wrapping(torch.optim.SGD):
    """As Looking, but for where it keeps them."""

    def __init__(self, named: Named) -> None:
        super().__init__(named, lr=0.1)
        self.kept = SimpleNamespace(slow={})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                slow = self.kept.slow.setdefault(id(parameter), parameter.detach().clone())
                if group["steps"] % 100 == 0:
                    parameter.data.copy_(slow)
        return super().step(closure)


def hooked(named: Named) -> torch.optim.Optimizer:
    """The same by a hook."""
    made, slow = torch.optim.SGD(named, lr=0.1), {}

    def look(*_: Any) -> None:
        for name, parameter in named:
            slow.setdefault(name, parameter.detach().clone())

    made.register_step_pre_hook(look)
    return made


DONE = [0]


class Global(torch.optim.SGD):
    """Counts for all of the process."""

    def step(self, closure: Any = None) -> Any:
        DONE[0] += 1
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.data.mul_(0.5 if DONE[0] % 100 == 0 else 1.0)
        return super().step(closure)


class Cooling(Noisy):
    """The same number for all."""

    def step(self, closure: Any = None) -> Any:
        scale = torch.rand(())
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.grad = parameter.grad * scale
        return super().step(closure)


def noisy_by_position(named: Named) -> torch.optim.Optimizer:
    return Noisy([{"params": [p], "lr": 0.1 * 0.5**at} for at, (_, p) in enumerate(named)], lr=0.1)


class NoisyNorm(Noisy):
    """Draws, and divides by the norm of what it has."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (Looking, r"keeps tensors in self\.slow"),
        (Wrapping, r"keeps tensors in self\.kept\.slow"),
        (hooked, r"keeps tensors in hooked\.<locals>\.look:slow"),
        (partial(Global, lr=0.1), r"counts on in .*test_optimizer_unseen\.DONE\[0\]"),
        (Remembering, "otherwise after its state_dict"),
        (partial(Cooling, lr=0.1), r"draws? for all of them together"),
        (noisy_by_position, r"lr=0\.1 on stage 1, and lr=0\.00625 where"),
        (partial(NoisyNorm, lr=0.1), "such as a norm"),
        (noisy, ""),
    ],
)
def test_tensors_outside_of_the_state_are_found_in_what_draws_too(optimizer: Any, words: str) -> None:
    if not words:
        assert tried(optimizer)
        return
    with pytest.raises(ConfigError, match=words):
        tried(optimizer)


class Whole(torch.optim.SGD):
    """Divides large matrices by their norm."""

    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            assert parameter.grad is not None
            if parameter.dim() == 2 and min(parameter.shape) > 8:
                parameter.grad = parameter.grad / parameter.grad.norm()
        return super().step(closure)


def test_slices_are_tried_at_full_size_as_well() -> None:
    trainer = PipelineTrainer(
        nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)), loss_fn=functional.cross_entropy,
        optimizer=partial(Whole, lr=0.1),
        train_data=TensorDataset(torch.ones(8, 6), torch.zeros(8, dtype=torch.int64)),
        pipeline=PipelineConfig(
            num_stages=2, minibatch_size=4, num_microbatches=2, partitioner="parameters", num_replicas=2,
            shard_optimizer=True,
        ),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="shard_optimizer=True is not possible with Whole"):
        trainer.plan()
