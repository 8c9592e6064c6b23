"""Refusal of datasets and collate functions that change when they are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from raypipe.data.open_data import open_data
from raypipe.errors import DataError
from raypipe.prepare.inputs import refuse_stateful_data

pytestmark = pytest.mark.engine

X = torch.arange(12.0).view(6, 2)


class Cached:
    """Keeps every item that it has read."""

    def __init__(self) -> None:
        self.items: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.items.setdefault(index, X[index] + 1)


class Counting(Cached):
    """Counts the items that it has read."""

    reads = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return X[index]


def test_a_collate_function_with_state_is_refused() -> None:
    seen: list[int] = []

    def counting(items: list[Any]) -> torch.Tensor:
        seen.append(len(items))
        return torch.stack([x for (x,) in items])

    source = open_data(TensorDataset(X), seed=3, collate=counting)
    with pytest.raises(DataError, match=r"changes the number of items in .*seen"):
        refuse_stateful_data(source)


def test_a_dataset_with_a_counter_is_refused() -> None:
    source = open_data(Counting(), seed=3)
    with pytest.raises(DataError, match=r"Reading items of Counting changes .*reads with every call"):
        refuse_stateful_data(source)


@pytest.mark.parametrize("data", [TensorDataset(X), Cached()])
def test_caches_and_tensors_are_accepted(data: Any) -> None:
    refuse_stateful_data(open_data(data, seed=3))
