"""The loss of a mini-batch: weighed losses of its micro-batches, summed up in their order, whoever computed them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from raypipe.engine.microbatch import Weights, counting
from raypipe.errors import StageError
from raypipe.ir.action import microbatch_words

__all__ = ["LossTerm", "loss_parts", "summed", "told"]

_PARTS = 1 << 20
"""More than a loss has."""


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


def summed(terms: Sequence[LossTerm], messages: Sequence[tuple[torch.Tensor | None, ...]] = ()) -> torch.Tensor | None:
    """Their sum, in the order of micro-batches and their parts; None of none.

    Args:
        messages: of other replicas, from ``told``. What they hold is put in order where it is: a device that was asked
            for the numbers of micro-batches would first finish all that is queued there.
    """
    values: Sequence[torch.Tensor] = [term.value for term in terms]
    if messages:
        found = [(places, some) for places, some in (told(terms), *messages) if places is not None and some is not None]
        if found:
            order = torch.argsort(torch.cat([places for places, _ in found]))
            values = torch.cat([some for _, some in found])[order].unbind()
    total: torch.Tensor | None = None
    for value in values:
        total = value if total is None else total + value
    return total


def told(terms: Sequence[LossTerm]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """As the tensors of a message: places in the order of all terms (int64) and values, both of shape (terms,)."""
    if not terms:
        return None, None
    values = torch.stack([term.value for term in terms])
    first = terms[0].microbatch
    offsets = _places(tuple((term.microbatch - first, term.part) for term in terms), values.device)
    return offsets + first * _PARTS, values


@lru_cache(maxsize=64)
def _places(terms: tuple[tuple[int, int], ...], device: torch.device) -> torch.Tensor:
    """Of (micro-batch, part). They are kept, because a copy from the host would wait for all that is queued there."""
    return torch.tensor([microbatch * _PARTS + part for microbatch, part in terms], device=device)
