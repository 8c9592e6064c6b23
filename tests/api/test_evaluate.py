"""evaluate() has the bits of fit's own evaluation, predict() those of the model over the same micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from raypipe import load_state_dict
from raypipe.errors import ConfigError, DataError, StageError
from tests.exactness import same_bits
from tests.models import CASES
from tests.nets import sequential
from tests.trainers import trainer_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS, SIZE = 4, 2


def trainer(folder: Path, name: str, *, run: str | None = "run", **more: Any) -> Any:
    found = CASES[name]
    given = {"loss_fn": found.loss_fn, "train_data": found.data(40), **more.pop("fields", {}), **more}
    return trainer_of(given.pop("model", None) or found.model(), folder, run, **given)


def fit(made: Any, steps: int = STEPS) -> Any:
    return made.fit(num_steps=steps, local=True, progress=False)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("cnn", {}),
        ("noisy", {"num_stages": 3}),
        ("tied-lm", {"schedule": "zb-h1"}),
        ("mlp", {"schedule": "pipedream"}),
        ("mlp", {"loss_reduction": "sum"}),
    ],
)
def test_the_loss_is_that_of_fit(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    data = CASES[name].data(13)
    made = trainer(tmp_path, name, eval_data=data, fields=fields)
    result = fit(made)
    found = made.evaluate(local=True)
    assert found == {"eval_loss": result.metrics["eval_loss"], "samples": 13, "checkpoint": result.checkpoint}
    again = trainer(tmp_path, name, run=None, fields=fields)
    for checkpoint in (result.checkpoint, tmp_path / "run", "run"):
        assert again.evaluate(checkpoint, data, local=True)["eval_loss"] == result.metrics["eval_loss"]
    begun = again.evaluate(data=data, local=True)
    assert begun["checkpoint"] == ""
    assert begun["eval_loss"] != result.metrics["eval_loss"]


def outputs_of(model: nn.Module, x: torch.Tensor) -> list[Any]:
    with torch.no_grad():
        return [model.eval()(part) for part in x.split(8) for part in part.split(SIZE)]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("cnn", {}),
        ("noisy", {"num_stages": 3}),
        ("mlp", {"schedule": "interleaved", "num_stages": 4}),
        ("mlp", {"schedule": "zb-v", "num_stages": 4}),
        ("mlp", {"num_stages": 1, "codec_forward": "none"}),
        ("mlp", {"codec_forward": "int8"}),
    ],
)
def test_predictions_are_those_of_the_model(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    made = trainer(tmp_path, name, fields=fields)
    fit(made)
    data = CASES[name].data(19)
    x = torch.stack([row[0] for row in data])
    model = CASES[name].model()
    untrained = torch.cat(outputs_of(model, x))
    model.load_state_dict(load_state_dict(tmp_path / "run"))
    wanted = torch.cat(outputs_of(model, x))
    for rows in (data, TensorDataset(x)):  # with the target and without
        assert same_bits(made.predict(rows, local=True), wanted)
    begun = trainer(tmp_path, name, run=None, fields=fields)
    assert same_bits(begun.predict(data, local=True), untrained)
    assert same_bits(begun.predict(data, tmp_path / "run", local=True), wanted)


@dataclass
class Found:
    scores: torch.Tensor
    parts: tuple[torch.Tensor, ...]


torch.export.register_dataclass(Found, serialized_type_name=f"{__name__}.Found")


class Structured(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.one, self.two = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = functional.gelu(self.one(x))
        scores = self.two(hidden)
        return Found(scores, (hidden, x)) if self.kind == "dataclass" else (scores, hidden.sum())


def loss_of_scores(output: Any, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.scores if isinstance(output, Found) else output[0], target)


def structured(kind: str, folder: Path) -> tuple[Any, nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    model = Structured(kind)
    x = torch.stack([row[0] for row in CASES["mlp"].data(19)])
    return trainer(folder, "mlp", model=model, loss_fn=loss_of_scores, run=None), model, x


def test_a_dataclass_is_predicted(tmp_path: Path) -> None:
    made, model, x = structured("dataclass", tmp_path)
    found = made.predict(CASES["mlp"].data(19), local=True)
    assert isinstance(found, Found)
    assert same_bits(found.scores, torch.cat([part.scores for part in outputs_of(model, x)]))
    assert same_bits(found.parts[1], x)


def test_what_is_not_by_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        structured("sum", tmp_path)[0].predict(CASES["mlp"].data(19), local=True)
    assert str(caught.value) == (
        "predict() puts the outputs of micro-batches one behind the other, but value 1 of the model's output has shape "
        "() for 2 rows, so it has no row for each of them. Leave it out of what the model returns in evaluation mode."
    )


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = sequential()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.net(x), labels)


def test_a_model_that_returns_its_loss_has_no_predictions(tmp_path: Path) -> None:
    made = trainer(tmp_path, "mlp", model=OwnLoss(), loss_fn=None, run=None)
    assert made.evaluate(data=CASES["mlp"].data(9), local=True)["samples"] == 9
    with pytest.raises(ConfigError) as caught:
        made.predict(CASES["mlp"].data(9), local=True)
    assert str(caught.value) == (
        "predict() gives what the model hands to its loss_fn, but this one returns its own loss, and its stages "
        "compute nothing else. Give the trainer a loss_fn and a model that returns its output, or load the checkpoint "
        "into the model: model.load_state_dict(raypipe.load_state_dict(checkpoint))."
    )


def test_nothing_is_written_and_the_run_goes_on(tmp_path: Path) -> None:
    made = trainer(tmp_path, "noisy", eval_data=CASES["noisy"].data(9))
    fit(made, 2)
    before = sorted(path for path in (tmp_path / "run").rglob("*"))
    made.evaluate(local=True)
    made.predict(CASES["noisy"].data(9), local=True)
    assert sorted(path for path in (tmp_path / "run").rglob("*")) == before
    fit(made)
    fit(trainer(tmp_path, "noisy", eval_data=CASES["noisy"].data(9), run="whole"))
    one, other = load_state_dict(tmp_path / "run"), load_state_dict(tmp_path / "whole")
    assert all(same_bits(one[name], other[name]) for name in other)


def test_refusals(tmp_path: Path) -> None:
    made = trainer(tmp_path, "mlp", run=None)
    with pytest.raises(
        ConfigError, match=r"^evaluate\(\) has no data: give data=\.\.\., or eval_data to the trainer\.$"
    ):
        made.evaluate(local=True)
    x = torch.randn(9, 6)
    with pytest.raises(DataError, match=r"^data has no column 1, but train_data has"):
        made.evaluate(data=TensorDataset(x), local=True)
    with pytest.raises(ConfigError, match=r"^checkpoint='nobody': there is no such file or folder"):
        made.evaluate("nobody", CASES["mlp"].data(9), local=True)
    torch.save(sequential().state_dict(), tmp_path / "other.pt")
    with pytest.raises(
        ConfigError, match=r"other\.pt' does not fit the model of this trainer\. Of its names are 8 missing"
    ):
        made.predict(TensorDataset(x), tmp_path / "other.pt", local=True)
    with pytest.raises(StageError, match=r"^Column 0 came with shape \(2, 5\), but the model was traced for"):
        made.predict(TensorDataset(torch.randn(9, 5)), local=True)


def test_predictions_are_made_of_the_columns_that_the_model_was_trained_on(tmp_path: Path) -> None:
    x, y = torch.randn(8, 6), torch.zeros(8, dtype=torch.int64)
    made = trainer(tmp_path, "mlp", run=None, train_data=[{"x": a, "y": b} for a, b in zip(x, y, strict=True)])
    wanted = made.predict(TensorDataset(x), local=True)
    assert torch.equal(made.predict([{"x": a, "id": b} for a, b in zip(x, y, strict=True)], local=True), wanted)
    with pytest.raises(
        DataError, match=r"^data has column 'id' where train_data has 'x': 'id', 'x' instead of 'x', 'y'"
    ):
        made.predict([{"id": b, "x": a} for a, b in zip(x, y, strict=True)], local=True)


def test_data_of_another_shape_or_type_is_compared_with_train_data(tmp_path: Path) -> None:
    made = trainer(tmp_path, "mlp", model=nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)))
    fit(made)
    narrow, labels = TensorDataset(torch.ones(8, 4)), torch.zeros(8, dtype=torch.int64)
    with pytest.raises(
        DataError, match=r"column 0 have shape \(4,\) and type float32, not shape \(6,\) and type float32\. S"
    ):
        made.predict(narrow, local=True)
    with pytest.raises(
        DataError, match=r"column 1 have shape \(1,\) and type int64, not shape \(\) and type int64\. S"
    ):
        made.evaluate(data=TensorDataset(torch.ones(8, 6), labels[:, None]), local=True)
    with pytest.raises(StageError, match="Target 9 is out of bounds"):
        made.evaluate(data=TensorDataset(torch.ones(8, 6), labels + 9), local=True)


def test_rows_without_enough_columns(tmp_path: Path) -> None:
    made = trainer(tmp_path, "mlp", model=TwoInputs(), train_data=pairs(40), loss_fn=functional.cross_entropy, run=None)
    assert made.predict(pairs(9), local=True).shape == (9, 3)
    with pytest.raises(DataError) as caught:
        made.predict(TensorDataset(torch.randn(9, 6)), local=True)
    assert str(caught.value) == (
        "predict() was given data of 1 columns, but the model reads 2. Give the columns of train_data in the same "
        "order; the target may be left out."
    )


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.two(functional.gelu(self.one(x)) + y)


def pairs(count: int) -> TensorDataset:
    drawn = torch.Generator().manual_seed(5)
    x, y = torch.randn(count, 6, generator=drawn), torch.randn(count, 5, generator=drawn)
    return TensorDataset(x, y, torch.randint(0, 3, (count,), generator=drawn))
