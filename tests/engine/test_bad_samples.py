"""A failure that comes from the data names the sample and the column, in the words of the data."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import raypipe
from raypipe.data.map_source import MapSource
from raypipe.data.open_data import open_data
from raypipe.engine.bad_samples import failing_row
from raypipe.engine.stage.activation_checkpointing import ForwardInputs
from raypipe.errors import DataError, StageError
from tests.trainers import trainer_of

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("captures_of_a_test")]

ROWS, WRONG = 24, 17


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def changed(column: torch.Tensor, value: float, *place: int) -> torch.Tensor:
    column[place] = value
    return column


def trainer(data: Any, model: nn.Module, loss_fn: Any, folder: Path, **options: Any) -> raypipe.PipelineTrainer:
    """Two stages, with an evaluation after each step if there is data for one."""
    evaluates = {"eval_interval_steps": 1} if "eval_data" in options else {}
    return trainer_of(model, folder, loss_fn=loss_fn, train_data=data, num_microbatches=2, **evaluates, **options)


def fails(*given: Any, **options: Any) -> str:
    """What a run over an epoch fails with."""
    with pytest.raises(StageError) as caught:
        trainer(*given, **options).fit(num_epochs=1, local=True, progress=False)
    return str(caught.value)


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def labels() -> torch.Tensor:
    return torch.arange(ROWS) % 3


class Lines(IterableDataset[Any]):
    """Stream without state: going back to an item passes over those before it."""

    def __init__(self, *columns: torch.Tensor) -> None:
        self.columns = columns

    def __iter__(self) -> Iterator[Any]:
        yield from zip(*self.columns, strict=True)


class Rows(Lines):
    """Stream read by tasks, as a ray.data.Dataset, which are not started again for a message."""

    def iter_rows(self) -> Iterator[Any]:
        return iter(self)


def with_nan(value: float = float("nan")) -> torch.Tensor:
    return changed(drawn(ROWS, 6), value, WRONG, 2)


def tokens() -> torch.Tensor:
    return changed(torch.arange(2 * ROWS).reshape(ROWS, 2) % 9, 9, WRONG, 1)


def streamed(kind: type[Lines]) -> Any:
    return raypipe.data.Stream(kind(with_nan(), labels()), ROWS)


OF_CLASSES = "begin at 0, and the model needs an output or an embedding for each. Mend that one, or leave it out."
MEND = "mend the data there"


@pytest.mark.parametrize(
    ("data", "model", "parts"),
    [
        (lambda: TensorDataset(drawn(ROWS, 6), changed(labels(), 3, WRONG)), None,
         ["IndexError: Target 3 is out of bounds. Item 17 of TensorDataset, whose column 1 is 3,", OF_CLASSES]),
        (lambda: TensorDataset(drawn(ROWS, 6), changed(labels(), -5, WRONG)), None, ["whose column 1 is -5,"]),
        (lambda: TensorDataset(tokens(), labels()),
         lambda: nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(8, 3)),
         ["Stage 0 failed in 0F", "Item 17 of TensorDataset, whose column 0 is of shape (2,) from 7 to 9, is enough"]),
        (lambda: TensorDataset(with_nan(float("inf")), labels()), None,
         ["the loss is nan", f"Column 0 of the data has inf at [2] in item 17 of TensorDataset: {MEND}"]),
        (lambda: streamed(Lines), None, [f"Column 0 of the data has nan at [2] in item 17 of Lines: {MEND}"]),
        (lambda: streamed(Rows), None, ["Look at the data of this mini-batch, which is item 16 of Rows to item 23"]),
    ],
    ids=["label", "negative label", "token", "infinite input", "stream", "stream of tasks"],
)  # fmt: skip
def test_the_sample_and_the_column_are_named(data: Any, model: Any, parts: list[str], tmp_path: Path) -> None:
    message = fails(data(), (model or classifier)(), cross_entropy, tmp_path)
    assert [part for part in parts if part not in message] == []


def test_data_that_cannot_name_a_row_hides_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> str:
        raise DataError("The file is gone.")

    monkeypatch.setattr(MapSource, "named", gone)
    data = TensorDataset(drawn(ROWS, 6), changed(labels(), 3, WRONG))
    message = fails(data, classifier(), cross_entropy, tmp_path)
    assert "IndexError: Target 3 is out of bounds" in message
    assert "gone" not in message


def test_a_label_out_of_range_in_eval_data(tmp_path: Path) -> None:
    good, bad = (TensorDataset(drawn(ROWS, 6), x) for x in (labels(), changed(labels(), 3, WRONG)))
    assert "Item 17 of TensorDataset, whose column 1 is 3," in fails(
        good, classifier(), cross_entropy, tmp_path, eval_data=bad
    )


def test_a_nan_in_a_target_of_a_file_is_named(tmp_path: Path) -> None:
    inputs, targets = drawn(ROWS, 1), changed(drawn(ROWS), float("nan"), WRONG)
    path = tmp_path / "rows.parquet"
    column = pa.array(inputs.tolist(), pa.list_(pa.float32(), 1))
    pq.write_table(pa.table({"x": column, "y": pa.array(targets.tolist(), pa.float32())}), path)
    message = fails(
        str(path), nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1), nn.Flatten(0)), mse_loss, tmp_path / "runs"
    )
    assert f"Column 1 of the data has nan in row 17 of {path}:" in message


@pytest.mark.parametrize("kind", [TensorDataset, Lines])
def test_a_nan_in_eval_data_ends_no_run(kind: Callable[..., Any], tmp_path: Path) -> None:
    bad = kind(changed(drawn(ROWS, 6), float("nan"), WRONG, 2), labels())
    evaluated = bad if kind is TensorDataset else raypipe.data.Stream(bad, ROWS)
    run = trainer(TensorDataset(drawn(ROWS, 6), labels()), classifier(), cross_entropy, tmp_path, eval_data=evaluated)
    result = run.fit(num_steps=2, local=True, progress=False)
    assert math.isnan(result.metrics["eval_loss"])
    lines = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    name = "TensorDataset" if kind is TensorDataset else "Lines"
    wanted = f"Column 0 of the data has nan at [2] in item 17 of {name}: mend the data there, or leave that out."
    *_, told = (line["reason"] for line in lines if line["decision"] == "warning")
    assert told == f"The loss of the evaluation after 2 steps is NaN or infinite. {wanted}"
    with pytest.warns(UserWarning, match="The loss of the evaluation is no number. Column 0 of the data has nan"):
        run.evaluate(local=True)


def test_numbers_that_grow_too_large_are_not_of_the_data(tmp_path: Path) -> None:
    def grows(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mse_loss(output, target) * 1e30

    said = fails(TensorDataset(drawn(ROWS, 6), drawn(ROWS, 3)), classifier(), grows, tmp_path)
    assert "Lower the learning rate" in said
    assert "Column" not in said


def test_the_row_is_found_by_halves() -> None:
    calls: list[int] = []

    def run(some: ForwardInputs) -> None:
        (column,) = some.columns.values()
        calls.append(len(column))
        if (column == 13).any():
            raise ValueError("no 13 please")

    assert failing_row(run, ForwardInputs((), {"x": torch.arange(16)}, {}), 16, ValueError()) == 13
    assert len(calls) <= 2 * 4 + 3
    assert failing_row(run, ForwardInputs((), {"x": torch.arange(16)}, {}), 16, KeyError()) is None


@pytest.mark.parametrize("least", [2, 16])
def test_no_row_is_blamed_where_rows_fail_alone_or_only_together(least: int) -> None:
    def run(some: ForwardInputs) -> None:
        count = len(some.columns["x"])
        if (count < 2) if least == 2 else (count == 16):
            raise ValueError

    given = ForwardInputs((None,), {"x": torch.arange(16)}, {})
    assert failing_row(run, given, 16, ValueError()) is None


class Numbered(Dataset):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        return float(row), row


def test_samples_are_named_where_they_are_read(tmp_path: Path) -> None:
    source = open_data(Numbered(), seed=3)
    for position in (0, 7, ROWS - 1):
        (number,) = source.read(2, position, 1, (1,))
        assert source.named(2, position) == f"item {number.item()} of Numbered"
    pq.write_table(pa.table({"y": list(range(ROWS))}), tmp_path / "a.parquet", row_group_size=5)
    pq.write_table(pa.table({"y": list(range(100, 104))}), tmp_path / "b.parquet")
    source = open_data(str(tmp_path), seed=3, rows_per_window=9)
    for position in range(ROWS + 4):
        number = source.read(1, position, 1, ("y",))["y"].item()
        file, row = ("a", number) if number < 100 else ("b", number - 100)
        assert source.named(1, position) == f"row {row} of {tmp_path}/{file}.parquet"
    stream = raypipe.data.Stream(Lines(drawn(ROWS, 6), labels()), num_samples=10)
    assert open_data(stream, seed=0).named(1, 3) == "item 13 of Lines"
