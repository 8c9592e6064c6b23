"""Custom autograd functions in traced models: one operation, with the backward that the user wrote."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from raypipe.capture import capture
from raypipe.engine.stage.autograd_functions import AutogradFunction
from raypipe.engine.stage.randomness import RandomKey
from raypipe.errors import CaptureError
from tests import nets
from tests.models import CASES

pytestmark = pytest.mark.engine

X, Y = CASES["mlp"].data(4)[:4]


class Affine(torch.autograd.Function):
    """A linear layer whose gradients are doubled, so that autograd's own would be seen."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return functional.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return 2 * gradient @ weight, 2 * gradient.T @ x, 2 * gradient.sum(0) if ctx.needs_input_grad[2] else None


class Calling(nn.Module):
    """Calls it with a bias and without, and another one under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(Affine.apply(x, self.first.weight, self.first.bias))
        with torch.no_grad():
            kept = nets.Double.apply(x)
        return Affine.apply(x + kept, self.second.weight, None)


def test_each_call_has_its_own_backward() -> None:
    model = Calling()
    made = capture(model, (X, Y), (0, 1), functional.cross_entropy).programs(())
    (program,) = pickle.loads(pickle.dumps(made))
    output = model(X)
    output.square().sum().backward()
    named = dict(model.named_parameters())
    leaves = [named[site.parameter].detach().requires_grad_() for site in program.train.sites]
    (ours,) = program.train(leaves, (), (), [X], RandomKey(0, 0, 0))
    assert torch.equal(ours, output)
    ours.square().sum().backward()
    for site, leaf in zip(program.train.sites, leaves, strict=True):
        assert torch.equal(leaf.grad, named[site.parameter].grad)


def test_calls_that_differ_have_names_of_their_own() -> None:
    calls = [AutogradFunction(Affine, (None, None, bias), (0, 1)) for bias in (None, 1, 1.0)]
    calls += [AutogradFunction(nets.Double, (None,), (0,))]
    assert len({call.__name__ for call in calls}) == len(calls)


def test_a_function_in_a_vmap_is_refused() -> None:
    class Mapping(nets.Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.vmap(nets.Double.apply)(super().forward(x))

    with pytest.raises(CaptureError):
        capture(Mapping(), (X, Y), (0, 1), functional.cross_entropy)
