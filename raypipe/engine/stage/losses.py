"""Loss of a mini-batch: the sum of the weighted losses of its micro-batches, in their order.

    loss                                 weights of its micro-batches
    mean over the samples                0.4, 0.4, 0.2 for micro-batches of 4, 4 and 2 samples
    cross_entropy(logits, labels)        by the number of labels other than ignore_index, or their classes' weights
    (error * mask).sum() / mask.sum()    by mask.sum()

If a loss divides by D(rows), the weight of a micro-batch is D(micro-batch) / D(mini-batch). The gradient of the
weighted sum is then the gradient of the loss over the whole mini-batch, for any number of micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from raypipe.engine.stage.minibatch_loss import WholeMinibatch
from raypipe.engine.stage.stage import GraphFunction
from raypipe.errors import ConfigError, DataError, StageError
from raypipe.ir.schedule import microbatch_words

IGNORED_TARGET = -100
"""Target that torch's losses leave out (``ignore_index``)."""
SAME_WEIGHT = 1e-9
"""Largest difference between the weights of two terms that is attributed to rounding."""
_PARTS = 1 << 20
"""Bound of the number of parts of a loss: position = micro-batch * _PARTS + part."""

Weights = tuple[float, ...]
"""Weight of each part of one micro-batch's loss; most losses have one part."""
Columns = Mapping[Any, torch.Tensor]


def count_labels(labels: torch.Tensor, ignore_index: int, class_weights: torch.Tensor | None = None) -> torch.Tensor:
    """Return the divisor of torch's cross_entropy and nll_loss, a scalar.

    It is the number of labels other than ``ignore_index``, or the sum of their class weights.
    """
    valid = labels != ignore_index
    if class_weights is None:
        return valid.sum(dtype=torch.float64)
    return class_weights.double()[labels[valid]].sum()


@dataclass(frozen=True, slots=True, eq=False)
class LossCounts:
    """Divisors of the terms of a loss, computed from the data alone.

    Attributes:
        program: function of the data columns that returns one divisor per counted term.
        samples_too: True if the loss has one more term at the end, which averages over the samples.
        words: description of what is counted, for error messages.
        parts: for each part of the loss, the index of its term, if the last stage returns the parts one by one; empty
            if it returns their sum, whose terms must then all have the same weights.
        apart: True if ``program`` takes single micro-batches only, whose divisors add up to those of the mini-batch.
    """

    program: GraphFunction
    samples_too: bool
    words: str
    parts: tuple[int, ...] = ()
    apart: bool = False

    @property
    def columns(self) -> tuple[Any, ...]:
        """Names of the data columns from which the divisors are computed."""
        return self.program.columns

    def weights(self, columns: Sequence[Columns], sizes: Sequence[int]) -> tuple[list[list[float]], list[float]]:
        """Compute the weights with which the losses of micro-batches add up to the loss of the mini-batch.

        Args:
            columns: data columns of each micro-batch.
            sizes: number of samples of each micro-batch.

        Returns:
            (for each part of the loss, the weight of each micro-batch, 0 if the part's divisor is 0; for each part, the
            divisor of the mini-batch).

        Raises:
            DataError: the parts are summed, but the weights of the micro-batches differ between the terms.
        """
        each = list(zip(*(self.divisors(some, size) for some, size in zip(columns, sizes, strict=True)), strict=True))
        if self.apart:
            totals = [math.fsum(of_term) for of_term in each]
        else:
            whole = {name: torch.cat([some[name] for some in columns]) for name in self.columns}
            totals = self.divisors(whole, sum(sizes))
        by_term = [[x / total if total else 0.0 for x in xs] for xs, total in zip(each, totals, strict=True)]
        if self.parts:
            return [by_term[term] for term in self.parts], [totals[term] for term in self.parts]
        for term in range(1, len(by_term)):
            apart = [abs(one - other) for one, other in zip(by_term[0], by_term[term], strict=True)]
            if max(apart) > SAME_WEIGHT:
                worst = apart.index(max(apart))
                raise DataError(
                    f"The terms of the loss average over different numbers of items ({self.words}): micro-batch "
                    f"{worst} has {by_term[0][worst]:.3g} of those of one term and {by_term[term][worst]:.3g} of those "
                    "of another, so that no weight of its loss gives the loss of the mini-batch. Set "
                    "loss_over='minibatch' or num_microbatches=1, let the model return the sum of the terms as its own "
                    "loss (without a loss_fn), or add up instead of averaging and set loss_reduction='sum'."
                )
        return by_term[:1], totals[:1]

    def divisors(self, columns: Columns, size: int) -> list[float]:
        """Return the divisor of each term of the loss over ``columns``, which have ``size`` samples."""
        numbers = self.program((), (), (), [columns[name] for name in self.columns], None)  # type: ignore[arg-type]
        return [*map(float, numbers), *[float(size)] * self.samples_too]


