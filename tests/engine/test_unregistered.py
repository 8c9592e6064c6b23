"""Parameters that a list hides from model.parameters() are told of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import raypipe
from raypipe.engine.unregistered import note_on_unregistered

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("captures_of_a_test")]


class Holds(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 4), nn.Linear(4, 3)
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x)) * self.held[0]


def scale() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ([scale()], "'1.held' of the model is a list with a parameter of shape (3,), which is none of"),
        ((scale(),), "is a tuple with a parameter of shape (3,)"),
        ({0: scale()}, "Make that nn.ParameterDict(...), or call"),
        ([torch.tanh, nn.Linear(2, 3)], "'1.held' of the model is a list with a parameter of shape (3, 2)"),
        ({"a": nn.Linear(2, 3)}, "Make that nn.ModuleDict(...)"),
    ],
    ids=["list", "tuple", "dict", "modules", "dict of modules"],
)
def test_what_holds_them_is_named(held: Any, words: str) -> None:
    assert words in note_on_unregistered(nn.Sequential(nn.ReLU(), Holds(held)))


def test_what_is_registered_or_stays_is_not_told_of() -> None:
    shared = nn.Linear(2, 3)
    for held in (
        nn.ParameterList([scale()]), nn.ModuleList([shared]), [scale().requires_grad_(False)], [torch.ones(3)],
        ["a", 1], {}, [], nn.Linear(2, 3).requires_grad_(False),
    ):  # fmt: skip
        assert note_on_unregistered(nn.Sequential(shared, Holds(held))) == ""
    assert note_on_unregistered(nn.Sequential(shared, Holds([shared]))) == ""


def test_a_plan_tells_of_them() -> None:
    plan = raypipe.PipelineTrainer(
        Holds([scale()]), loss_fn=cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        train_data=TensorDataset(torch.ones(8, 6), torch.arange(8) % 3),
        pipeline=raypipe.PipelineConfig(num_stages=2, minibatch_size=4, num_microbatches=2, partitioner="parameters"),
        run_config=SimpleNamespace(name="run", storage_path="nowhere"),
    ).plan()  # fmt: skip
    assert any(note.startswith("'held' of the model is a list with a parameter") for note in plan.notes)
