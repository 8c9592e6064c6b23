"""The loss of a mini-batch: weighed losses of its micro-batches, summed up in their order, whoever computed them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from raypipe.engine.microbatch import Weights, counting
from raypipe.errors import StageError
from raypipe.ir.action import microbatch_words

__all__ = ["LossTerm", "loss_parts", "merged", "summed", "told"]


def loss_parts(
    loss: Callable[[tuple[torch.Tensor, ...], Sequence[torch.Tensor]], Any] | None,
    targets: Sequence[Any],
    outputs: tuple[torch.Tensor, ...],
    columns: Mapping[Any, torch.Tensor],
    weights: Weights,
    microbatch: int,
) -> tuple[torch.Tensor, ...]:
    """The parts of the loss that count, as the last stage's outputs.

    Args:
        loss, targets: of the last stage's program.

    Raises:
        StageError: one is no scalar tensor.
    """
    if not any(weights):  # no valid target: an average over nothing, which would be nan
        return ()
    assert loss is not None
    found = loss(outputs, [columns[name] for name in targets])
    parts = found if isinstance(found, tuple) else (found,)
    for part in parts:
        if not isinstance(part, torch.Tensor) or part.dim() != 0:
            what = f"shape {tuple(part.shape)}" if isinstance(part, torch.Tensor) else type(part).__name__
            raise StageError(
                f"The loss of {microbatch_words(microbatch)} is not a scalar tensor but has {what}. Let loss_fn "
                "reduce over the samples of a micro-batch (reduction='mean') and choose loss_reduction to match."
            )
    return tuple(parts[at] for at in counting(weights))


class LossTerm(NamedTuple):
    """What one part of a micro-batch's loss adds to that of its mini-batch.

    Attributes:
        microbatch: its number in the run.
        part: of the loss.
        value: scalar, weighed.
    """

    microbatch: int
    part: int
    value: torch.Tensor


def summed(terms: Sequence[LossTerm]) -> torch.Tensor | None:
    """Their sum in this order; None of none."""
    total: torch.Tensor | None = None
    for term in terms:
        total = term.value if total is None else total + term.value
    return total


def told(terms: Sequence[LossTerm]) -> list[torch.Tensor | None]:
    """As the tensors of a message: numbers of micro-batches and parts, shape (terms, 2), and values, shape (terms,)."""
    if not terms:
        return [None, None]
    values = torch.stack([term.value for term in terms])
    return [torch.tensor([term[:2] for term in terms], dtype=torch.int64, device=values.device), values]


def merged(terms: Sequence[LossTerm], messages: Sequence[tuple[torch.Tensor | None, ...]]) -> list[LossTerm]:
    """All terms in the order of their micro-batches.

    Args:
        messages: of other replicas, from ``told``.
    """
    found = list(terms)
    for where, values in messages:
        if where is not None and values is not None:
            pairs = zip(where.tolist(), values.unbind(), strict=True)
            found += [LossTerm(microbatch, part, value) for (microbatch, part), value in pairs]
    return sorted(found, key=lambda term: term[:2]) if messages else found
