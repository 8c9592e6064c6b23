"""Tables in memory are the data that their files would be, and files of text are named with what loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from raypipe.data.open_data import open_data
from raypipe.errors import DataError

pd = pytest.importorskip("pandas")


class Frame:
    """A frame as polars has it: Arrow's C stream, a length and columns."""

    def __init__(self, table: pa.Table) -> None:
        self._table, self.columns = table, table.column_names

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


def tables() -> dict[str, Any]:
    """Five rows of x and y as each kind of table."""
    x, y = np.arange(5, dtype=np.float32), np.arange(5, dtype=np.int16)
    table = pa.table({"x": x, "y": y})
    frame = table.to_pandas()
    return {
        "arrow": table,
        "batch": table.to_batches()[0],
        "polars": Frame(table),
        "pandas": frame,
        "rows chosen": pd.concat([frame, frame]).iloc[5:][lambda some: some.y >= 0],
        "named index": frame.set_index(frame.y.rename("id")),
        "fields": np.array(list(zip(x, y, strict=True)), dtype=[("x", "f4"), ("y", "i2")]),
        "record": np.rec.fromarrays([x, y], names="x,y"),
    }


@pytest.mark.parametrize("kind", list(tables()))
def test_a_table_in_memory_has_the_rows_and_types_of_its_file(kind: str, tmp_path: Path) -> None:
    pq.write_table(tables()["arrow"], tmp_path / "file.parquet")
    files, source = open_data(tmp_path, seed=3), open_data(tables()[kind], seed=3)
    assert source.columns == files.columns == ("x", "y")
    wanted = [column.sort() for column in files.read(0, 0, 5, (0, 1))]
    for column, (values, _) in zip(source.read(0, 0, 5, (0, 1)), wanted, strict=True):
        assert column.dtype == values.dtype
        assert torch.equal(column.sort()[0], values)
    assert source.named(0, 0).startswith("item ")


def test_texts_of_a_table_go_to_the_collate_function() -> None:
    texts = pa.table({"text": ["a", "bbb"], "label": [0, 1]})
    with pytest.raises(DataError, match=r"Column 'text' of the table has type string.*Turn text into numbers"):
        open_data(texts, seed=0)

    def lengths(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {name: torch.tensor([item[name] if name == "label" else len(item[name]) for item in items])
                for name in ("text", "label")}  # fmt: skip

    source = open_data(texts, seed=0, shuffle=False, collate=lengths)
    assert [column.tolist() for column in source.read(0, 0, 2, (0, 1))] == [[1, 3], [0, 1]]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"x": [1.0, None]}, r"Column 'x' of the table has 1 missing values, the first in row 1.*fillna, dropna"),
        ({"x": [1, "a"]}, r"The DataFrame cannot become a table of Arrow: ArrowInvalid.*one type"),
    ],
)
def test_what_no_tensor_can_be_made_of_in_a_frame(columns: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        open_data(pd.DataFrame(columns), seed=0)


@pytest.mark.parametrize(("name", "kind"), [("a.jsonl", "json"), ("a.json", "json"), ("a.csv", "csv")])
def test_text_files_are_named_with_what_loads_them(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text('{"x": 1}\n' * 3 if kind == "json" else "x\n1\n1\n")
    with pytest.raises(DataError) as refusal:
        open_data(path, seed=0)
    assert f'Give datasets.load_dataset("{kind}", data_files="{path}", split="train"); in a run file' in str(
        refusal.value
    )
    setting = str(refusal.value).split("train_data: ")[1].removesuffix(".")
    assert yaml.safe_load(setting)["args"] == {"path": kind, "data_files": str(path), "split": "train"}
    with pytest.raises(DataError, match=rf'holds no data.*data_files=".*/\*\.{name[2:]}"'):
        open_data(tmp_path, seed=0)
