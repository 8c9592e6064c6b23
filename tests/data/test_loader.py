"""DataLoaders and collate functions: taken over, or refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from raypipe.data import Pad
from raypipe.data.open_data import batch_size_of, notes_on, open_data
from raypipe.errors import DataError

X, Y = torch.arange(20.0).reshape(10, 2), torch.arange(10)
DATA = TensorDataset(X, Y)
RAGGED = [{"input_ids": list(range(1, n % 5 + 2)), "number": n} for n in range(10)]


def doubled(items: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([x for x, _ in items]) * 2, torch.stack([y for _, y in items])


def noisy(items: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = doubled(items)
    return x + torch.rand(x.shape), y


def everything(source: Any, epoch: int = 0) -> tuple[torch.Tensor, ...]:
    return source.read(epoch, 0, source.num_samples, (0, 1))  # type: ignore[no-any-return]


def test_a_loader_without_shuffling_keeps_the_order_of_the_dataset() -> None:
    x, y = everything(open_data(DataLoader(DATA, batch_size=4), seed=3))
    assert torch.equal(x, X)
    assert torch.equal(y, Y)


def test_a_loader_that_shuffles_has_the_order_of_its_dataset_given_alone() -> None:
    loader = DataLoader(DATA, batch_size=4, shuffle=True, num_workers=2)
    for epoch in range(2):
        found, alone = everything(open_data(loader, seed=3), epoch), everything(open_data(DATA, seed=3), epoch)
        assert torch.equal(found[1], alone[1])
    assert [note.split(":")[0] for note in notes_on(loader)] == [
        "train_data is a DataLoader with shuffle=True",
        "train_data is a DataLoader with num_workers=2",
    ]
    assert batch_size_of(loader, "auto") == batch_size_of(loader, 4) == 4


def test_two_collate_functions_are_refused_and_the_same_one_twice_is_not() -> None:
    loader = DataLoader(DATA, batch_size=4, collate_fn=doubled)
    with pytest.raises(DataError, match="has a collate_fn of its own"):
        open_data(loader, seed=3, collate=noisy)
    assert torch.equal(everything(open_data(loader, seed=3, collate=doubled))[0], X * 2)
    assert torch.equal(everything(open_data(DataLoader(DATA, batch_size=4), seed=3, collate=doubled))[0], X * 2)


def test_ragged_lists_are_padded_by_a_collate_function_and_refused_without() -> None:
    source = open_data(RAGGED, seed=0, shuffle=False, collate=Pad(8))
    assert source.columns == ("input_ids", "number", "attention_mask")
    read: Any = source.read(0, 2, 3, ("input_ids", "number"))
    assert read["input_ids"].shape == (3, 8)
    assert read["number"].tolist() == [2, 3, 4]
    with pytest.raises(DataError, match=r"a list of shape \(2,\) in column 'input_ids'.*collate_fn=raypipe\.data\.Pad"):
        open_data(RAGGED, seed=0)


def test_lists_of_equal_length_become_tensors() -> None:
    rows = [{"ids": [n, n + 1], "mask": [[True], [False]]} for n in range(5)]
    read: Any = open_data(rows, seed=0, shuffle=False).read(0, 0, 5, ("ids", "mask"))
    assert read["ids"].tolist() == [[n, n + 1] for n in range(5)]
    assert (read["mask"].shape, read["mask"].dtype) == ((5, 2, 1), torch.bool)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(DATA)


class Doubling(DataLoader[Any]):
    def __iter__(self) -> Any:
        return ((x * 2, y) for x, y in super().__iter__())


class WebLoader(Endless):
    """A pipeline that begins with a DataLoader, as webdataset has it."""

    pipeline = (DataLoader(Endless(), batch_size=2),)


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (DataLoader(Endless(), batch_size=2), "dataset=Endless"),
        (WebLoader(), r"The WebLoader gives batches of a DataLoader, but .*minibatch_size"),
        (DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 10, 10)), "sampler=WeightedRandomSampler"),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]]), "batch_sampler=list"),
        (DataLoader(DATA, batch_size=4, drop_last=True), "drop_last=True"),
        (DataLoader(DATA, batch_size=4, worker_init_fn=print), "worker_init_fn=print"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)), "with replacement"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=4)), "or num_samples"),
        (DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, True)), "batch_sampler=BatchSampler"),
        (DataLoader(DATA, batch_size=None), "batch_sampler=NoneType"),
        (DataLoader(DATA, sampler=SequentialSampler(range(4))), r"sampler=SequentialSampler\(range\)"),
        (DataLoader(DATA, sampler=RandomSampler(range(4))), r"sampler=RandomSampler\(range\)"),
        (Doubling(DATA, batch_size=4), r"__iter__=Doubling\.__iter__"),
    ],
)
def test_what_a_pipeline_would_not_follow_is_refused_by_name(loader: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        open_data(loader, seed=0)


@pytest.mark.parametrize(
    ("collate", "said"),
    [
        (lambda items: {"x": [1, 2]}, "made list of 1 items in column 'x'"),
        (lambda items: torch.zeros(3), r"made shape \(3,\) of 1 items in column 0"),
        (lambda items: 1 / 0, "collate_fn fails for items"),
    ],
)
def test_collate_functions_that_make_no_batch(collate: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        open_data(DATA, seed=0, collate=collate)


@dataclass
class Sample:
    x: torch.Tensor
    number: int


def together(items: list[Sample]) -> Sample:
    return Sample(torch.stack([item.x for item in items]), torch.tensor([item.number for item in items]))  # type: ignore[arg-type]


@pytest.mark.parametrize("collate", [None, together])
def test_fields_of_a_dataclass_are_columns(collate: Any) -> None:
    items = [Sample(x, number) for number, x in enumerate(X[:4])]
    read: Any = open_data(items, seed=0, shuffle=False, collate=collate).read(0, 0, 4, ("x", "number"))
    assert torch.equal(read["x"], X[:4])
    assert read["number"].tolist() == [0, 1, 2, 3]


def test_a_path_has_no_items_to_collate(tmp_path: Any) -> None:
    with pytest.raises(DataError, match=r"has rows of columns\. Leave collate_fn out"):
        open_data(str(tmp_path), seed=0, collate=doubled)
