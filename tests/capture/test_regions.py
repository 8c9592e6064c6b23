"""torch.cond and torch.func.vmap in forward are one operation of the graph each, equal to plain PyTorch to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from raypipe.capture import TracedModel, capture
from raypipe.engine.stage.generated_source import Conditional, Region
from raypipe.errors import CaptureError
from tests.exactness import SHAPES, Shape, captured, expected, programs
from tests.models import vectors
from tests.operation_nets import Choosing, Nested, Way
from tests.operations import as_in_plain_pytorch

X, Y = vectors(4)[:4]
SMALL = Shape(20, 4, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape", "stages"),
    [
        ("vmapped", SHAPES["ragged-microbatch"], (1, 2, 3)),
        ("choosing", SMALL, (1, 3)),
        # Plain PyTorch traces torch.cond anew in every backward, which takes these their time.
        ("choosing-twice", Shape(10, 2, 1), (2,)),
        ("choosing-sequential", Shape(10, 2, 1), (2,)),
    ],
)
def test_regions_are_as_in_plain_pytorch(name: str, shape: Shape, stages: tuple[int, ...]) -> None:
    assert as_in_plain_pytorch(name, shape, stages=stages, split=name == "vmapped") == []


@pytest.mark.slow
def test_both_ways_are_taken_and_the_other_one_gets_zeros() -> None:
    """As with torch.cond, where a way that no micro-batch takes has gradients of zero, not none."""
    steps = expected("choosing", SMALL, "sgd", max_grad_norm=0.5).gradients
    large = [step["large.weight"] for step in steps]
    assert all(found is not None for found in large)
    model = Choosing()
    taken = set()
    for rows in X.repeat(8, 1).mul(torch.linspace(-2, 2, 32)[:, None]).split(2):
        taken.add(bool(torch.tanh(model.stem(rows)).sum() > 0))
    assert taken == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "kind", "count"), [("choosing", Conditional, 2), ("vmapped", Region, 1)])
def test_each_is_one_operation(case: str, kind: type[Region], count: int) -> None:
    made = captured(case)[1]
    assert isinstance(made.model, TracedModel)
    found = [node for node in made.model.train.nodes if type(node.target) is kind]
    assert len(found) == count
    names = {node.target.__name__ for node in found}  # type: ignore[union-attr]
    assert all(name in programs(case, ())[0].train.source for name in names)


class Lossy(Choosing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = torch.cond(x.sum() > 0, self.square, self.again, (x,))  # this line is named
        return self.head(self.stem(x))


class Drawing(nn.Module):
    """Draws within a way, or on a level of vmap."""

    def __init__(self, choosing: bool) -> None:
        super().__init__()
        self.linear, self.one, self.other = nn.Linear(6, 3), nn.Dropout(0.5), Way("square")
        self.choosing = choosing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.choosing:
            x = torch.cond(x.sum() > 0, self.one, self.other, (x,))
        else:
            x = torch.func.vmap(self.one, randomness="different")(x)
        return self.linear(x)


class Unheld(Nested):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        with torch.no_grad():
            scale = x.abs().mean()
        return x / scale


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Lossy(), r"calls torch\.cond under torch\.no_grad at .*test_regions\.py:\d+; .*detached operands"),
        (Unheld(), r"Unheld could not be traced.*build the model as an nn\.Sequential of blocks"),
        (Drawing(choosing=True), r"draws random numbers inside torch\.cond .*Draw them outside and pass them in"),
        (
            Drawing(choosing=False),
            r"draws random numbers inside torch\.func\.vmap .*test_regions\.py:\d+.*outside",
        ),
    ],
    ids=["no_grad", "nested", "draws", "draws-vmap"],
)
def test_what_cannot_be_one_operation_is_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(model, (X, Y), (0, 1), functional.cross_entropy)


class Derived(nn.Module):
    """Differentiates within itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(X.shape[1], 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.func.grad(lambda y: y.sin().sum())(x))


@pytest.mark.slow
def test_a_derivative_in_forward_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"Build the model|build the model"):
        capture(Derived(), (X, Y), (0, 1), functional.cross_entropy)
