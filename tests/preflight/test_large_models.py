"""A large model whose loss_reduction is given is planned without being computed, and what is refused is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from raypipe.errors import CaptureError, ConfigError, DataError, RaypipeError
from raypipe.preflight import loss_on_rows
from tests.trainers import trainer_of

pytestmark = pytest.mark.engine

ROWS, CLASSES = torch.randn(8, 6, generator=torch.Generator().manual_seed(3)), torch.tensor([2, 0, 1, 2, 0, 1, 1, 2])
LARGE: dict[str, Any] = {"loss_reduction": "mean", "verify": "off"}


class Net(nn.Module):
    def __init__(self, own: Callable[[Any, Any], Any] | None = None, norm: bool = False) -> None:
        super().__init__()
        self.first, self.own = nn.Linear(6, 5), own
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        output = self.last(self.norm(self.first(x).relu()))
        return output if self.own is None else self.own(output, y)  # type: ignore[no-any-return]


class Products(TorchDispatchMode):
    """Counts products with weights of a model in the code inside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.count, self._weights = 0, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.mm, torch.ops.aten.linear):
            known = [x for x in args if type(x) in (torch.Tensor, nn.Parameter) and not x.is_meta]
            self.count += any(x.untyped_storage().data_ptr() in self._weights for x in known)
        return func(*args, **kwargs or {})


def trainer(model: nn.Module, loss_fn: Any = cross_entropy, target: torch.Tensor = CLASSES, **given: Any) -> Any:
    own = isinstance(model, Net) and model.own is not None
    return trainer_of(model, loss_fn=None if own else loss_fn, train_data=TensorDataset(ROWS, target), **given)


def computed(model: nn.Module, **given: Any) -> bool:
    with Products(model) as products:
        trainer(model, **given).plan()
    return products.count > 0


@pytest.mark.parametrize("own", [None, cross_entropy])
def test_it_is_computed_only_if_it_is_to_show_something(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated = {"eval_data": TensorDataset(ROWS, CLASSES)}
    assert computed(Net(own), **LARGE), "a small model"
    monkeypatch.setattr(loss_on_rows, "LARGE", 1)
    assert not computed(Net(own), **LARGE)
    assert not computed(Net(own), **LARGE, **evaluated)
    assert not computed(Net(own), **LARGE, num_microbatches=8)
    assert computed(Net(own), **LARGE | {"loss_reduction": "auto"})
    assert computed(Net(own), **LARGE | {"verify": "first_step"})
    assert computed(Net(own, norm=True), **LARGE), "its forwards change buffers"


def reading(model: Net) -> Callable[[Any, Any], torch.Tensor]:
    return lambda output, target: cross_entropy(output, target) + model.last.weight.square().sum()


def drawing(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output, target) * torch.rand(())


@pytest.mark.parametrize(
    ("loss_fn", "target", "error", "words"),
    [
        (nn.CrossEntropyLoss(reduction="sum"), CLASSES, ConfigError, "this one adds up: over"),
        (nn.CrossEntropyLoss(reduction="none"), CLASSES, CaptureError, "instead of a scalar tensor"),
        (lambda o, y: cross_entropy(o.detach(), y), CLASSES, CaptureError, "no gradient flows through"),
        (cross_entropy, CLASSES + 3, DataError, "out of bounds"),
        (cross_entropy, torch.zeros(8, 2), DataError, "loss_fn cannot take an output of"),
        (drawing, CLASSES, CaptureError, "loss_fn draws random numbers"),
        ("reading", CLASSES, CaptureError, "loss_fn reads 'last.weight'"),
    ],
)  # fmt: skip
def test_what_a_small_model_is_refused_for_a_large_one_is_too(
    loss_fn: Any, target: torch.Tensor, error: type[RaypipeError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for least in (loss_on_rows.LARGE, 1):
        monkeypatch.setattr(loss_on_rows, "LARGE", least)
        model = Net()
        with pytest.raises(error, match=words):
            trainer(model, reading(model) if loss_fn == "reading" else loss_fn, target, **LARGE).plan()


def test_a_loss_of_the_models_own_that_adds_up_over_samples_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_on_rows, "LARGE", 1)
    with pytest.raises(ConfigError, match="this one adds up: over"):
        trainer(Net(nn.CrossEntropyLoss(reduction="sum")), **LARGE).plan()
    trainer(Net(lambda o, y: (o - one_hot(y, 3)).square().mean(0).sum()), **LARGE).plan()
    trainer(Net(nn.CrossEntropyLoss(reduction="sum")), **LARGE | {"loss_reduction": "sum"}).plan()


def test_a_loss_that_random_outputs_cannot_show_is_tried_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_on_rows, "LARGE", 1)
    model = Net()
    nn.init.constant_(model.last.bias, 100.0)

    def of_large_numbers(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if float(output.detach().min()) < 50:
            raise ValueError("too small")
        return cross_entropy(output, target)

    assert computed(model, loss_fn=of_large_numbers, **LARGE)
