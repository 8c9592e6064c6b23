"""Mixed precision as plain PyTorch does it in one process: what pipelines must equal, made of nothing of ours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["Plain", "train_plain"]

Microbatch = tuple[torch.Tensor, torch.Tensor] | Mapping[str, torch.Tensor]
"""(input, target), or what a model is given that returns its own loss."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Plain(NamedTuple):
    """What came of it: losses added up in fp32, norms before clipping, gradients as the optimizer saw them,
    the scale after each step."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, torch.Tensor]]
    parameters: dict[str, torch.Tensor]
    scales: list[float]
    skipped: list[int]


def train_plain(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None,
    steps: Sequence[Sequence[Microbatch]],
    optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    precision: str,
    max_grad_norm: float | None = None,
    device: str = "cpu",
    **scaling: Any,
) -> Plain:
    """A copy of the model, trained; micro-batches of a step weigh by their samples.

    Args:
        loss_fn: None for a model that returns its own.
        device: where it computes; what it returns is in host memory.
        scaling: options of torch.amp.GradScaler, for "fp16".
    """
    masters = copy.deepcopy(model).train().to(device)
    named = [(name, p) for name, p in masters.named_parameters() if p.requires_grad]
    stepper = optimizer(named)
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16", **scaling)
    found = Plain([], [], [], {}, [], [])
    for number, microbatches in enumerate(steps):
        samples = sum(map(_samples, microbatches))
        losses = []
        for _, p in named:
            p.grad = None
        low = copy.deepcopy(masters)
        if precision in _DTYPES:
            low = low.to(_DTYPES[precision])
        leaves = [p for p in low.parameters() if p.requires_grad]
        for microbatch in (_moved(given, device) for given in microbatches):
            with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16-autocast"):
                loss = _loss(low, loss_fn, microbatch, _DTYPES.get(precision))
            weight = _samples(microbatch) / samples
            weighed = loss * weight
            losses.append(loss.detach().float() * weight)
            grads = torch.autograd.grad(scaler.scale(weighed), leaves, allow_unused=True)
            for (_, p), grad in zip(named, grads, strict=True):
                if grad is not None:
                    wide = grad.float()
                    p.grad = wide.clone() if p.grad is None else p.grad + wide
        scaler.unscale_(stepper)
        parameters = [p for _, p in named]
        if max_grad_norm is None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        else:
            norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        found.losses.append(float(sum(losses[1:], start=losses[0])))
        found.norms.append(float(norm))
        if not torch.isfinite(norm):
            found.skipped.append(number)
        else:
            found.gradients.append({name: p.grad.cpu().clone() for name, p in named if p.grad is not None})
        scaler.step(stepper)
        scaler.update()
        found.scales.append(scaler.get_scale())
    found.parameters.update({name: p.detach().cpu().clone() for name, p in named})
    return found


def _moved(microbatch: Microbatch, device: str) -> Microbatch:
    if isinstance(microbatch, Mapping):
        return {name: x.to(device) for name, x in microbatch.items()}
    x, y = microbatch
    return x.to(device), y.to(device)


def _samples(microbatch: Microbatch) -> int:
    return len(next(iter(microbatch.values())) if isinstance(microbatch, Mapping) else microbatch[0])


def _loss(model: nn.Module, loss_fn: Any, microbatch: Microbatch, dtype: torch.dtype | None) -> torch.Tensor:
    """Of a model whose floating-point inputs are converted as it is itself; targets of a loss_fn are not."""

    def in_type(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if dtype is not None and x.is_floating_point() else x

    if isinstance(microbatch, Mapping):
        loss: torch.Tensor = model(**{name: in_type(x) for name, x in microbatch.items()}).loss
        return loss
    x, y = microbatch
    found: torch.Tensor = loss_fn(model(in_type(x)), y)
    return found
