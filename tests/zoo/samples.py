"""Data of the zoo's rows: seeded tensors of a few samples, and datasets that draw, each of ``count`` samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from tests.models import Records

__all__ = [
    "WORDS", "Drawn", "classes", "counted_pairs", "images", "masks", "numbers", "sentences", "signals", "spoken",
    "thirds", "translations", "vectors",
]  # fmt: skip

WORDS = 32
"""Size of the vocabulary; 0 pads."""
NUM_CLASSES = 5


def _drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vectors(count: int, width: int = 6) -> TensorDataset:
    """(count, width) numbers and a class each."""
    drawn = _drawn(2)
    return TensorDataset(
        torch.randn(count, width, generator=drawn), torch.randint(0, NUM_CLASSES, (count,), generator=drawn)
    )


def numbers(count: int, width: int = 6, out: int = 5) -> TensorDataset:
    """(count, width) numbers and (count, out) numbers."""
    drawn = _drawn(3)
    return TensorDataset(torch.randn(count, width, generator=drawn), torch.randn(count, out, generator=drawn))


def images(count: int, size: int = 8) -> TensorDataset:
    """(count, 3, size, size) and a class each."""
    drawn = _drawn(4)
    return TensorDataset(
        torch.randn(count, 3, size, size, generator=drawn), torch.randint(0, NUM_CLASSES, (count,), generator=drawn)
    )


def masks(count: int) -> TensorDataset:
    """(count, 2, 8, 8) and a class of 2 for every pixel."""
    drawn = _drawn(5)
    return TensorDataset(
        torch.randn(count, 2, 8, 8, generator=drawn), torch.randint(0, 2, (count, 8, 8), generator=drawn)
    )


def signals(count: int, length: int = 12) -> TensorDataset:
    """(count, length, 4) numbers and a class each."""
    drawn = _drawn(6)
    return TensorDataset(
        torch.randn(count, length, 4, generator=drawn), torch.randint(0, NUM_CLASSES, (count,), generator=drawn)
    )


def spoken(count: int) -> TensorDataset:
    """(count, 12, 4) numbers and what CTC wants: 3 labels, none of them the blank 0."""
    drawn = _drawn(7)
    return TensorDataset(torch.randn(count, 12, 4, generator=drawn), torch.randint(1, 6, (count, 3), generator=drawn))


def thirds(make: Callable[[int], TensorDataset]) -> Callable[[int], TensorDataset]:
    """The same with three classes, which the nets of ``tests/nets.py`` know."""

    def made(count: int) -> TensorDataset:
        inputs, targets = make(count).tensors
        return TensorDataset(inputs, targets % 3)

    return made


def classes(count: int) -> TensorDataset:
    """Ids (count, 8) and a class for each token."""
    drawn = _drawn(8)
    return TensorDataset(
        torch.randint(1, WORDS, (count, 8), generator=drawn), torch.randint(0, NUM_CLASSES, (count, 8), generator=drawn)
    )


def counted_pairs(ignored: int) -> Callable[[int], Any]:
    """As ``classes``, where every row has another number of targets that count; some rows have none."""

    def pairs(count: int) -> TensorDataset:
        ids, targets = classes(count).tensors
        kept = torch.randint(0, 9, (count, 1), generator=_drawn(9))
        return TensorDataset(ids, targets.masked_fill(torch.arange(8) >= kept, ignored))

    return pairs


def sentences(count: int, *, padded: bool = False, mask: bool = False, length: int = 8, **more: Any) -> Records:
    """input_ids and labels; padded: another number of tokens in each row, labels of -100 behind it.

    Args:
        mask: with an attention_mask.
        more: names of further columns -> (row number) -> tensor.
    """
    drawn = _drawn(10)
    items = []
    for row in range(count):
        ids = torch.randint(1, WORDS, (length,), generator=drawn)
        kept = int(torch.randint(2, length + 1, (), generator=drawn))
        hidden = torch.arange(length) >= kept if padded else torch.zeros(length, dtype=torch.bool)
        item = {"input_ids": ids.masked_fill(hidden, 0), "labels": ids.masked_fill(hidden, -100)}
        if mask:
            item["attention_mask"] = (~hidden).long()
        items.append({**item, **{name: make(row) for name, make in more.items()}})
    return Records(items)


def translations(count: int) -> Records:
    """input_ids of 7 and labels of 5 tokens, the last of them padding in some rows."""
    drawn = _drawn(11)
    items = []
    for _ in range(count):
        labels = torch.randint(1, WORDS, (5,), generator=drawn)
        labels[int(torch.randint(2, 6, (), generator=drawn)) :] = -100
        items.append({"input_ids": torch.randint(1, WORDS, (7,), generator=drawn), "labels": labels})
    return Records(items)


class Drawn(Dataset):
    """Items that are drawn anew each time: ``make(row)`` may use torch's, numpy's and Python's generators."""

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self.count, self.make = count, make

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Any:
        return self.make(row)
