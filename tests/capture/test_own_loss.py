"""Loss among the outputs of a model: tensors of shape (1,) beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from raypipe.capture.own_loss import own_loss

Tensor = torch.Tensor
Output = Callable[[Tensor, Tensor], Any]

BESIDE_A_SCALE: dict[str, Output] = {
    "scale first": lambda loss, scale: (scale, loss),
    "scale last": lambda loss, scale: (torch.zeros(4, 3), loss, scale),
    "named": lambda loss, scale: {"scale": scale, "objective": loss},
    "loss of shape (1,) by name": lambda loss, scale: {"loss": loss.view(1), "scale": scale},
    "loss of shape (1,) first": lambda loss, scale: (loss.view(1), scale),
    "loss of shape (1,) and an accuracy": lambda loss, scale: (torch.zeros(4, 3), loss.view(1), scale.detach().sum()),
}


@pytest.mark.parametrize("words", BESIDE_A_SCALE)
def test_a_scale_of_shape_1_is_not_the_loss(words: str) -> None:
    """Also in the trace that torch.export repeats under no_grad."""
    model = nn.Linear(1, 1)
    scale = nn.Parameter(torch.ones(1))
    for with_gradient in (True, False):
        with torch.set_grad_enabled(with_gradient):
            found = own_loss(model, BESIDE_A_SCALE[words]((scale * 3).sum(), scale.exp()))
        assert found.shape == ()
        assert found.item() == 3
