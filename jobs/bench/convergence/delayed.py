"""Training with stale gradients in one process: every stage computes with weights that are some updates old.

    update t of a stage that is d updates late:  gradient at version max(0, t - d), step from version t

A micro-batch of a pipeline without a flush meets the same weights. So the result is that of a pipeline whose updates
take one micro-batch ("pipedream"), or whose micro-batches of an update meet equal weights ("2bw"), up to the rounding
of sums over micro-batches. docs/schedules.md has the formulas of the corrections.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from raypipe.ir.weights import discount

__all__ = ["train"]

Batch = tuple[torch.Tensor, torch.Tensor]


def train(
    model: nn.Module,
    stages: Sequence[Sequence[nn.Module]],
    delays: Sequence[float],
    batches: Iterable[Batch],
    *,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    steppers: Sequence[torch.optim.Optimizer],
    rate: Callable[[int], float],
    correction: str = "none",
    fades_after: int = 1,
) -> list[float]:
    """Train the model in place, one update per batch; return the loss of every update.

    Args:
        stages: modules of every stage; together they hold every parameter once.
        delays: updates between the weights of a gradient and its own update, by stage.
        steppers: optimizers whose groups hold parameters of one stage each, and its number as ``stage``.
        rate: (update) -> factor on the learning rates at which the optimizers were made.
        correction: "predict", "discount", or another name for none here.
        fades_after: number of updates after which the discount ends.
    """
    held = [[p for module in stage for p in module.parameters()] for stage in stages]
    newest = [[p.data for p in stage] for stage in held]
    met = [deque([_copied(own)], maxlen=int(late) + 1) for own, late in zip(newest, delays, strict=True)]
    base = [(group, group["lr"]) for one in steppers for group in one.param_groups]
    losses = []
    for update, (inputs, targets) in enumerate(batches):
        for parameters, versions in zip(held, met, strict=True):
            for parameter, old in zip(parameters, versions[0], strict=True):
                parameter.data = old
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        losses.append(float(loss.detach()))
        for parameters, own in zip(held, newest, strict=True):
            for parameter, x in zip(parameters, own, strict=True):
                parameter.data = x
        before = [_copied(own) for own in newest] if correction == "predict" else None
        for group, full in base:
            late = delays[group["stage"]]
            factor = discount(late, update, fades_after) if correction == "discount" else 1.0
            group["lr"] = full * rate(update) * factor
        for one in steppers:
            one.step()
            one.zero_grad(set_to_none=True)
        for number, (own, versions, delay) in enumerate(zip(newest, met, delays, strict=True)):
            if before is None or not delay:
                versions.append(_copied(own))
            else:
                versions.append([x + delay * (x - old) for x, old in zip(own, before[number], strict=True)])
    return losses


def _copied(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.clone() for x in tensors]
