"""How many tokens a mini-batch has, where it has token ids; counted by a stage that reads them.

    columns input_ids, attention_mask, labels     input_ids
    columns tokens, targets                       tokens
    columns 0, 1 of tuples                        0, where it holds int64 or int32 of shape (samples, length)

The first of these rules that fits names the column. Each of its entries is a token, padding too: it takes as much
computation as any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raypipe.ir.segment import Segment

__all__ = ["TokenCount", "token_column"]

NAMES = ("input_ids", "tokens")
_IDS = (torch.int64, torch.int32)


def token_column(names: Sequence[Any], example: Mapping[Any, torch.Tensor]) -> Any:
    """The column that holds token ids, as stages call it; None where no rule finds one.

    Args:
        names: of the data's columns in their order, as the data has them.
        example: some samples, by number or by name.
    """
    for name in NAMES:
        if name in names:
            return name if name in example else list(names).index(name)
    first = example.get(0)
    ids = first is not None and first.dtype in _IDS and first.dim() == 2 and first.shape[1] > 1
    return 0 if ids else None


class TokenCount:
    """Of one stage.

    Args:
        column: that holds token ids; None counts nothing.
    """

    def __init__(self, column: Any) -> None:
        self._column = column
        self._found: dict[int, int] = {}

    def forward(self, microbatch: int, columns: Mapping[Any, torch.Tensor]) -> None:
        """A micro-batch of training, and what the stage reads of it."""
        if self._column is not None and self._column in columns:
            self._found[microbatch] = columns[self._column].numel()

    def take(self, segment: Segment, step: int) -> int:
        """Of the mini-batch of this step, which is over; 0 where the stage reads none."""
        count = len(segment.microbatch_samples)
        first = segment.first_microbatch + (step - segment.first_step) * count
        return sum(self._found.pop(microbatch, 0) for microbatch in range(first, first + count))
