"""PipeDream's stages with replicas as published: each updates when each of its replicas has done one more micro-batch.

Stages 2-1: stage 0 updates after micro-batches 1, 3, 5, ... with the mean over two, stage 1 after each. Stage 0 then
moves half as often, so stage s has R_s / R_0 times the learning rate (PipeDream's runtime, main_with_runtime.py).
Micro-batch k meets version max(0, k // R_s - w_s) of stage s, with w_s = floor((sum of R of this and later stages - 1)
/ R_s): what the replica whose turn it is has, w_s of its own micro-batches ago.

Gradients are those of a mean over lcm(R) micro-batches, whose weights the last stage puts on its losses; of them a
stage makes the mean over its own. Learning rate schedulers step once for all stages, every lcm(R) micro-batches.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from tests.emulators.training import Fill, Sample, add_lane, keep, load, one_thread, predicted, step_at, weights

__all__ = ["emulate_apart"]


def emulate_apart(
    model: nn.Sequential,
    cuts: Sequence[int],
    replicas: Sequence[int],
    fills: Iterable[Fill],
    *,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    make_scheduler: Callable[[torch.optim.Optimizer], Any],
    max_grad_norm: float | None = None,
    scales: bool = True,
    correction: str = "none",
    discount_updates: int = 1,
) -> dict[str, torch.Tensor]:
    """Train a copy of the model; its parameters.

    Args:
        cuts: positions of the children that begin stages 1, 2, ...
        replicas: R by stage.
        max_grad_norm: a stage clips its own norm to limit x sqrt(its numbers / all numbers).
        correction, discount_updates: as in ``emulate``; a stage's gradients are w_s of its updates late.
        scales: False leaves every stage the same learning rate.
    """
    model = copy.deepcopy(model).train()
    stages = [model[a:b] for a, b in itertools.pairwise([0, *cuts, len(model)])]
    every = math.lcm(*replicas)
    optimizers = [make_optimizer(list(stage.named_parameters())) for stage in stages]
    schedulers = [make_scheduler(optimizer) for optimizer in optimizers]
    late = [(sum(replicas[index:]) - 1) // count for index, count in enumerate(replicas)]
    done = 0
    numbers = [sum(p.numel() for p in stage.parameters()) for stage in stages]
    with one_thread():
        for fill in fills:
            if fill.synchronous:
                _step_together(model, fill.microbatches, every, loss_fn, max_grad_norm)
                for stepper in itertools.chain(optimizers, schedulers):
                    stepper.step()
                model.zero_grad(set_to_none=True)
                done += 1
                continue
            newest = [weights(stage) for stage in stages]
            versions = [[own] for own in newest]
            for k, (inputs, targets) in enumerate(fill.microbatches):
                for stage, history, count, ahead in zip(stages, versions, replicas, late, strict=True):
                    load(stage, history[max(0, k // count - ahead)])
                begin = k // every * every
                of_all = _samples(fill.microbatches[begin : begin + every])
                (loss_fn(model(inputs), targets) * (len(inputs) / of_all)).backward()
                for index, (stage, history, count) in enumerate(zip(stages, versions, replicas, strict=True)):
                    if (k + 1) % count:
                        continue
                    load(stage, newest[index])
                    factor = of_all / _samples(fill.microbatches[k + 1 - count : k + 1])
                    for parameter in stage.parameters():
                        parameter.grad.mul_(factor)  # type: ignore[union-attr]
                    if max_grad_norm is not None:
                        limit = max_grad_norm * math.sqrt(numbers[index] / sum(numbers))
                        nn.utils.clip_grad_norm_(stage.parameters(), limit)
                    factor = count / replicas[0] if scales else 1.0
                    if correction == "discount":
                        factor *= max(1.0, late[index]) ** -(1.0 - min(done / discount_updates, 1.0))
                    step_at(optimizers[index], factor)
                    stage.zero_grad(set_to_none=True)
                    before, newest[index] = newest[index], weights(stage)
                    history.append(predicted(before, newest[index], late[index] * (correction == "predict")))
                if (k + 1) % every == 0:
                    done += 1
                    for scheduler in schedulers:
                        scheduler.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def _samples(microbatches: Sequence[Sample]) -> int:
    return sum(len(inputs) for inputs, _ in microbatches)


def _step_together(
    model: nn.Module,
    microbatches: Sequence[Sample],
    lanes: int,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    limit: float | None,
) -> None:
    """The gradients of a mini-batch that is smaller than the others."""
    sums: list[dict[nn.Parameter, torch.Tensor]] = [{} for _ in range(lanes)]
    for k, (inputs, targets) in enumerate(microbatches):
        (loss_fn(model(inputs), targets) * (len(inputs) / _samples(microbatches))).backward()
        keep(model, sums[k % lanes])
    for own in sums:
        add_lane(own)
    if limit is not None:
        nn.utils.clip_grad_norm_(model.parameters(), limit)
