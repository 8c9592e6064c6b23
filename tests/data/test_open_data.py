"""Any samples of any epoch by position, from every kind of source; only what is asked is decoded."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raypipe.data import arrow_source
from raypipe.data.open_data import open_data
from raypipe.errors import DataError

IN_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def table(rows: int, first: int = 0) -> pa.Table:
    """Rows that know their number: id i, pair (2i, 2i + 1), 2 x 3 block of i, flag i odd."""
    ids = np.arange(first, first + rows)
    inner = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 6).astype(np.float32)), 3)
    return pa.table(
        {
            "id": pa.array(ids.astype(np.int16)),
            "pair": pa.FixedSizeListArray.from_arrays(
                pa.array((np.stack([2 * ids, 2 * ids + 1], 1)).ravel().astype(np.uint8)), 2
            ),
            "block": pa.FixedSizeListArray.from_arrays(inner, 2),
            "flag": pa.array(ids % 2 == 1),
            "equal": pa.array([[float(i), -float(i)] for i in ids], type=pa.list_(pa.float64())),
        }
    )


def write(folder: Path, rows: list[int], group: int = 4, form: str = "parquet") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for index, count in enumerate(rows):
        path = folder / f"part-{index:03d}.{form}"
        if form == "parquet":
            pq.write_table(table(count, first), path, row_group_size=group)
        else:
            with pa.ipc.new_file(path, table(0).schema) as file:
                file.write_table(table(count, first), max_chunksize=group)
        first += count
    return folder


def ids(source, epoch: int, start: int, count: int) -> list[int]:
    return source.read(epoch, start, count, ["id"])["id"].tolist()


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_columns_become_tensors_of_their_own_dtype(tmp_path: Path, form: str) -> None:
    source = open_data(write(tmp_path, [7, 6], form=form), seed=3, rows_per_window=6)
    assert source.num_samples == 13
    assert source.columns == ("id", "pair", "block", "flag", "equal")
    read = source.read(0, 2, 9, source.columns)
    number = read["id"].long()
    assert {name: (value.dtype, tuple(value.shape)) for name, value in read.items()} == {
        "id": (torch.int16, (9,)),
        "pair": (torch.uint8, (9, 2)),
        "block": (torch.float32, (9, 2, 3)),
        "flag": (torch.bool, (9,)),
        "equal": (torch.float64, (9, 2)),
    }
    assert torch.equal(read["pair"].long(), torch.stack([2 * number, 2 * number + 1], 1))
    assert torch.equal(read["block"], number.float()[:, None, None].expand(9, 2, 3))
    assert torch.equal(read["flag"], number % 2 == 1)
    assert torch.equal(read["equal"], torch.stack([number, -number], 1).double())


def test_what_was_read_may_be_written_to(tmp_path: Path) -> None:
    source = open_data(write(tmp_path, [8]), seed=0)
    before = ids(source, 0, 0, 8)
    source.read(0, 0, 8, ["id"])["id"].zero_()
    assert ids(source, 0, 0, 8) == before


@IN_FOLDER
@given(
    rows=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
    window=st.integers(1, 12),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_any_chunking_gives_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory, rows: list[int], window: int, seed: int, data: st.DataObject
) -> None:
    folder = write(tmp_path_factory.mktemp("data"), rows, group=3)
    total = sum(rows)
    whole = ids(open_data(folder, seed=seed, rows_per_window=window), 2, 0, total)
    assert sorted(whole) == list(range(total))
    source = open_data(folder, seed=seed, rows_per_window=window)
    cuts = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=5))})
    assert [i for a, b in pairwise(cuts) for i in ids(source, 2, a, b - a)] == whole


def test_epochs_and_seeds_differ_and_repeat(tmp_path: Path) -> None:
    folder = write(tmp_path, [20, 20])
    walks = {(seed, epoch): ids(open_data(folder, seed=seed), epoch, 0, 40) for seed in (0, 1) for epoch in (0, 1)}
    assert len({tuple(walk) for walk in walks.values()}) == 4
    source = open_data(folder, seed=1)
    assert [ids(source, epoch, 0, 40) for epoch in (0, 1, 0)] == [walks[1, 0], walks[1, 1], walks[1, 0]]
    assert ids(open_data(folder, seed=1, shuffle=False), 5, 0, 40) == list(range(40))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[str, ...]]]:
    """Row groups and columns as they are read from files."""
    log: list[tuple[int, tuple[str, ...]]] = []
    read = arrow_source.ArrowSource._table

    def watched(self, group: int, names: list[str]) -> pa.Table:
        log.append((group, tuple(names)))
        found = read(self, group, names)
        assert found.column_names == names
        return found

    monkeypatch.setattr(arrow_source.ArrowSource, "_table", watched)
    return log


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_only_asked_columns_are_decoded(tmp_path: Path, decoded: list, form: str) -> None:
    source = open_data(write(tmp_path, [12], form=form), seed=0)
    source.read(0, 0, 12, ("pair",))
    assert {names for _, names in decoded} == {("pair",)}
    decoded.clear()
    source.read(0, 0, 12, ("id", "pair"))
    assert {names for _, names in decoded} == {("id",)}


def test_two_readers_half_a_window_apart_decode_nothing_twice_and_keep_little(tmp_path: Path, decoded: list) -> None:
    """Two stages in threads share one source; the last is some micro-batches behind the first."""
    source = open_data(write(tmp_path, [40, 40]), seed=0, rows_per_window=12)
    for start in range(0, 75, 5):
        ids(source, 0, start + 5, 5)
        ids(source, 0, start, 5)
        assert sum(len(window["id"]) for window in source._decoded.values()) <= 24
    assert sorted(group for group, _ in decoded) == list(range(20))


def test_one_sample_needs_one_window(tmp_path: Path, decoded: list) -> None:
    source = open_data(write(tmp_path, [400]), seed=0, rows_per_window=12)
    ids(source, 3, 200, 1)
    assert len(decoded) == 3


def test_a_source_travels_without_data_and_handles(tmp_path: Path) -> None:
    source = open_data(write(tmp_path, [40]), seed=4)
    before = ids(source, 1, 0, 40)
    packed = pickle.dumps(source)
    assert len(packed) < 2000
    assert ids(pickle.loads(packed), 1, 0, 40) == before


def test_a_dataset_and_a_single_file_open_too(tmp_path: Path) -> None:
    folder = write(tmp_path / "with space", [9, 9])
    expected = ids(open_data(folder, seed=2), 0, 0, 18)
    assert ids(open_data(pyarrow.dataset.dataset(folder), seed=2), 0, 0, 18) == expected
    assert ids(open_data(f"file://{folder.as_posix().replace(' ', '%20')}", seed=2), 0, 0, 18) == expected
    nameless = (folder / "part-000.parquet").rename(folder / "part")
    assert sorted(ids(open_data(nameless, seed=2), 0, 0, 9)) == list(range(9))


def test_a_dataset_that_shows_its_files_otherwise_is_refused(tmp_path: Path) -> None:
    """Only the files are read: columns in another order would be taken one for the other."""
    folder = write(tmp_path / "files", [9])
    turned = pa.schema(list(pyarrow.dataset.dataset(folder).schema)[::-1])
    with pytest.raises(DataError, match=r"shows the columns \(.*but its files have \(id: int16.*write_dataset"):
        open_data(pyarrow.dataset.dataset(folder, schema=turned), seed=0)
    pq.write_table(table(9), tmp_path / "groups.parquet", row_group_size=3)
    (whole,) = pyarrow.dataset.dataset(tmp_path / "groups.parquet").get_fragments()
    part = whole.subset(row_group_ids=[2])
    some = pyarrow.dataset.FileSystemDataset([part], part.physical_schema, part.format, part.filesystem)
    with pytest.raises(DataError, match="shows 3 rows of files that have 9"):
        open_data(some, seed=0)
    (tmp_path / "hive" / "day=3").mkdir(parents=True)
    write(tmp_path / "hive" / "day=3", [4])
    with pytest.raises(DataError, match=r"shows the columns \(.*, day: int32\)"):
        open_data(pyarrow.dataset.dataset(tmp_path / "hive", partitioning="hive"), seed=0)


def test_reading_outside_an_epoch_is_refused(tmp_path: Path) -> None:
    source = open_data(write(tmp_path, [9]), seed=0)
    assert source.read(0, 9, 0, ["pair"])["pair"].shape == (0, 2)
    for start, count in [(5, 5), (-1, 2), (10, 0)]:
        with pytest.raises(DataError, match=r"an epoch has 9"):
            source.read(0, start, count, ["id"])


def column(values: pa.Array, tmp_path: Path) -> str:
    """The message for a file whose column is not a tensor, while its other column still reads."""
    pq.write_table(pa.table({"bad": values, "good": pa.array(range(len(values)))}), tmp_path / "x.parquet")
    source = open_data(tmp_path / "x.parquet", seed=0)
    assert sorted(source.read(0, 0, len(values), ["good"])["good"].tolist()) == list(range(len(values)))
    with pytest.raises(DataError) as caught:
        source.read(0, 0, len(values), ["bad"])
    assert "'bad'" in str(caught.value)
    assert "x.parquet" in str(caught.value)
    return str(caught.value)


def test_columns_that_are_no_tensors_name_the_cure(tmp_path: Path) -> None:
    assert "token ids" in column(pa.array(["a", "b"]), tmp_path)
    assert "token ids" in column(pa.array([["a"], ["b"]]), tmp_path)
    assert "fixed_size_list" in column(pa.array([[1, 2], [3]]), tmp_path)
    assert "1 missing" in column(pa.array([1, None]), tmp_path)
    assert "1 missing" in column(pa.array([[1, 2], [3, None]]), tmp_path)
    assert "Cast it" in column(pa.array([1, 2], type=pa.date32()), tmp_path)


def test_lists_that_differ_between_row_groups_are_ragged(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [[1, 2], [3, 4], [5], [6]]}), tmp_path / "x.parquet", row_group_size=2)
    with pytest.raises(DataError, match=r"'x'.*ragged.*Pad or cut"):
        open_data(tmp_path, seed=0).read(0, 0, 4, ["x"])


def test_fixed_shape_tensors(tmp_path: Path) -> None:
    kind = pa.fixed_shape_tensor(pa.float32(), (2, 3))
    flat = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(24, dtype=np.float32)), 6)
    pq.write_table(pa.table({"x": pa.ExtensionArray.from_storage(kind, flat)}), tmp_path / "x.parquet")
    (read,) = open_data(tmp_path, seed=0, shuffle=False).read(0, 0, 4, (0,))
    assert torch.equal(read, torch.arange(24.0).reshape(4, 2, 3))


def test_missing_data_says_where_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no data at .*nowhere.*build the data first"):
        open_data(tmp_path / "nowhere", seed=0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"folder .*empty holds no data"):
        open_data(tmp_path / "empty", seed=0)
    source = open_data(write(tmp_path / "gone", [4]), seed=0)
    (tmp_path / "gone" / "part-000.parquet").unlink()
    with pytest.raises(DataError, match=r"part-000.parquet was not found on this machine.*every node"):
        source.read(0, 0, 1, ["id"])


def test_what_is_not_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="The path of the data is empty"):
        open_data("", seed=0)
    with pytest.raises(DataError, match="The data at foo://bucket/x cannot be reached"):
        open_data("foo://bucket/x", seed=0)
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), tmp_path / "twice.parquet")
    with pytest.raises(DataError, match=r"twice\.parquet has two columns of one name: a: int64, a: int64"):
        open_data(tmp_path / "twice.parquet", seed=0)
    (tmp_path / "twice.parquet").unlink()
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match="neither Parquet nor Arrow"):
        open_data(tmp_path / "notes.txt", seed=0)
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"torn.parquet cannot be read as parquet"):
        open_data(tmp_path, seed=0)
    with pytest.raises(DataError, match=r"holds a table in memory. Give that table, as data\.to_table\(\) does"):
        open_data(pyarrow.dataset.dataset(table(3)), seed=0)
    folder = write(tmp_path / "data", [4])
    with pytest.raises(DataError, match="filtered"):
        open_data(pyarrow.dataset.dataset(folder).filter(pyarrow.dataset.field("id") > 2), seed=0)
    with pytest.raises(DataError, match="int is not a data source"):
        open_data(3, seed=0)
    with pytest.raises(DataError, match="rows_per_window=0"):
        open_data(tmp_path, seed=0, rows_per_window=0)
    with pytest.raises(DataError, match="no column 'nope'"):
        open_data(folder, seed=0).read(0, 0, 1, ["nope"])
    with pytest.raises(DataError, match="no column 5"):
        open_data(folder, seed=0).read(0, 0, 1, [5])


def test_files_of_one_set_share_a_schema(tmp_path: Path) -> None:
    write(tmp_path, [4])
    pq.write_table(pa.table({"id": [1]}), tmp_path / "zz.parquet")
    with pytest.raises(DataError, match=r"zz.parquet has the columns \(id: int64\)"):
        open_data(tmp_path, seed=0)
    pq.write_table(table(0), tmp_path / "zz.parquet")
    (tmp_path / "part-000.parquet").unlink()
    with pytest.raises(DataError, match="no rows"):
        open_data(tmp_path, seed=0)