Reduction = str | Callable[[Any], float] | LossCounts | WholeMinibatch
"""Average of a loss within a micro-batch: "mean" over its samples, "sum", "valid_tokens" over the targets other than
-100, a function (target) -> number of items, or the divisors that were read from the graph of the loss. WholeMinibatch
computes one loss over all micro-batches, which have no losses of their own."""


def loss_weights(
    reduction: Reduction, sizes: Sequence[int], targets: torch.Tensor | Sequence[Any] | None = None
) -> list[float]:
    """Compute the weight of each micro-batch's loss in the loss of the mini-batch.

    Args:
        sizes: number of samples of each micro-batch.
        targets: targets of the whole mini-batch, shape (sum(sizes), ...), or a sequence with one entry per micro-batch;
            for LossCounts, the data columns of each micro-batch. "mean" and "sum" do not use them.

    Returns:
        One weight per micro-batch. The loss of a micro-batch with weight 0, which has no valid target, must be left
        out, because an average over nothing is NaN.

    Raises:
        DataError: no micro-batch has a valid target, or targets are missing.
        ConfigError: ``reduction`` is a function that does not return a number of at least 0.
    """
    one = replace(reduction, parts=()) if isinstance(reduction, LossCounts) else reduction
    (weights,), _ = _shares(one, sizes, targets)
    return _not_empty(weights, sizes)


def update_weights(
    reduction: Reduction, sizes: Sequence[int], targets: Any, interval: int
) -> tuple[list[Weights], list[Weights]]:
    """Compute the weights of the micro-batches' losses if the micro-batches of a mini-batch belong to several updates.

    An update's micro-batches have the weights of ``loss_weights`` for these micro-batches, so that its gradient is the
    gradient of the loss over its own samples. The weights of an update without a valid target are 0.

    Args:
        reduction, sizes, targets: see ``loss_weights``.
        interval: micro-batches per update; divides the number of micro-batches.

    Returns:
        (weights in the gradients, shares in the loss of the mini-batch): two lists, equal if there is one update. Each
        has a tuple for every micro-batch, with a number for every part of the loss.

    Raises:
        DataError, ConfigError: as ``loss_weights``.
    """
    parts = _by_microbatch(targets, sizes)
    shares, _ = _shares(reduction, sizes, parts)
    for part in shares:
        _not_empty(part, sizes)
    weights = shares
    if interval < len(sizes):
        cuts = [slice(start, start + interval) for start in range(0, len(sizes), interval)]
        groups = [_shares(reduction, sizes[cut], None if parts is None else parts[cut])[0] for cut in cuts]
        weights = [[x for some in of_part for x in some] for of_part in zip(*groups, strict=True)]
    return list(zip(*weights, strict=True)), list(zip(*shares, strict=True))


def evaluation_shares(reduction: Reduction, sizes: Sequence[int], targets: Any) -> tuple[list[Weights], Weights]:
    """Compute the shares of micro-batches in the loss of an evaluation's mini-batch; arguments as in ``loss_weights``.

    A part of the loss without items has shares of 0, so that it adds nothing to the evaluation.

    Returns:
        (for each micro-batch, its share in every part of the loss; for each part, the number of items over which the
        part averages).

    Raises:
        DataError, ConfigError: as ``loss_weights``; but a mini-batch without a valid target is allowed.
    """
    shares, items = _shares(reduction, sizes, targets)
    return list(zip(*shares, strict=True)), tuple(items)


def _shares(reduction: Reduction, sizes: Sequence[int], targets: Any) -> tuple[list[list[float]], list[float]]:
    """Return, for each part of the loss, (shares of the micro-batches, items in the mini-batch), as two lists."""
    if reduction == "sum" or isinstance(reduction, WholeMinibatch):
        return [[1.0] * len(sizes)], [float(sum(sizes))]
    if reduction == "mean":
        counts = [float(size) for size in sizes]
    else:
        if targets is None:
            raise DataError(
                f"loss_reduction={reduction!r} counts targets, but the data has no target. Use 'mean' or 'sum'."
            )
        parts = _by_microbatch(targets, sizes)
        if isinstance(reduction, LossCounts):
            return reduction.weights(parts, sizes)
        counts = [_items(reduction, part) for part, _ in zip(parts, sizes, strict=True)]
    return [[count / (sum(counts) or 1.0) for count in counts]], [sum(counts)]


