"""What a loss averages over, counted from the data alone: the weight of each micro-batch in its mini-batch.

    cross_entropy(logits, labels)        the labels other than ignore_index, each with its class's weight
    (error * mask).sum() / mask.sum()    mask.sum()
    mse_loss(output, target)             the samples

A loss that is an average over D_i items of micro-batch i reproduces the mini-batch's when it weighs D_i / sum(D). Where
it divides by something that it made of the number first, as max(D, 1) or D + 1, it weighs by that: of micro-batch i,
divided by that of the whole mini-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raypipe.engine.stage import GraphFunction
from raypipe.errors import DataError

__all__ = ["Bound", "LossCounts", "count_labels"]

SAME_WEIGHT = 1e-9
"""Weights of two terms that differ by less are the same number, rounded differently."""


def count_labels(labels: torch.Tensor, ignore_index: int, class_weights: torch.Tensor | None = None) -> torch.Tensor:
    """What torch's cross_entropy and nll_loss divide by: a number of labels, or the sum of their classes' weights."""
    valid = labels != ignore_index
    if class_weights is None:
        return valid.sum(dtype=torch.float64)
    return class_weights.double()[labels[valid]].sum()


@dataclass(frozen=True, slots=True)
class Bound:
    """What a loss makes of a number before it divides by it: clamp(least, most) + added."""

    least: float = -math.inf
    most: float = math.inf
    added: float = 0.0

    def of(self, number: float) -> float:
        """The divisor."""
        return min(max(number, self.least), self.most) + self.added


@dataclass(frozen=True, slots=True, eq=False)
class LossCounts:
    """Counts the items that the terms of a loss average over.

    Attributes:
        program: from data columns to one number per counted term.
        samples_too: another term, counted last, averages over the samples.
        words: what is counted, for people.
        parts: where the last stage returns the terms of the loss one by one, which count belongs to each; empty where
            it returns their sum, whose terms must then all average over the same items.
        bounds: of each counted term, what the loss makes of the number before it divides by it, in this order.
    """

    program: GraphFunction
    samples_too: bool
    words: str
    parts: tuple[int, ...] = ()
    bounds: tuple[tuple[Bound, ...], ...] = ()

    @property
    def columns(self) -> tuple[Any, ...]:
        """Data columns that are read."""
        return self.program.columns

    def by_term(self, parts: Sequence[Mapping[Any, torch.Tensor]], sizes: Sequence[int]) -> list[list[float]]:
        """Items of each micro-batch, by term.

        Args:
            parts: columns of each micro-batch.
            sizes: samples of each micro-batch.
        """
        found = [
            self.program((), (), (), [part[name] for name in self.columns], None)  # type: ignore[arg-type]
            for part in parts
        ]
        counts = [[float(number) for number in numbers] for numbers in zip(*found, strict=True)]
        return [*counts, [float(size) for size in sizes]] if self.samples_too else counts

    def divisor(self, term: int, number: float) -> float:
        """What a term divides by where it counts this number."""
        for bound in self.bounds[term] if term < len(self.bounds) else ():
            number = bound.of(number)
        return number

    def weights(self, term: int, counts: Sequence[float]) -> list[float]:
        """Of micro-batches, so that their losses add up to the loss of all of them; zeros where it divides by nothing.

        Args:
            term: that averages over these.
            counts: of its items in each micro-batch.
        """
        whole = self.divisor(term, sum(counts))
        return [self.divisor(term, count) / whole if whole else 0.0 for count in counts]

    def of_minibatch(self, parts: Sequence[Mapping[Any, torch.Tensor]], sizes: Sequence[int]) -> list[float]:
        """Items of each micro-batch where all terms of the loss average over the same.

        Raises:
            DataError: they do not, and then no weight of a micro-batch is right.
        """
        by_term = self.by_term(parts, sizes)
        shares = [self.weights(term, counts) for term, counts in enumerate(by_term)]
        for counts, share in zip(by_term[1:], shares[1:], strict=True):
            worst = max(range(len(sizes)), key=lambda i: abs(share[i] - shares[0][i]))
            if abs(share[worst] - shares[0][worst]) > SAME_WEIGHT:
                raise DataError(
                    f"The terms of the loss average over different numbers of items ({self.words}): micro-batch "
                    f"{worst} has {by_term[0][worst]:g} of {sum(by_term[0]):g} for one term and {counts[worst]:g} of "
                    f"{sum(counts):g} for another, so that no weight of its loss gives the loss of the mini-batch. Set "
                    "num_microbatches=1, let the model return the sum of the terms as its own loss (without a "
                    "loss_fn), or add up instead of averaging and set loss_reduction='sum'."
                )
        return by_term[0]
