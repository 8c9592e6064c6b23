"""What people write out of habit, and what they are answered: the argument or line that is meant, and what to write."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

import raypipe
from raypipe.errors import CaptureError, ConfigError, DataError, RaypipeError

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("captures_of_a_test")]

DATA = TensorDataset(torch.linspace(-1, 1, 48).reshape(8, 6), torch.arange(8) % 3)


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


def answer(
    kind: type[RaypipeError], model: nn.Module, loss_fn: Any = cross_entropy, num_microbatches: int = 2, **given: Any
) -> str:
    with pytest.raises(kind) as caught:
        raypipe.PipelineTrainer(
            model, loss_fn=loss_fn, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            pipeline=raypipe.PipelineConfig(
                num_stages=2, minibatch_size=4, num_microbatches=num_microbatches, partitioner="parameters",
                eval_interval_steps=1 if "eval_data" in given else None,
            ),
            run_config=SimpleNamespace(name="run", storage_path="nowhere"), **{"train_data": DATA} | given,
        ).plan()  # fmt: skip
    return str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is the device that they ask for")
@pytest.mark.parametrize(
    ("model", "who"),
    [
        (Net(lambda x: x.cuda()), "Net asks"),
        (Net(lambda x: x.to("cuda")), "Net asks"),
        (Net(lambda x: x + torch.zeros(6, device="cuda")), "Net asks"),
        (nn.Sequential(nn.Linear(6, 6), Net(lambda x: x.cuda())), "The module '1', Net, asks"),
    ],
    ids=["cuda", "to", "zeros", "sequential"],
)
def test_devices_in_forward(model: nn.Module, who: str) -> None:
    said = answer(CaptureError, model)
    assert said.startswith(f"{who} for a device at {__file__}:")
    assert "Leave .cuda(), .to(device) and device=... out of it" in said
    assert "ScalingConfig(use_gpu=True)" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is the device that it asks for")
def test_devices_in_a_loss() -> None:
    said = answer(CaptureError, Net(), lambda output, target: cross_entropy(output, target.cuda()))
    assert said.startswith(f"loss_fn asks for a device at {__file__}:")


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


def test_a_loss_of_swapped_parameters() -> None:
    said = answer(ConfigError, Net(), lambda a, b: cross_entropy(b, a))
    assert (
        "It takes them the other way round, but it is called as loss_fn(output, target). Swap its parameters." in said
    )


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
        (lambda loss: {"nll": loss}, "OwnLoss returned a dict of 'nll'."),
        (lambda loss: loss[None], "OwnLoss returned a tensor of shape (1,)."),
    ],
    ids=["float", "None", "empty", "dict", "row"],
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
        (lambda x: {"scores": x}, "a dict of 'scores'", "output['scores']"),
    ],
    ids=["tuple", "logits", "dict"],
)
def test_outputs_that_are_no_tensor(change: Any, kind: str, part: str) -> None:
    said = answer(ConfigError, Returning(change))
    assert said.startswith(f"loss_fn cannot take what the model returns, {kind}")
    assert f"as in loss_fn=lambda output, target: cross_entropy({part}, target)." in said


COMPARED = {
    "by hand": lambda output, target: ((output - target) ** 2).mean(),
    "mse": nn.functional.mse_loss,
    "poisson": nn.functional.poisson_nll_loss,
    "masked": lambda output, target: torch.where(target > 0, output, 0).mean(),
}
ONE_OUTPUT = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1))
FLAT = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1), nn.Flatten(0))
NUMBERS = torch.linspace(-1, 1, 8)


@pytest.mark.parametrize("count", [1, 2], ids=["whole", "micro-batches"])
@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize("tall", ["output", "target"])
def test_every_output_with_the_targets_of_all_rows(tall: str, name: str, count: int) -> None:
    """Which torch trains on, with a warning in some losses and in silence in others."""
    inputs, _ = DATA.tensors
    model, target = (ONE_OUTPUT, NUMBERS) if tall == "output" else (FLAT, NUMBERS[:, None])
    said = answer(DataError, model, COMPARED[name], train_data=TensorDataset(inputs, target), num_microbatches=count)
    if name == "mse":
        assert "it would compare every output with the targets of all samples. Reshape one of them" in said
    else:
        assert said.startswith(f"loss_fn compares {tall}s of shape (rows, 1) with ")
        assert said.endswith(f"every output with the targets of all rows. Make them alike, as in {tall}.squeeze(1).")


def depends_on_data(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A loss that cannot be traced."""

    def found(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss(output, target) if float(target.sum()) < 1e9 else loss(output * 2, target)

    return found


@pytest.mark.parametrize("count", [1, 2], ids=["whole", "micro-batches"])
@pytest.mark.parametrize("name", [name for name in COMPARED if name != "mse"])
@pytest.mark.parametrize("tall", ["output", "target"])
def test_every_output_with_the_targets_of_all_rows_in_a_loss_that_cannot_be_traced(
    tall: str, name: str, count: int
) -> None:
    inputs, _ = DATA.tensors
    model, target = (ONE_OUTPUT, NUMBERS) if tall == "output" else (FLAT, NUMBERS[:, None])
    data = TensorDataset(inputs, target)
    said = answer(DataError, model, depends_on_data(COMPARED[name]), train_data=data, num_microbatches=count)
    assert said.startswith(f"loss_fn compares {tall}s of shape (rows, 1) with ")
    assert f" at {__file__}:" in said


class Regression(nn.Module):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.inner, self.outer, self.loss = nn.Linear(6, 4), nn.Linear(4, 1), loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.outer(torch.relu(self.inner(x))), labels)


