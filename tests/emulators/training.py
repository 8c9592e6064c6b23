"""Train with old weights where a pipeline would, one micro-batch after the other.

The optimizer always steps from the newest weights, with the sum of the gradients that the micro-batches of its update
found at the versions they met. Buffers (BatchNorm's running statistics) have no versions: every forward changes them.

A pipeline drains at the end of an epoch, and around a mini-batch that is shorter than the others, which is a
synchronous step of its own:

    11 samples, mini-batches of 4 in micro-batches of 2     [2 2 2 2]  [2 1]   [2 2 2 2]  [2 1] ...
                                                             a fill    alone    epoch 1

Corrections: predicted weights are w_v + d (w_v - w_(v-1)), for the mean delay d of the stage's gradients; w_v for the
first version of a fill. The discount divides the rate of update t by max(1, d) ** (1 - min(t / K, 1)).

Clipping: updates of at least as many micro-batches as there are stages, and synchronous ones, take the norm of the
whole model. With fewer, a stage cannot wait for the others, so each takes its own norm against its share of the
limit: limit x sqrt(its trainable numbers / all trainable numbers), of which the squares add up to the limit's.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.emulators.versions import Mode

__all__ = [
    "Emulated",
    "Fill",
    "Sample",
    "add_lane",
    "emulate",
    "fills_of",
    "keep",
    "load",
    "one_thread",
    "predicted",
    "step_at",
    "weights",
]

Sample = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Fill:
    """What goes through the pipeline between two drains.

    Attributes:
        microbatches: (inputs, targets) in order, of whole mini-batches.
        synchronous: one update after the last of them, whatever the mode.
    """

    microbatches: list[Sample]
    synchronous: bool = False


def fills_of(
    epoch_data: Callable[[int], Sample],
    minibatch: int,
    microbatch: int,
    num_minibatches: int,
    drain_every: int | None = None,
) -> Iterator[Fill]:
    """A run of so many mini-batches.

    Args:
        epoch_data: epoch -> all its inputs and targets in the order of training, shape (samples, ...).
        minibatch, microbatch: samples; the last micro-batch of a mini-batch may be smaller.
        drain_every: mini-batches after which the pipeline drains, for a checkpoint.
    """
    done = epoch = 0
    while done < num_minibatches:
        inputs, targets = epoch_data(epoch)
        fill: list[Sample] = []
        for x, y in zip(inputs.split(minibatch), targets.split(minibatch), strict=True):
            if done == num_minibatches:
                break
            parts = list(zip(x.split(microbatch), y.split(microbatch), strict=True))
            done += 1
            if len(x) < minibatch:
                yield from [Fill(fill)] if fill else []
                yield Fill(parts, synchronous=True)
                fill = []
                continue
            fill += parts
            if drain_every is not None and done % drain_every == 0:
                yield Fill(fill)
                fill = []
        yield from [Fill(fill)] if fill else []
        epoch += 1


@dataclass(frozen=True)
class Emulated:
    """What became of the model.

    Attributes:
        parameters, buffers: after the last update, by name.
        losses: of every update, weighted as its gradients were.
        norms: of every update, before clipping; of the whole model, or one per stage.
    """

    parameters: dict[str, torch.Tensor] = field(repr=False)
    buffers: dict[str, torch.Tensor] = field(repr=False)
    losses: list[float]
    norms: list[tuple[float, ...]]


def emulate(
    model: nn.Sequential,
    cuts: Sequence[int],
    fills: Iterable[Fill],
    mode: Mode,
    *,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    reduction: str = "mean",
    max_grad_norm: float | None = None,
    dtype: torch.dtype | None = None,
    lanes: int = 1,
    correction: str = "none",
    discount_updates: int = 1,
) -> Emulated:
    """Train a copy of the model.

    Args:
        cuts: positions of the children that begin stages 1, 2, ...
        fills: see ``fills_of``.
        make_optimizer: makes one for each stage from the names and parameters that it trains.
        make_scheduler: its scheduler steps once per update.
        reduction: "mean" weighs a micro-batch by its share of the update's samples, "sum" by 1.
        max_grad_norm: None leaves gradients as they are.
        dtype: forwards and backwards compute in it, with copies of the weights; None for that of the model.
        correction, discount_updates: "predict", or "discount" with K.
        lanes: of an update, gradients of micro-batches m, m + lanes, ... are summed first, then these sums in order.
    """
    model = copy.deepcopy(model).train()
    bounds = [0, *cuts, len(model)]
    stages = [model[a:b] for a, b in itertools.pairwise(bounds)]
    used = model if dtype is None else copy.deepcopy(model).to(dtype)
    using = [used[a:b] for a, b in itertools.pairwise(bounds)]
    trained = [[(name, p) for name, p in stage.named_parameters() if p.requires_grad] for stage in stages]
    optimizers = {index: make_optimizer(named) for index, named in enumerate(trained) if named}
    schedulers = [make_scheduler(optimizer) for optimizer in optimizers.values()] if make_scheduler else []
    losses: list[float] = []
    norms = []
    delays = [mode.delay(index) for index in range(len(stages))]
    predicts = [delay if correction == "predict" else 0.0 for delay in delays]
    with one_thread():
        for fill in fills:
            every = len(fill.microbatches) if fill.synchronous else mode.every
            newest = [weights(stage) for stage in stages]
            versions = [[own] for own in newest]
            for update in range(len(fill.microbatches) // every):
                first = update * every
                group = fill.microbatches[first : first + every]
                total = 0.0
                sums: list[dict[nn.Parameter, torch.Tensor]] = [{} for _ in range(lanes)]
                for k, (inputs, targets) in enumerate(group, start=first):
                    for index, stage in enumerate(using):
                        load(stage, versions[index][0 if fill.synchronous else mode.version(index, k)])
                    loss = loss_fn(used(_converted(inputs, dtype)), targets)
                    if reduction == "mean":
                        loss = loss * (len(inputs) / sum(len(x) for x, _ in group))
                    loss.backward()
                    if used is not model:
                        _add_gradients(used, model)
                    if lanes > 1:
                        keep(model, sums[(k - first) % lanes])
                    total += float(loss.detach())
                for stage, own in zip(stages, newest, strict=True):
                    load(stage, own)
                if lanes > 1:
                    for own in sums:
                        add_lane(own)
                together = fill.synchronous or every >= len(stages)
                norms.append(_clip([[p for _, p in named] for named in trained], max_grad_norm, together))
                discounts = correction == "discount" and not fill.synchronous
                for index, optimizer in optimizers.items():
                    faded = 1.0 - min(len(losses) / discount_updates, 1.0)
                    step_at(optimizer, max(1.0, delays[index]) ** -faded if discounts else 1.0)
                for scheduler in schedulers:
                    scheduler.step()
                model.zero_grad(set_to_none=True)
                for index, (stage, history) in enumerate(zip(stages, versions, strict=True)):
                    before, newest[index] = newest[index], weights(stage)
                    history.append(predicted(before, newest[index], predicts[index]))
                losses.append(total)
    return Emulated(
        {name: p.detach() for name, p in model.named_parameters()}, dict(model.named_buffers()), losses, norms
    )


def predicted(before: list[torch.Tensor], after: list[torch.Tensor], delay: float) -> list[torch.Tensor]:
    """The weights after so many more updates that are equal to the last one."""
    return [w + (w - old) * delay for old, w in zip(before, after, strict=True)] if delay else after


def step_at(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """A step with so many times the learning rate."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] *= factor
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def weights(stage: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in stage.parameters()]


