"""Typical mistakes of a new user, with the whole message: one paragraph, and nothing is started."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from raypipe import PipelineConfig, PipelineTrainer
from raypipe.errors import RaypipeError
from tests.trainers import sgd

HERE = Path(__file__)
LONGEST = 500
"""Characters of an answer; a path of this checkout does not count."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(functional.relu(self.inner(x)))


class Items(Dataset[Any]):
    """Good ones, but for one that is too short."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.ones(4 if index == 19 else 6), index % 3


class Raising(Items):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 19:
            raise ValueError(f"cannot identify image file {index}.jpg")
        return super().__getitem__(index)


def data(width: int = 6, kind: str = "float32", *, target: bool = True) -> TensorDataset:
    torch.manual_seed(0)
    inputs = torch.arange(32 * width).reshape(32, width).to(getattr(torch, kind))
    return TensorDataset(*(inputs, torch.arange(32) % 3)[: 2 if target else 1])


def quoted(code: str, name: str) -> str:
    """A line of this file as answers quote it."""
    numbers = [number for number, line in enumerate(HERE.read_text().splitlines(), 1) if line.strip() == code]
    return f'at {HERE}:{numbers[0]}, in {name}, "{code}"'


CALL = quoted("return self.outer(functional.relu(self.inner(x)))", "forward")
READ = quoted('raise ValueError(f"cannot identify image file {index}.jpg")', "__getitem__")


# Name -> arguments in Python, and the message.
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "wrong dtype": (
        {"train_data": lambda: data(kind="float64")},
        "The module 'inner', Linear(in_features=6, out_features=8, bias=True), cannot take column 0 of the data, shape "
        f"(2, 6) and type float64 {CALL}: RuntimeError: mat1 and mat2 must have the same dtype, but "
        "got Double and Float. Convert it to the type that is expected, as in x.float().",
    ),
    "target missing": (
        {"train_data": lambda: data(target=False)},
        "With a loss_fn a sample is (input, ..., target), but the data has 1 column. Add the target as the last "
        "column, or leave loss_fn out where the model returns its own loss.",
    ),
    "bad row": (
        {"train_data": Items},
        "Step 0: Item 19 of Items has shape (4,) and type float32 in column 0, but item 0 has shape (6,) and type "
        "float32, and a batch needs equal ones. Pad, cut or convert the items to one shape and kind, as "
        "collate_fn=raypipe.data.Pad(length) does with lists.",
    ),
    "wrong path": (
        {"train_data": lambda: "data/trian"},
        "There is no data at data/trian. Check the path, or build the data first; every node must be able to read it.",
    ),
    "loss without brackets": (
        {"loss_fn": nn.CrossEntropyLoss},
        "loss_fn is the class CrossEntropyLoss, and calling it makes a loss instead of computing one. Add the "
        "brackets: loss_fn=torch.nn.CrossEntropyLoss().",
    ),
    "a row that raises": (
        {"train_data": Raising},
        f"Step 0: Item 19 of Raising cannot be read {READ}: ValueError: cannot identify image file 19.jpg. Mend the "
        "item or leave it out.",
    ),
}  # fmt: skip


def trainer(folder: Path, given: dict[str, Any]) -> PipelineTrainer:
    settings = {"num_stages": 2, "minibatch_size": 16, "num_microbatches": 8, "partitioner": "parameters"}
    source: Callable[[], Any] = given.get("train_data", data)
    rest = {name: value for name, value in given.items() if name not in ("model", "train_data", "pipeline")}
    return PipelineTrainer(
        given.get("model", Net)(),
        train_data=source(),
        pipeline=PipelineConfig(**settings | given.get("pipeline", {})),
        run_config=SimpleNamespace(name="mistaken", storage_path=str(folder / "runs")),
        **{"loss_fn": functional.cross_entropy, "optimizer": sgd, **rest},
    )


def answer(folder: Path, given: dict[str, Any]) -> RaypipeError:
    """What comes of planning the run, and of training it in threads where its plan is good."""

    def run() -> None:
        made = trainer(folder, given)
        made.plan()
        made.fit(num_steps=2, local=True, progress=False)

    with pytest.raises(RaypipeError) as caught:
        run()
    return caught.value


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_in_one_paragraph(name: str, tmp_path: Path) -> None:
    given, message = MISTAKES[name]
    error = answer(tmp_path, given)
    assert str(error) == message
    assert "\n" not in message
    assert len(message.replace(str(HERE), HERE.name)) <= LONGEST
    assert "".join(traceback.format_exception(error)).count("Traceback (most recent call last)") == 1
