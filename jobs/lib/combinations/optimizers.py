"""Optimizers and learning rate schedulers of trials, by name."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["OPTIMIZERS", "SCHEDULERS", "optimizer_of", "scheduler_of"]

OPTIMIZERS = (
    "sgd", "adamw", "adamw in groups", "sgd by name", "rmsprop", "adagrad", "adamw with a rate in a tensor", "adamax",
    "nadam", "radam", "asgd", "rprop", "adadelta", "adafactor",
)  # fmt: skip
SCHEDULERS = (
    "none", "none", "exponential", "one cycle", "warmup", "cosine", "one after the other", "all together", "cyclic",
    "warm restarts", "averaging",
)  # fmt: skip


def optimizer_of(name: str, named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """Big enough steps that a wrong gradient shows in the parameters."""
    if name == "sgd":
        return torch.optim.SGD(named, lr=5e-2, momentum=0.9)
    if name == "adamw":
        return torch.optim.AdamW(named, lr=1e-2)
    if name == "adamw in groups":
        groups = [[(n, p) for n, p in named if (p.dim() > 1) is decays] for decays in (True, False)]
        decays = [{"params": g, "weight_decay": d} for g, d in zip(groups, (0.1, 0.0), strict=True) if g]
        return torch.optim.AdamW(decays, lr=1e-2)
    if name == "sgd by name":
        return torch.optim.SGD([{"params": [(n, p)], "lr": 0.01 + 0.01 * (sum(n.encode()) % 5)} for n, p in named])
    if name == "adamw with a rate in a tensor":
        return torch.optim.AdamW(named, lr=torch.tensor(1e-2), amsgrad=True)
    if name == "asgd":
        return torch.optim.ASGD(named, lr=5e-2, t0=2)
    kinds: Any = {
        "rmsprop": torch.optim.RMSprop, "adagrad": torch.optim.Adagrad, "adamax": torch.optim.Adamax,
        "nadam": torch.optim.NAdam, "radam": torch.optim.RAdam, "rprop": torch.optim.Rprop,
        "adadelta": torch.optim.Adadelta, "adafactor": torch.optim.Adafactor,
    }  # fmt: skip
    made: torch.optim.Optimizer = kinds[name](named, lr=1e-2)
    return made


def scheduler_of(name: str, optimizer: torch.optim.Optimizer) -> Any:
    """Of learning rates, and of momenta in "one cycle"."""
    kinds = torch.optim.lr_scheduler
    rates = [group["lr"] for group in optimizer.param_groups]
    if name == "exponential":
        return kinds.ExponentialLR(optimizer, gamma=0.8)
    if name == "one cycle":
        cycles = "momentum" in optimizer.defaults or "betas" in optimizer.defaults
        return kinds.OneCycleLR(optimizer, max_lr=rates, total_steps=60, cycle_momentum=cycles)
    if name == "warmup":
        return kinds.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    if name == "cosine":
        return kinds.CosineAnnealingLR(optimizer, T_max=9)
    if name == "cyclic":
        return kinds.CyclicLR(optimizer, [0.3 * float(rate) for rate in rates], [float(rate) for rate in rates], 2, 3,
                              cycle_momentum=False)  # fmt: skip
    if name == "warm restarts":
        return kinds.CosineAnnealingWarmRestarts(optimizer, T_0=2, T_mult=2)
    if name == "averaging":
        return torch.optim.swa_utils.SWALR(optimizer, swa_lr=1e-3, anneal_epochs=3)
    if name == "all together":
        return kinds.ChainedScheduler([kinds.LinearLR(optimizer, 0.3, 1.0, 3), kinds.ExponentialLR(optimizer, 0.8)])
    parts = [kinds.ConstantLR(optimizer, 0.3, 2), kinds.ExponentialLR(optimizer, 0.7)]
    return kinds.SequentialLR(optimizer, parts, [2])
