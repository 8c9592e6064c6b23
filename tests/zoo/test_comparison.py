"""The zoo's comparison is one that can fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.zoo.cases import ROWS
from tests.zoo.cases.dense import perceptron
from tests.zoo.row import Refused, Rounding
from tests.zoo.training import differences_of, refusal_of

pytestmark = pytest.mark.usefixtures("captures_of_a_test")

ROW = ROWS["MLP, nn.Sequential | cross_entropy | vectors"]


def nudged(by: float) -> nn.Module:
    """The row's model with one weight of its last layer moved; 0 moves its last bit."""
    model = perceptron()
    with torch.no_grad():
        weight = model[-1].weight
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0)) if by == 0 else weight[0, 0] + by
    return model


@pytest.mark.slow
def test_one_bit_of_one_weight_shows(tmp_path: Path) -> None:
    found = differences_of(replace(ROW, twin=lambda: nudged(0)), 4, tmp_path)
    assert "parameters[4.weight]" in found
    assert not any("whole mini-batch" in line or "eval_loss" in line for line in found)  # they are within rounding


@pytest.mark.slow
def test_more_than_rounding_shows_everywhere(tmp_path: Path) -> None:
    row = replace(ROW, verdict=Rounding("none"), twin=lambda: nudged(1e-2))
    found = differences_of(row, 4, tmp_path)
    for what in ("losses[0]", "gradients[0]", "parameters", "loss of the whole", "gradients of the whole", "eval_loss"):
        assert any(line.startswith(what) for line in found), what


@pytest.mark.slow
def test_what_trains_is_not_refused(tmp_path: Path) -> None:
    assert refusal_of(ROW, 1, tmp_path) == "It trained."


def test_a_message_is_compared_to_its_last_letter() -> None:
    refused = Refused("It is {number} at {line}.", "")
    assert refused.fits("It is -1.5e-05 at a/b.py:7.")
    for other in ("It is 1 at b.py:7. ", "It is 1 at b.py.", "It is one at b.py:7.", "So it is 1 at b.py:7."):
        assert not refused.fits(other)
