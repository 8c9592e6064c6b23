"""Data sets of PyTorch: any items become columns, and items that are no batch are refused."""

from __future__ import annotations

import pickle
import platform
from pathlib import Path

import numpy as np
import pytest
import torch

from raypipe.data.open_data import open_data
from raypipe.errors import DataError


class Dicts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, i: int) -> dict[str, object]:
        return {"x": np.full((2,), i, dtype=np.float32), "n": i, "t": torch.tensor([i, i + 1])}


class Short(Dicts):
    def __getitems__(self, indices: list[int]) -> list[dict[str, object]]:
        return [self[0]]


TUPLES = [(torch.full((3,), i), float(i), np.float64(i)) for i in range(11)]


@pytest.mark.parametrize(
    ("dataset", "column"),
    [
        (torch.utils.data.TensorDataset(torch.zeros(11, 2), torch.arange(11)), 1),
        (torch.utils.data.Subset(torch.utils.data.TensorDataset(torch.arange(20)), range(11)), 0),
        (TUPLES, 1),
        (TUPLES, 2),
        (Dicts(), "n"),
        (list(range(11)), 0),
    ],
)
def test_torch_datasets(dataset: object, column: int | str) -> None:
    def numbers(source, start: int, count: int) -> list[float]:
        read = source.read(1, start, count, (column,))
        return (read[0] if isinstance(column, int) else read[column]).tolist()

    source = open_data(dataset, seed=5)
    whole = numbers(source, 0, 11)
    assert sorted(whole) == list(range(11))
    assert whole != sorted(whole)
    assert numbers(pickle.loads(pickle.dumps(source)), 3, 5) == whole[3:8]
    assert numbers(source, 11, 0) == []
    assert numbers(open_data(dataset, seed=5, shuffle=False), 0, 11) == list(range(11))


class Scaled(torch.utils.data.TensorDataset):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(tensor * 10 for tensor in super().__getitem__(index))


def test_a_subclass_of_tensor_dataset_is_read_by_its_own_getitem() -> None:
    source = open_data(Scaled(torch.arange(5)), seed=0, shuffle=False)
    assert source.read(0, 0, 5, (0,))[0].tolist() == [0, 10, 20, 30, 40]


def test_parts_of_items() -> None:
    source = open_data(Dicts(), seed=0)
    assert source.columns == ("x", "n", "t")
    read = source.read(0, 0, 4, ("t", "x"))
    assert list(read) == ["t", "x"]
    assert read["x"].dtype == torch.float32
    assert torch.equal(read["t"][:, 0].float(), read["x"][:, 0])
    assert torch.equal(source.read(0, 0, 4, (2,))[0], read["t"])
    constant = torch.zeros(5)
    shared = open_data([(constant, i) for i in range(4)], seed=0).read(0, 0, 4, (0,))[0]
    shared.fill_(1)
    assert constant.sum() == 0


def test_items_that_are_no_batch_are_refused() -> None:
    with pytest.raises(DataError, match="is empty"):
        open_data([], seed=0)
    with pytest.raises(DataError, match=r"Column 1 of list holds a str"):
        open_data([(1, "a")], seed=0)
    with pytest.raises(
        DataError, match=r"Item 1 of list has shape \(3,\) and type \w+ in column 0, but item 0 has shape \(2,\)"
    ):
        open_data([(torch.zeros(2),), (torch.zeros(3),)], seed=0).read(0, 0, 2, (0,))
    with pytest.raises(DataError, match=r"Item 1 of list has the columns \[0\]"):
        open_data([(1, 2), (3,)], seed=0).read(0, 0, 2, (0,))
    with pytest.raises(DataError, match=r"Column 0 of item 2 of list cannot become a tensor: .*Overflow"):
        open_data([(1,), (2,), (2**70,)], seed=0).read(0, 0, 3, (0,))
    with pytest.raises(DataError, match=r"Column 0 of item 0 of list cannot become a tensor: .*byte order"):
        open_data([(np.ones(2, dtype=">f4"),)], seed=0)
    with pytest.raises(
        DataError, match=r"Column 0 of list holds tensors that are sparse, nested or on the meta device"
    ):
        open_data([(torch.eye(2).to_sparse(),)], seed=0)
    with pytest.raises(DataError, match=r"collate_fn made a tensor that is sparse, nested .*in column 0"):
        open_data([1], seed=0, collate=lambda items: (torch.ones(len(items), 2).to_sparse(),))
    with pytest.raises(DataError, match=r"Short\.__getitems__ returned 1 items for 4 indices"):
        open_data(Short(), seed=0)
    with pytest.raises(DataError, match="an epoch has 1"):
        open_data([1], seed=0).read(0, 1, 1, (0,))
    with pytest.raises(DataError, match="no column 'x'"):
        open_data([1], seed=0).read(0, 0, 1, ("x",))


class Files:
    """Items in files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float((self.folder / str(index)).read_text()))


@pytest.mark.parametrize("relative", [True, False])
def test_a_file_that_this_node_lacks_is_no_wrong_item(
    relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for index in range(2):
        (tmp_path / str(index)).write_text("1.0")
    source = open_data(Files(Path() if relative else tmp_path), seed=0, shuffle=False)
    (tmp_path / "1").unlink()
    with pytest.raises(DataError, match=r"Item 1 of Files cannot be read.*FileNotFoundError") as refused:
        source.read(0, 0, 2, source.columns)
    said = str(refused.value)
    assert (f"The working directory was {tmp_path} on {platform.node()}." in said) is relative
    assert f"this one on {platform.node()}: give an absolute path that every node has" in said
    assert "Mend the item" not in said
