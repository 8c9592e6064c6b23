"""Cut a mini-batch into micro-batches and weigh their losses, so that the sum is the mini-batch's loss.

    B = 10, b = 4     sizes (4, 4, 2)     "mean" weights 0.4, 0.4, 0.2

The gradient of sum(weight_i * loss_i) is that of the loss over the whole mini-batch, whatever the
number of micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from raypipe.engine.loss_counts import LossCounts
from raypipe.errors import ConfigError, DataError

__all__ = [
    "IGNORED_TARGET", "Reduction", "Weights", "counting", "evaluation_shares", "items_of", "loss_weights",
    "update_weights",
]  # fmt: skip

Reduction = str | Callable[[Any], float] | LossCounts
"""How a loss averages within a micro-batch: "mean" over its samples, "sum", "valid_tokens" over the targets other than
-100, (target) -> number of items, or what was found in the graph of the loss."""

Weights = tuple[float, ...]
"""Of one micro-batch: a number for every part of its loss."""

IGNORED_TARGET = -100
"""The target that torch's losses leave out (``ignore_index``)."""


def loss_weights(
    reduction: Reduction,
    sizes: Sequence[int],
    targets: torch.Tensor | Sequence[Any] | None = None,
) -> list[float]:
    """What each micro-batch's loss is multiplied by.

    Args:
        sizes: samples per micro-batch.
        targets: of the whole mini-batch, shape (sum(sizes), ...), or one per micro-batch; for LossCounts, the data
            columns of each micro-batch. "mean" and "sum" do not look at them.

    Returns:
        One weight per micro-batch. Those of an average add up to 1, unless the loss divides by something else than
        the number of items (``LossCounts.bounds``); a micro-batch without a valid
        target weighs 0, and its loss must then be left out, for the average over nothing is nan.

    Raises:
        DataError: no micro-batch has a valid target, or targets are missing.
        ConfigError: the function returned something that is no number of items.
    """
    if reduction == "sum":
        return [1.0] * len(sizes)
    weights = _weights(reduction, 0, items_of(reduction, sizes, targets))
    return _of_something(weights, sizes)


def _weights(reduction: Reduction, term: int, counts: Sequence[float]) -> list[float]:
    """Of micro-batches with so many items; zeros where there are none."""
    if isinstance(reduction, LossCounts):
        return reduction.weights(term, counts)
    total = sum(counts)
    return [count / (total or 1.0) for count in counts]


def _of_something(weights: list[float], sizes: Sequence[int]) -> list[float]:
    """The same, unless all of them are zero."""
    if not any(weights):
        raise DataError(
            f"All targets of a mini-batch of {sum(sizes)} samples are {IGNORED_TARGET} or not counted, so its loss is "
            "an average over nothing. Leave such samples out of the data, or take a larger minibatch_size."
        )
    return weights


def items_of(
    reduction: Reduction, sizes: Sequence[int], targets: torch.Tensor | Sequence[Any] | None = None
) -> list[float]:
    """How many items the loss of each micro-batch averages over; the samples where it adds up.

    Args:
        sizes, targets: as in ``loss_weights``.

    Raises:
        DataError, ConfigError: as ``loss_weights``.
    """
    if reduction in ("mean", "sum"):
        return [float(size) for size in sizes]
    if targets is None:
        raise DataError(f"loss_reduction={reduction!r} counts targets, but there are none. Use 'mean' or 'sum'.")
    parts = targets.split(list(sizes)) if isinstance(targets, torch.Tensor) else targets
    if isinstance(reduction, LossCounts):
        return reduction.of_minibatch(parts, sizes)
    return [_items(reduction, part) for part, _ in zip(parts, sizes, strict=True)]


def update_weights(
    reduction: Reduction,
    sizes: Sequence[int],
    targets: Any,
    interval: int,
) -> tuple[list[Weights], list[Weights]]:
    """Weights of a mini-batch whose micro-batches belong to several updates, and their shares in its loss.

    Within an update they are those of ``loss_weights``: its gradient is that of the loss over its own samples.

    Args:
        interval: micro-batches per update; divides their number.

    Returns:
        (weights, shares), one of each per micro-batch, equal where there is one update; each has a number for every
        part of the loss, of which there is one unless LossCounts tells several apart.

    Raises:
        DataError, ConfigError: as ``loss_weights``.
    """
    if isinstance(reduction, LossCounts) and reduction.parts:
        counts = reduction.by_term(targets, sizes)
        of_parts = [_update_weights(reduction, term, counts[term], sizes, interval) for term in reduction.parts]
    else:
        if reduction == "sum":
            shares = loss_weights(reduction, sizes)
            of_parts = [(shares, shares)]
        else:
            of_parts = [_update_weights(reduction, 0, items_of(reduction, sizes, targets), sizes, interval)]
    weights, shares_of = zip(*of_parts, strict=True)
    return list(zip(*weights, strict=True)), list(zip(*shares_of, strict=True))


def evaluation_shares(reduction: Reduction, sizes: Sequence[int], targets: Any) -> tuple[list[Weights], Weights]:
    """Shares of micro-batches in the loss of an evaluation's mini-batch, and the items that it averages over.

    A part of the loss without a single item has shares and items of 0 there: it adds nothing to the evaluation.

    Returns:
        (shares of each micro-batch, items), with a number for every part of the loss.

    Raises:
        DataError, ConfigError: as ``items_of``.
    """
    if isinstance(reduction, LossCounts) and reduction.parts:
        by_term = reduction.by_term(targets, sizes)
        counts = [(term, by_term[term]) for term in reduction.parts]
    else:
        counts = [(0, items_of(reduction, sizes, targets))]
    if reduction == "sum":
        return [(1.0,)] * len(sizes), (sum(counts[0][1]),)
    items = tuple(
        reduction.divisor(term, sum(of_part)) if isinstance(reduction, LossCounts) else sum(of_part)
        for term, of_part in counts
    )
    shares = [_weights(reduction, term, of_part) for term, of_part in counts]
    return list(zip(*shares, strict=True)), items


def _update_weights(
    reduction: Reduction, term: int, counts: Sequence[float], sizes: Sequence[int], interval: int
) -> tuple[list[float], list[float]]:
    """Weights in the updates of a mini-batch, and shares in it; an update without a valid target weighs nothing."""
    shares = _of_something(_weights(reduction, term, counts), sizes)
    if interval >= len(counts):
        return shares, shares
    groups = [counts[start : start + interval] for start in range(0, len(counts), interval)]
    return [weight for group in groups for weight in _weights(reduction, term, group)], shares


def _items(reduction: str | Callable[[Any], float], target: Any) -> float:
    """Items that the loss of one micro-batch is averaged over."""
    if isinstance(reduction, str):
        return int((target != IGNORED_TARGET).sum())
    try:
        count = float(reduction(target))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"loss_reduction={reduction!r} did not count the items of a target: {error}. "
            "It takes the target of one micro-batch and returns a number of at least 0."
        ) from error
    if not (math.isfinite(count) and count >= 0):
        raise ConfigError(f"loss_reduction={reduction!r} counted {count} items; return a number of at least 0.")
    return count


def counting(weights: Weights) -> list[int]:
    """Positions of the parts of a loss that count."""
    return [at for at, weight in enumerate(weights) if weight != 0.0]
