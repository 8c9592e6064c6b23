"""Habits of PyTorch code that a pipeline refuses: the argument or line, and what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

from raypipe import PipelineConfig
from raypipe.errors import CaptureError, ConfigError, DataError, RaypipeError
from raypipe.testing import reference
from tests.trainers import sgd, trainer_of

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("captures_of_a_test")]

DATA = TensorDataset(torch.linspace(-1, 1, 48).reshape(8, 6), torch.arange(8) % 3)
SMALL = {"train_data": DATA, "minibatch_size": 4, "num_microbatches": 2}


class Net(nn.Module):
    def __init__(self, change: Callable[[torch.Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.inner, self.outer, self.change = nn.Linear(6, 4), nn.Linear(4, 3), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.relu(self.inner(self.change(x))))


class OwnLoss(Net):
    """``change`` is made to the loss."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.change(cross_entropy(self.outer(torch.relu(self.inner(x))), labels))


def answer(kind: type[RaypipeError], model: nn.Module, loss_fn: Any = cross_entropy, **given: Any) -> str:
    evaluates = {"eval_interval_steps": 1} if "eval_data" in given else {}
    with pytest.raises(kind) as caught:
        trainer_of(model, "nowhere", loss_fn=loss_fn, **SMALL | evaluates | given).plan()
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is available")
@pytest.mark.parametrize(
    ("model", "loss_fn", "who"),
    [
        (Net(lambda x: x.cuda()), cross_entropy, "Net fails in plain PyTorch too, on"),
        (Net(lambda x: x + torch.zeros(6, device="cuda")), cross_entropy, "Net fails in plain PyTorch too, on"),
        (
            nn.Sequential(nn.Linear(6, 6), Net(lambda x: x.cuda())),
            cross_entropy,
            "The module '1', Net, cannot take its",
        ),
        (Net(), lambda output, target: cross_entropy(output, target.cuda()), "loss_fn cannot take an output of"),
    ],
    ids=["cuda", "zeros", "sequential", "loss"],
)
def test_devices_in_forward_and_loss(model: nn.Module, loss_fn: Any, who: str) -> None:
    said = answer(RaypipeError, model, loss_fn)
    assert said.startswith(who)
    assert f" at {__file__}:" in said
    assert "Leave .cuda(), .to(device) and device=... out of it" in said
    assert "ScalingConfig(use_gpu=True)" in said


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (lambda output: output.mean(), "loss_fn takes (output), but it is called as loss_fn(output, target): too many"),
        (lambda output, target, weight: output.mean(), "missing a required argument: 'weight'"),
        (lambda y_true, y_pred: cross_entropy(y_pred, y_true), "its 'y_true' would be what the model returns. Swap"),
        (torch.jit.script(nn.CrossEntropyLoss()), "loss_fn is a torch.jit.ScriptModule"),
    ],
    ids=["one", "three", "swapped names", "scripted"],
)
def test_parameters_of_a_loss(loss_fn: Any, said: str) -> None:
    assert said in answer(ConfigError, Net(), loss_fn)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda loss: loss.item(), "returns a number for 2 samples"),
        (lambda loss: None, "returns None for 2 samples instead of a scalar tensor. Let it end in return loss."),
        (lambda loss: (loss, loss), "a tuple of a tensor of shape () and a tensor of shape () for 2 samples"),
        (lambda loss: {"loss": loss}, "returns a dict of 'loss' for 2 samples"),
        (lambda loss: loss[None], "returns a tensor of shape (1,) for 2 samples"),
    ],
    ids=["float", "None", "tuple", "dict", "row"],
)
def test_what_a_loss_returns(change: Any, said: str) -> None:
    assert said in answer(CaptureError, Net(), lambda output, target: change(cross_entropy(output, target)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda loss: loss.item(), "returned a number. Leave out what makes a number of it (.item(), float())"),
        (lambda loss: None, "OwnLoss returned None. Pass loss_fn=..."),
        (lambda loss: (), "OwnLoss returned an empty tuple."),
        (lambda loss: {"loss": None, "nll": loss}, "OwnLoss returned a dict of 'loss', 'nll'."),
        (lambda loss: {"aux_loss": loss}, "OwnLoss returned a dict of 'aux_loss'."),
        (lambda loss: {"nll": loss, "z": [2 * loss]}, "2 scalars, output['nll'] and output['z'][0], of which each"),
    ],
    ids=["float", "None", "empty", "dict", "aux", "two"],
)
def test_what_a_model_returns_as_its_loss(change: Any, said: str) -> None:
    assert said in answer(CaptureError, OwnLoss(change), None)


