"""Mixed precision as plain PyTorch does it in one process: what pipelines must equal, made of nothing of ours."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ["Plain", "train_plain"]

Microbatch = tuple[torch.Tensor, torch.Tensor]
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
    loss_fn: Callable[[Any, Any], torch.Tensor],
    steps: Sequence[Sequence[Microbatch]],
    optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    precision: str,
    max_grad_norm: float | None = None,
    **scaling: Any,
) -> Plain:
    """A copy of the model, trained; micro-batches of a step weigh by their samples.

    Args:
        scaling: options of torch.amp.GradScaler, for "fp16".
    """
    masters = copy.deepcopy(model).train()
    named = list(masters.named_parameters())
    stepper = optimizer(named)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16", **scaling)
    found = Plain([], [], [], {}, [], [])
    for number, microbatches in enumerate(steps):
        samples = sum(len(x) for x, _ in microbatches)
        losses = []
        for _, p in named:
            p.grad = None
        low = copy.deepcopy(masters).to(_DTYPES.get(precision, torch.float32))
        for x, y in microbatches:
            if precision in _DTYPES and x.is_floating_point():
                x = x.to(_DTYPES[precision])
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-autocast"):
                loss = loss_fn(low(x), y)
            weighed = loss * (len(x) / samples)
            losses.append(loss.detach().float() * (len(x) / samples))
            grads = torch.autograd.grad(scaler.scale(weighed), list(low.parameters()))
            for (_, p), grad in zip(named, grads, strict=True):
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
            found.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})
        scaler.step(stepper)
        scaler.update()
        found.scales.append(scaler.get_scale())
    found.parameters.update({name: p.detach().clone() for name, p in named})
    return found