@pytest.mark.parametrize("name", COMPARED)
def test_every_output_with_the_targets_of_all_rows_in_a_model(name: str) -> None:
    data = TensorDataset(DATA.tensors[0], NUMBERS)
    said = answer(DataError, Regression(COMPARED[name]), None, train_data=data, num_microbatches=1)
    assert said.startswith(
        f"Regression compares outputs of shape (rows, 1) with targets of shape (rows,) at {__file__}:"
    )


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, target: ((output.squeeze(1) - target) ** 2).mean(),
        lambda output, target: (output.flatten()[:, None] - target).abs().mean(),  # an axis of one's own is meant
        lambda output, target: (output * target[:, None] - output.T * 2).square().mean(),
    ],
    ids=["alike", "own axis", "outputs with each other"],
)
@pytest.mark.parametrize("written", [lambda loss: loss, depends_on_data], ids=["traced", "not traced"])
def test_what_is_meant_so_trains(written: Any, loss: Any, tmp_path: Any) -> None:
    pipeline = raypipe.PipelineConfig(num_stages=2, minibatch_size=4, num_microbatches=1, partitioner="parameters")
    result = raypipe.PipelineTrainer(
        ONE_OUTPUT, loss_fn=written(loss), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), pipeline=pipeline,
        train_data=TensorDataset(DATA.tensors[0], NUMBERS),
        run_config=SimpleNamespace(name="run", storage_path=str(tmp_path)),
    ).fit(num_steps=1, local=True, progress=False)  # fmt: skip
    assert len(result.records) == 1


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
    assert ("for all that torch remembers" in said) is (kind is Kept)


@pytest.mark.parametrize("whole", [lambda model: model, in_children], ids=["traced", "Sequential"])
def test_autocast_that_is_off_anywhere(whole: Callable[[nn.Module], nn.Module]) -> None:
    raypipe.PipelineTrainer(
        whole(Off()), loss_fn=cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), train_data=DATA,
        pipeline=raypipe.PipelineConfig(num_stages=2, minibatch_size=4, num_microbatches=2, partitioner="parameters"),
        run_config=SimpleNamespace(name="run", storage_path="nowhere"),
    ).plan()  # fmt: skip


def test_scripted_modules() -> None:
    assert answer(CaptureError, torch.jit.script(nn.Sequential(nn.Linear(6, 3)))).startswith(
        "The model is a torch.jit.ScriptModule"
    )
    assert answer(CaptureError, nn.Sequential(torch.jit.script(nn.Linear(6, 4)), nn.Linear(4, 3))).startswith(
        "The module '0' is a torch.jit.ScriptModule"
    )


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
        (Items(), "Items has items, but nobody can tell how many: an epoch is cut from their number. Let its __len__"),
        (Items, "The class Items is no data; make one of it, as in Items()."),
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