class Returning(Net):
    """``change`` is made to the output."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.change(self.outer(torch.relu(self.inner(x))))


@pytest.mark.parametrize(
    ("change", "kind", "part"),
    [
        (lambda x: (x, x), "a tuple of a tensor of shape (2, 3) and a tensor of shape (2, 3)", "output[0]"),
        (lambda x: {"hidden": x, "logits": x}, "a dict of 'hidden', 'logits'", "output['logits']"),
    ],
    ids=["tuple", "dict"],
)
def test_outputs_that_are_not_a_tensor(change: Any, kind: str, part: str) -> None:
    said = answer(DataError, Returning(change))
    assert said.startswith(f"loss_fn cannot take {kind} and column 1 of the data as target")
    assert f"as in lambda output, target: cross_entropy({part}, target)." in said


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("count", [1, 2], ids=["whole", "micro-batches"])
@pytest.mark.parametrize("loss_fn", [nn.functional.mse_loss, lambda output, target: (output - target).abs().mean()])
def test_outputs_that_broadcast_against_targets_train_on_all_pairs(loss_fn: Any, count: int, tmp_path: Any) -> None:
    """Shapes (rows, 1) and (rows,): plain PyTorch trains on all pairs of a mini-batch, at most with a warning."""
    data = TensorDataset(DATA.tensors[0], torch.linspace(-1, 1, 8))
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1))
    sizes = {"minibatch_size": 4, "num_microbatches": count}
    given: Any = {"model": model, "loss_fn": loss_fn, "optimizer": sgd, "train_data": data}
    wanted = reference(**given, pipeline=PipelineConfig(**sizes), num_steps=2)
    records = trainer_of(**given, folder=tmp_path, **sizes).fit(2, local=True, progress=False).records
    assert [record.loss for record in records] == list(wanted.losses)


class Autocast(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return super().forward(x)


class Decorated(Net):
    @torch.autocast("cuda", dtype=torch.bfloat16)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Older(Net):
    @torch.cuda.amp.autocast()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Kept(Net):
    """Torch remembers of it that it is off here, and not whether it was meant to be."""

    def __init__(self) -> None:
        super().__init__()
        self.half = torch.autocast("cuda")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.half:
            return super().forward(x)


class Off(Net):
    @torch.autocast("cuda", enabled=False)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", enabled=False):
            return self.inside(x)

    @torch.cuda.amp.autocast(False)
    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def in_children(model: nn.Module) -> nn.Sequential:
    return nn.Sequential(model, nn.Linear(3, 3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="autocast of CUDA is on here")
@pytest.mark.parametrize("whole", [lambda model: model, in_children], ids=["traced", "Sequential"])
@pytest.mark.parametrize("kind", [Autocast, Decorated, Older, Kept])
def test_autocast_of_a_device_that_is_not_there(kind: type[Net], whole: Callable[[nn.Module], nn.Module]) -> None:
    said = answer(CaptureError, whole(kind()))
    assert said.startswith(f"forward enters torch.autocast('cuda') at {__file__}:")
    assert "precision='bf16-autocast'" in said


@pytest.mark.parametrize("whole", [lambda model: model, in_children], ids=["traced", "Sequential"])
def test_autocast_that_is_off_anywhere(whole: Callable[[nn.Module], nn.Module]) -> None:
    trainer_of(whole(Off()), "nowhere", **SMALL).plan()


class Items(Dataset):
    def __getitem__(self, row: int) -> Any:
        return DATA[row]


class WrongLength(Items):
    def __init__(self, length: Any) -> None:
        self.length = length

    def __len__(self) -> int:
        if self.length is None:
            raise NotImplementedError
        return self.length


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Items(), "Items has items, but no __len__: an epoch is cut from the number of items. Let __len__"),
        (Items, "The data is the class Items; pass an instance: Items()."),
        (WrongLength(None), f"len(WrongLength) fails at {__file__}:"),
        (WrongLength(8.0), "len(WrongLength) fails: TypeError: 'float' object"),
        (WrongLength(-1), "let __len__ return it, an integer."),
    ],
    ids=["none", "class", "raises", "float", "negative"],
)
def test_lengths_of_data(data: Any, said: str) -> None:
    assert said in answer(DataError, Net(), train_data=data)


def test_empty_eval_data() -> None:
    said = answer(DataError, Net(), eval_data=TensorDataset(torch.empty(0, 6), torch.empty(0)))
    assert said == "eval_data: The dataset TensorDataset is empty. Give one with at least one item."