def load(stage: nn.Module, weights: list[torch.Tensor]) -> None:
    """Gradients stay where they are: they add up over micro-batches of several versions."""
    with torch.no_grad():
        for parameter, saved in zip(stage.parameters(), weights, strict=True):
            parameter.copy_(saved)


def _converted(inputs: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return inputs if dtype is None or not inputs.is_floating_point() else inputs.to(dtype)


def _add_gradients(used: nn.Module, model: nn.Module) -> None:
    """To sums in the type of the model."""
    for low, parameter in zip(used.parameters(), model.parameters(), strict=True):
        if low.grad is not None:
            found = low.grad.to(parameter.dtype)
            parameter.grad = found if parameter.grad is None else parameter.grad + found
            low.grad = None


def keep(model: nn.Module, lane: dict[nn.Parameter, torch.Tensor]) -> None:
    """Move the gradients of one micro-batch to the sums of its lane."""
    for parameter in model.parameters():
        if (found := parameter.grad) is not None:
            lane[parameter] = lane[parameter] + found if parameter in lane else found
            parameter.grad = None


def add_lane(lane: dict[nn.Parameter, torch.Tensor]) -> None:
    for parameter, found in lane.items():
        parameter.grad = found if parameter.grad is None else parameter.grad + found


def _clip(stages: list[list[nn.Parameter]], limit: float | None, together: bool) -> tuple[float, ...]:
    if together:
        every = [p for stage in stages for p in stage]
        return (float(nn.utils.clip_grad_norm_(every, math.inf if limit is None else limit)),)
    numbers = [sum(p.numel() for p in stage) for stage in stages]
    limits = [math.inf if limit is None else limit * math.sqrt(own / sum(numbers)) for own in numbers]
    return tuple(float(nn.utils.clip_grad_norm_(stage, of)) for stage, of in zip(stages, limits, strict=True))


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums over several threads round differently."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
