"""A collate function of the user's: from the items of a mini-batch to its columns.

It is called with all samples of a mini-batch, not of a micro-batch, so that what it decides (the length to pad to) does
not depend on how the mini-batch is cut. Every stage calls it for itself and takes its own columns. It may draw random
numbers, as masks of a masked language model: the global generators are seeded by (seed, epoch, first row) around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from raypipe.engine.data.stacking import is_plain, parts_of
from raypipe.engine.item_randomness import own_generators, seed_generators
from raypipe.engine.user_lines import LEAVING, quoted, short
from raypipe.errors import DataError

__all__ = ["Collate", "collated"]

Collate = Callable[[list[Any]], Any]
COLLATING = 1 << 40
"""Added to the number of the first row, so that collating draws other numbers than that row's item."""


def collated(collate: Collate, items: list[Any], rows: Sequence[int], seed: int, epoch: int) -> dict[Any, torch.Tensor]:
    """The columns of these items.

    Args:
        rows: numbers of the items in the dataset.

    Returns:
        By name or number, tensors of shape (len(items), ...).

    Raises:
        DataError: it raised, or made of them something that is no batch; says what.
    """
    with own_generators():
        seed_generators(seed, epoch, rows[0] + COLLATING)
        try:
            batch = collate(list(items))
        except LEAVING:
            raise
        except BaseException as error:
            raise DataError(
                f"collate_fn fails for items {rows[0]} and others{quoted(error)}: {short(error)} It is called with the "
                f"list of a mini-batch's items, here {len(items)}."
            ) from error
    found = {}
    for name, value in parts_of(batch).items():
        tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        if isinstance(tensor, torch.Tensor) and not is_plain(tensor):
            raise DataError(
                f"collate_fn made a tensor that is sparse, nested or on the meta device in column {name!r}, which no "
                "micro-batch can be cut from. Let it return ordinary ones, as to_dense() and Pad make them."
            )
        if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0 or len(tensor) != len(items):
            what = f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(value).__name__
            raise DataError(
                f"collate_fn made {what} of {len(items)} items in column {name!r}. Let it return a tensor with one row "
                "for each item in every column, in a dict, a dataclass or a tuple."
            )
        found[name] = tensor
    return found