def _by_microbatch(targets: Any, sizes: Sequence[int]) -> Any:
    return targets.split(list(sizes)) if isinstance(targets, torch.Tensor) else targets


def _not_empty(weights: list[float], sizes: Sequence[int]) -> list[float]:
    if not any(weights):
        raise DataError(
            f"All targets of a mini-batch of {sum(sizes)} samples are {IGNORED_TARGET} or not counted, so its loss is "
            "an average over nothing. Leave such samples out of the data, or take a larger minibatch_size."
        )
    return weights


def _items(reduction: str | Callable[[Any], float], target: Any) -> float:
    """Count the items of ``target`` over which the loss of one micro-batch averages."""
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
    """Return the indices of the parts of a loss whose weight is not 0."""
    return [part for part, weight in enumerate(weights) if weight != 0.0]


def loss_parts(
    loss: Callable[[tuple[torch.Tensor, ...], Sequence[torch.Tensor]], Any] | None,
    targets: Sequence[Any],
    outputs: tuple[torch.Tensor, ...],
    columns: Columns,
    weights: Weights,
    microbatch: int,
) -> tuple[torch.Tensor, ...]:
    """Compute the parts of the loss whose weight is not 0, from the last stage's outputs.

    Raises:
        StageError: a part is not a scalar tensor.
    """
    if not any(weights):  # without a valid target the average over nothing would be NaN
        return ()
    assert loss is not None
    value = loss(outputs, [columns[name] for name in targets])
    parts = value if isinstance(value, tuple) else (value,)
    for part in parts:
        if not isinstance(part, torch.Tensor) or part.dim() != 0:
            what = f"shape {tuple(part.shape)}" if isinstance(part, torch.Tensor) else type(part).__name__
            raise StageError(
                f"The loss of {microbatch_words(microbatch)} is not a scalar tensor but has {what}. Let loss_fn "
                "reduce over the samples of a micro-batch (reduction='mean') and choose loss_reduction to match."
            )
    return tuple(parts[part] for part in counting(weights))


class LossTerm(NamedTuple):
    """Weighted part of a micro-batch's loss.

    Attributes:
        microbatch: number of the micro-batch in the run.
        part: index of the part of the loss.
        value: weighted value, a scalar tensor.
    """

    microbatch: int
    part: int
    value: torch.Tensor


def weighted(loss: torch.Tensor, share: float, microbatch: int, part: int = 0) -> LossTerm:
    """Multiply a part of a micro-batch's loss by its share in the loss of the mini-batch, in at least fp32."""
    # A 16-bit sum would stop growing after a few hundred micro-batches.
    return LossTerm(microbatch, part, loss.detach().to(torch.promote_types(loss.dtype, torch.float32)) * share)


def summed(terms: Sequence[LossTerm], messages: Sequence[tuple[torch.Tensor | None, ...]] = ()) -> torch.Tensor | None:
    """Add up terms in the order of micro-batches, and of parts within a micro-batch; None without terms.

    Args:
        messages: results of ``term_message`` from other replicas. The terms are then sorted on the device: reading
            their keys on the host would wait for all work that is queued on the device.
    """
    values: Sequence[torch.Tensor] = [term.value for term in terms]
    if messages:
        pairs = [(p, v) for p, v in (term_message(terms), *messages) if p is not None and v is not None]
        if pairs:
            order = torch.argsort(torch.cat([positions for positions, _ in pairs]))
            values = torch.cat([some for _, some in pairs])[order].unbind()
    total: torch.Tensor | None = None
    for value in values:
        total = value if total is None else total + value
    return total


def term_message(terms: Sequence[LossTerm]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return (sort keys, int64; values) of the terms, both of shape (terms,), to send to a replica.

    The keys increase in the order in which ``summed`` adds terms. Without terms, the result is (None, None).
    """
    if not terms:
        return None, None
    values = torch.stack([term.value for term in terms])
    first = terms[0].microbatch
    offsets = _positions(tuple((term.microbatch - first, term.part) for term in terms), values.device)
    return offsets + first * _PARTS, values


@lru_cache(maxsize=64)
def _positions(terms: tuple[tuple[int, int], ...], device: torch.device) -> torch.Tensor:
    """Return the sort key of each (micro-batch, part), int64 of shape (terms,).

    Cached, because a copy from the host would wait for all work that is queued on the device.
    """
    return torch.tensor([microbatch * _PARTS + part for microbatch, part in terms], device=device)
