"""What a loss averages over, counted from the data alone: the weight of each micro-batch in its mini-batch.

    cross_entropy(logits, labels)        the labels other than ignore_index, each with its class's weight
    (error * mask).sum() / mask.sum()    mask.sum()
    mse_loss(output, target)             the samples

A loss that is an average over D_i items of micro-batch i reproduces the mini-batch's when it weighs D_i / sum(D).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raypipe.engine.stage import GraphFunction
from raypipe.errors import DataError

__all__ = ["LossCounts", "count_labels"]

SAME_WEIGHT = 1e-9
"""Weights of two terms that differ by less are the same number, rounded differently."""


def count_labels(labels: torch.Tensor, ignore_index: int, class_weights: torch.Tensor | None = None) -> torch.Tensor:
    """What torch's cross_entropy and nll_loss divide by: a number of labels, or the sum of their classes' weights."""
    valid = labels != ignore_index
    if class_weights is None:
        return valid.sum(dtype=torch.float64)
    return class_weights.double()[labels[valid]].sum()


@dataclass(frozen=True, slots=True, eq=False)
class LossCounts:
    """Counts the items that the terms of a loss average over.

    Attributes:
        program: from data columns to one number per counted term.
        samples_too: another term averages over the samples.
        words: what is counted, for people.
    """

    program: GraphFunction
    samples_too: bool
    words: str

    @property
    def columns(self) -> tuple[Any, ...]:
        """Data columns that are read."""
        return self.program.columns

    def count(self, columns: Mapping[Any, torch.Tensor], samples: int) -> tuple[float, ...]:
        """Items of one micro-batch, by term."""
        found = self.program((), (), (), [columns[name] for name in self.columns], None)  # type: ignore[arg-type]
        counts = tuple(float(number) for number in found)
        return (*counts, float(samples)) if self.samples_too else counts

    def of_minibatch(self, parts: Sequence[Mapping[Any, torch.Tensor]], sizes: Sequence[int]) -> list[float]:
        """Items of each micro-batch.

        Args:
            parts: columns of each micro-batch.
            sizes: samples of each micro-batch.

        Raises:
            DataError: terms of the loss average over different numbers of items, which no weight of a micro-batch
                makes right.
        """
        by_term = list(zip(*(self.count(part, size) for part, size in zip(parts, sizes, strict=True)), strict=True))
        shares = [[count / (sum(counts) or 1.0) for count in counts] for counts in by_term]
        for counts, share in zip(by_term[1:], shares[1:], strict=True):
            worst = max(range(len(sizes)), key=lambda i: abs(share[i] - shares[0][i]))
            if abs(share[worst] - shares[0][worst]) > SAME_WEIGHT:
                raise DataError(
                    f"The terms of the loss average over different numbers of items ({self.words}): micro-batch "
                    f"{worst} has {by_term[0][worst]:g} of {sum(by_term[0]):g} for one term and {counts[worst]:g} of "
                    f"{sum(counts):g} for another, so that no weight of its loss gives the loss of the mini-batch. Set "
                    "num_microbatches=1, let every term average over the same items, or add up instead of averaging "
                    "and set loss_reduction='sum'."
                )
        return list(by_term[0])
