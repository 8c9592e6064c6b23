"""Optimizers of public code: they step to the parameters of plain PyTorch, also after a run has resumed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.testing import reference

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.usefixtures("captures_of_a_test")]

Named = list[tuple[str, nn.Parameter]]


def parameters_of(named: Named) -> list[nn.Parameter]:
    return [parameter for _, parameter in named]


def halves(named: Named) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    return [p for _, p in named if p.ndim == 2], [p for _, p in named if p.ndim != 2]


class Both(torch.optim.Optimizer):
    """Muon and AdamW in one object, as unsloth's."""

    def __init__(self, named: Named) -> None:
        matrices, others = halves(named)
        self.muon = torch.optim.Muon(matrices, lr=0.02) if matrices else None
        self.adamw = torch.optim.AdamW(others, lr=1e-3) if others else None
        super().__init__([*matrices, *others], {})
        self.param_groups = [group for one in (self.muon, self.adamw) if one for group in one.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in (self.muon, self.adamw):
            if one:
                one.step()

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon and self.muon.state_dict(), "adamw": self.adamw and self.adamw.state_dict()}


class Several:
    """A list of optimizers, as OpenNMT's, which is no optimizer of torch."""

    def __init__(self, named: Named) -> None:
        matrices, others = halves(named)
        self.optimizers = [torch.optim.SGD(matrices, lr=0.1, momentum=0.9)] if matrices else []
        self.optimizers += [torch.optim.Adam(others, lr=1e-2)] if others else []  # type: ignore[list-item]

    def step(self) -> None:
        for one in self.optimizers:
            one.step()


class OnePerParameter:
    """As for a backward that steps every parameter by itself."""

    def __init__(self, named: Named) -> None:
        self.by_name = {name: torch.optim.Adam([p], lr=1e-2) for name, p in named}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self.by_name.values() for group in one.param_groups]

    def step(self) -> None:
        for one in self.by_name.values():
            one.step()

    def state_dict(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in self.by_name.items()}


class Wrapped:
    """One optimizer and its groups, as fairseq's."""

    def __init__(self, named: Named) -> None:
        self._optimizer = torch.optim.Adam(parameters_of(named), lr=1e-2)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def step(self, closure: Any = None, scale: float = 1.0) -> None:
        self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()


class Lion(torch.optim.Optimizer):
    def __init__(self, named: Named, lr: float = 1e-3) -> None:
        super().__init__(parameters_of(named), {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                first, second = group["betas"]
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(state["exp_avg"].mul(first).add_(p.grad, alpha=1 - first).sign_(), alpha=-group["lr"])
                state["exp_avg"].mul_(second).add_(p.grad, alpha=1 - second)


class Buffered(torch.optim.Optimizer):
    """Keeps lists in its groups and writes to them, as the authors' RAdam."""

    def __init__(self, named: Named) -> None:
        super().__init__(parameters_of(named), {"lr": 1e-2, "buffer": [[None, None] for _ in range(3)]})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["step"] = self.state[p].get("step", 0) + 1
                kept = group["buffer"][self.state[p]["step"] % 3]
                if kept[0] != self.state[p]["step"]:
                    kept[0], kept[1] = self.state[p]["step"], 1 / self.state[p]["step"]
                p.data.add_(p.grad.data, alpha=-group["lr"] * kept[1])


class Counting(torch.optim.Adam):
    """Counts in its groups, scales by norms of each tensor (LARS), and keeps an average of it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                p.grad.mul_((p.norm() / (p.grad.norm() + 1e-6)).clamp(max=1.0) / group["k"])
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("ema", p.detach().clone()).lerp_(p, 0.1)


class Lookahead(torch.optim.Optimizer):
    def __init__(self, named: Named, every: int = 2) -> None:
        self.base, self.every = torch.optim.SGD(parameters_of(named), lr=0.1, momentum=0.9), every
        self.param_groups, self.state, self.defaults = self.base.param_groups, self.base.state, self.base.defaults
        for group in self.param_groups:
            group["counter"] = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        for group in self.param_groups:
            group["counter"] += 1
            for p in group["params"] if group["counter"] % self.every == 0 else ():
                slow = self.state[p].setdefault("slow", p.data.clone())
                p.data.copy_(slow.lerp_(p.data, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)
        self.param_groups, self.state = self.base.param_groups, self.base.state


def decay_groups(named: Named) -> Any:
    decayed, others = halves(named)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def named_groups(named: Named) -> Any:
    return torch.optim.AdamW([{"params": [p], "name": n, "lr": 1e-2 / p.ndim, "lr_scale": 1.0} for n, p in named])


def centralized(named: Named) -> Any:
    """Gradient centralization in a hook."""

    def centre(optimizer: Any, *_: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.ndim > 1):
            p.grad.sub_(p.grad.mean(1, keepdim=True))

    optimizer = torch.optim.SGD(parameters_of(named), lr=0.1, momentum=0.9)
    optimizer.register_step_pre_hook(centre)
    return optimizer


def rate_in_a_tensor(named: Named) -> Any:
    return torch.optim.Adam(filter(lambda p: p.requires_grad, parameters_of(named)), lr=torch.tensor(1e-2))


OPTIMIZERS = [
    Both, Several, OnePerParameter, Wrapped, Lion, Buffered, Counting, Lookahead, decay_groups, named_groups,
    centralized, rate_in_a_tensor,
]  # fmt: skip


def falling(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


UNSCHEDULED = [Several, OnePerParameter, Wrapped]
"""Of no class of torch's, so that plain PyTorch has no scheduler for them."""


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one.__name__)
def test_an_optimizer_steps_and_resumes_as_in_plain_pytorch(optimizer: Any, scheduled: bool, tmp_path: Path) -> None:
    if scheduled and optimizer in UNSCHEDULED:
        pytest.skip("plain PyTorch has no scheduler for it")
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "model": nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 8), nn.Linear(8, 3)),
        "loss_fn": cross_entropy, "optimizer": optimizer, "lr_scheduler": falling if scheduled else None,
        "train_data": TensorDataset(torch.randn(16, 6), torch.arange(16) % 3),
        "pipeline": PipelineConfig(num_stages=2, minibatch_size=8, num_microbatches=2, partitioner="parameters"),
    }  # fmt: skip
    run = partial(PipelineTrainer, run_config=SimpleNamespace(name="run", storage_path=str(tmp_path)), **settings)
    run().fit(num_steps=2, local=True, progress=False)
    result = run().fit(num_steps=5, local=True, progress=False)
    plain = reference(**settings, num_steps=5)
    state = load_state_dict(result.checkpoint)
    assert [record.loss for record in result.records] == list(plain.losses)
    assert all(torch.equal(state[name], value) for name, value in plain.parameters.items())
