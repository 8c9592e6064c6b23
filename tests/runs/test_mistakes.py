"""Typical mistakes of a new user, with the whole message: one paragraph, and nothing is started."""

from __future__ import annotations

import sys
import threading
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
from raypipe.cli import main
from raypipe.errors import RaypipeError
from tests.torch_words import torch_says

HERE = Path(__file__)
LONGEST = 500
"""Characters of an answer; a path of this checkout does not count."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(functional.relu(self.inner(x)))


class Branching(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean() > 0:
            x = x - x.mean()
        return super().forward(x)


class OneSize(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.zeros(16, 6))


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


class Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with self.lock:
            return functional.cross_entropy(output, target)


def data(width: int = 6, kind: str = "float32", *, target: bool = True) -> TensorDataset:
    torch.manual_seed(0)
    inputs = torch.arange(32 * width).reshape(32, width).to(getattr(torch, kind))
    return TensorDataset(*(inputs, torch.arange(32) % 3)[: 2 if target else 1])


def adding(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output * 0.0, target, reduction="sum")


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


def quoted(code: str, name: str) -> str:
    """A line of this file as answers quote it."""
    numbers = [number for number, line in enumerate(HERE.read_text().splitlines(), 1) if line.strip() == code]
    return f'at {HERE}:{numbers[0]}, in {name}, "{code}"'


CALL = quoted("return self.outer(functional.relu(self.inner(x)))", "forward")
SIZE = quoted("return super().forward(x + torch.zeros(16, 6))", "forward")
BRANCH = quoted("if x.mean() > 0:", "forward")
READ = quoted('raise ValueError(f"cannot identify image file {index}.jpg")', "__getitem__")


# Name -> arguments in Python, and the message.
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "wrong shape": (
        {"train_data": lambda: data(width=5)},
        "The module 'inner', Linear(in_features=6, out_features=8, bias=True), cannot take column 0 of the data, shape "
        f"(2, 5) and type float32 {CALL}: RuntimeError: {torch_says(lambda: nn.Linear(6, 8)(torch.zeros(2, 5)))}. "
        "Change the data, or the sizes of the module.",
    ),
    "wrong dtype": (
        {"train_data": lambda: data(kind="float64")},
        "The module 'inner', Linear(in_features=6, out_features=8, bias=True), cannot take column 0 of the data, shape "
        f"(2, 6) and type float64 {CALL}: RuntimeError: mat1 and mat2 must have the same dtype, but "
        "got Double and Float. Convert it to the type that is expected, as in x.float(), or set "
        "precision='bf16-autocast'.",
    ),
    "batch size": (
        {"model": OneSize},
        f"OneSize fails in plain PyTorch too, on a micro-batch of shape (2, 6) and type float32 {SIZE}: RuntimeError: "
        "The size of tensor a (2) must match the size of tensor b (16) at non-singleton dimension 0. Mend it there. A "
        "micro-batch is a part of the mini-batch: the model must take any number of samples.",
    ),
    "target missing": (
        {"train_data": lambda: data(target=False)},
        "With a loss_fn a sample is (input, ..., target), but the data has 1 column. Add the target as the last "
        "column, or leave loss_fn out where the model returns its own loss.",
    ),
    "unpicklable": (
        {"loss_fn": Locked()},
        "loss_fn cannot be sent to another process: TypeError: cannot pickle '_thread.lock' object. Stages are "
        "processes of their own: define loss_fn at module level, and let it make such things where it is called.",
    ),
    "no GPU": (
        {"scaling_config": SimpleNamespace(num_workers=2, accelerator_type="A100")},
        "ScalingConfig(accelerator_type='A100'): it names the kind of GPU that workers are placed on, and use_gpu is "
        "False. Set use_gpu=True.",
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
    "data-dependent branch": (
        {"model": Branching},
        f"Branching decides by values of its data {BRANCH}. A "
        "graph of stages has one way only: use torch.where or torch.cond, move the branch out of forward, or build the "
        "model as an nn.Sequential of blocks, which are not traced.",
    ),
    "summing loss": (
        {"loss_fn": adding, "pipeline": {"loss_reduction": "mean"}},
        "loss_reduction='mean' is for a loss that averages over samples, but this one adds up: over 4 rows it is "
        "4.3944, over 2 and 2 of them 2.1972 and 2.1972. The gradient would shrink with the number of micro-batches. "
        "Set loss_reduction='sum', leave it out, or let the loss average (reduction='mean').",
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
CONFIG = f"""\
model: {{target: "{__name__}:Net"}}
loss_fn: {{target: "torch.nn:CrossEntropyLoss"}}
optimizer: {{target: "torch.optim:SGD", args: {{lr: 0.1}}}}
train_data: {{target: "{__name__}:data"}}
pipeline: {{num_stages: 2, minibatch_size: 16, num_microbatches: 8, partitioner: parameters}}
run_config: {{name: mistaken, storage_path: runs}}
num_steps: 2
"""


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


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("no GPU", "scaling_config={num_workers: 2, accelerator_type: A100}",
         "run.yaml, --set: scaling_config.accelerator_type: 'A100': " + MISTAKES["no GPU"][1].partition(": ")[2]),
        ("wrong path", "train_data=data/trian", MISTAKES["wrong path"][1].replace("data/trian", "{folder}/data/trian")),
    ],
)  # fmt: skip
def test_the_command_answers_with_the_key_of_its_file(
    name: str, override: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["raypipe", "plan", "run.yaml", "--set", override])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    assert capsys.readouterr() == ("", f"raypipe: {message.format(folder=tmp_path)}\n")
