"""Whether weighted losses of micro-batches make the loss of the mini-batch, tried on real rows.

    whole      loss of rows 0 1 2 3
    parts      loss of rows 0 1, loss of rows 2 3; loss of row 0, loss of rows 1 2 3; loss of each row

The model and its loss are one function of rows here, called in evaluation mode without gradients, so that dropout and
batch statistics do not disturb. A loss that compares rows with each other (contrastive pairs, a spread over the batch)
has no weights that fit, and a wrong weight of padding shows wherever rows have different numbers of labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raypipe.engine.microbatch import Reduction, loss_weights
from raypipe.errors import DataError, RaypipeError

__all__ = [
    "MANY_ROWS", "NUM_ROWS", "Grouping", "group_losses", "misfit", "rows_through", "tolerance_of", "weights_of",
]  # fmt: skip

NUM_ROWS = 4
"""That go through the model."""
FEW_ROWS, LARGE = 2, 1 << 28
"""That go through one of so many parameters, each of which takes a CPU a second or more."""
MANY_ROWS = 16
"""That a loss_fn is tried on without the model: what few of the rows have shows only in many."""
TOLERANCE = 3e-5
"""Of the largest loss: float32 sums in another order differ by less, wrong weights by more."""

Columns = Mapping[Any, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Grouping:
    """Rows cut into micro-batches.

    Attributes:
        sizes: of the micro-batches.
        parts: their columns.
        losses: of each, as the user's code computes it.
        tolerance: of the largest loss, by which sums may differ; see ``tolerance_of``.
    """

    sizes: tuple[int, ...]
    parts: tuple[Columns, ...]
    losses: tuple[float, ...]
    tolerance: float = TOLERANCE


def tolerance_of(dtype: torch.dtype) -> float:
    """Of losses of this type: those of 16 bits are rounded more coarsely than float32 sums differ."""
    return max(TOLERANCE, 2 * torch.finfo(dtype).eps) if dtype.is_floating_point else TOLERANCE


def group_losses(rows: Columns, loss_of: Callable[[Columns], float]) -> tuple[float, list[Grouping]]:
    """The loss of all rows together, and those of micro-batches of them.

    Of a loss that cannot take one row (a variance, the two largest) only the groupings that it takes are tried.

    Args:
        rows: columns, of at least 2 samples.
        loss_of: the loss of some rows.
    """
    count = len(next(iter(rows.values())))
    whole = loss_of(rows)
    groupings = []
    failed: Exception | None = None
    for sizes in _groupings(count):
        parts = tuple(_split(rows, sizes))
        try:
            groupings.append(Grouping(sizes, parts, tuple(map(loss_of, parts))))
        except RaypipeError:
            raise
        except Exception as error:  # noqa: BLE001  (whatever the user's code raises)
            failed = error
    if failed is not None and not groupings:
        raise failed
    return whole, groupings


def _groupings(count: int) -> list[tuple[int, ...]]:
    """Halves, one row and the others, and rows by themselves."""
    half = count // 2
    return list(dict.fromkeys([(half, count - half), (1, count - 1), (1,) * count]))


def rows_through(model: torch.nn.Module) -> int:
    """How many rows are worth their time in this model."""
    return FEW_ROWS if sum(p.numel() for p in model.parameters()) >= LARGE else NUM_ROWS


def misfit(whole: float, grouping: Grouping, weights: Sequence[float] | None) -> float | None:
    """What the weighted losses of a grouping add up to where that is not the loss of the whole; None where it is.

    Args:
        weights: of the micro-batches; None where there is nothing to weigh by.
    """
    if weights is None:
        return None if math.isnan(whole) else math.nan
    total = math.fsum(w * loss for w, loss in zip(weights, grouping.losses, strict=True) if w)
    scale = max(abs(whole), *map(abs, (x for x in grouping.losses if math.isfinite(x))), 1e-3)
    return None if abs(total - whole) <= grouping.tolerance * scale else total


def weights_of(reduction: Reduction, grouping: Grouping, target: Any) -> list[float] | None:
    """What the micro-batches of a grouping weigh; None where there is nothing to count.

    Args:
        target: column that "valid_tokens" and functions count.
    """
    counted: Any = grouping.parts
    if isinstance(reduction, str) or callable(reduction):
        counted = [part[target] for part in grouping.parts] if target is not None else None
    try:
        return loss_weights(reduction, grouping.sizes, counted)
    except DataError:
        return None


def _split(rows: Columns, sizes: Sequence[int]) -> Iterator[dict[Any, torch.Tensor]]:
    at = 0
    for size in sizes:
        yield {name: column[at : at + size] for name, column in rows.items()}
        at += size
