"""Fingerprints differ if the work does, and are equal for a model that is built again, in another process too."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from raypipe.capture import Capture, capture
from raypipe.profiling.measure import Bench
from raypipe.profiling.operations import Budget, OperationTimer
from raypipe.profiling.steps import fingerprint
from tests.sources import ROOT

ROUNDS = 2
LOGGER = logging.getLogger(__name__)
COLUMNS = {0: torch.ones(4, 4), 1: torch.ones(4, 4)}


def turned(x: torch.Tensor, times: int) -> torch.Tensor:
    LOGGER.debug("turned")
    for _ in range(times * ROUNDS):
        x = torch.tanh(x)
    return x


class Config:
    def __init__(self, times: int) -> None:
        self.times = times


class Turning(nn.Module):
    """A number decides how often it works, in one of several places that torch does not print."""

    def __init__(self, times: int, where: str = "attribute") -> None:
        super().__init__()
        self.where = where
        self.inner = nn.Linear(4, 4)
        self._times = times if where == "private" else 1
        self.times = times if where == "attribute" else 1
        self.config = Config(times if where == "object" else 1)
        self.table = {"sizes": [1, (times if where == "table" else 1)]}
        many = times if where == "closure" else 1
        self.last: Callable[[torch.Tensor], torch.Tensor] = lambda x: turned(x, many)
        self.partial = functools.partial(turned, times=times if where == "partial" else 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        times = self.times * self._times * self.config.times * self.table["sizes"][1]
        return self.partial(self.last(turned(self.inner(x), times)))


class TurningMore(Turning):
    """Its method does more with the same attributes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(turned(x, 2))


PLACES = ("attribute", "private", "object", "table", "closure", "partial")


@pytest.mark.parametrize("where", PLACES)
def test_a_number_that_changes_the_time_counts_anywhere(where: str) -> None:
    one, again, other = Turning(3, where), Turning(3, where), Turning(4, where)
    assert fingerprint(one) == fingerprint(again), "weights and addresses do not count"
    assert fingerprint(one) != fingerprint(other)


def test_code_and_hooks_count() -> None:
    plain, more, hooked = Turning(2), TurningMore(2), Turning(2)
    hooked.inner.register_forward_hook(lambda module, args, output: turned(output, 5))
    assert len({fingerprint(x) for x in (plain, more, hooked)}) == 3
    before = fingerprint(plain)
    logging.getLogger(f"{__name__}.another")
    assert fingerprint(Turning(2)) == before, "the state of a logger does not count"


def test_losses_by_their_arguments() -> None:
    losses: list[Any] = [
        functional.cross_entropy,
        functools.partial(functional.cross_entropy, label_smoothing=0.1),
        functools.partial(functional.cross_entropy, label_smoothing=0.2),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(label_smoothing=0.2),
    ]
    assert len({fingerprint(x) for x in losses}) == len(losses)


def test_an_object_that_contains_itself_has_a_fingerprint() -> None:
    one = Config(1)
    one.times = {"self": one, "set": {one}}  # type: ignore[assignment]
    assert fingerprint(one) == fingerprint(one)


def captured(*children: nn.Module) -> Capture:
    model = nn.Sequential(nn.Linear(4, 4), *children)
    return capture(model, (COLUMNS[0], COLUMNS[1]), (0, 1), functional.mse_loss, evaluates=False)


def test_children_that_differ_in_a_private_number_are_measured_by_themselves() -> None:
    made = captured(*(Turning(times, "private") for times in (2, 2, 3)))
    timer = OperationTimer(Bench.of(made).passes(), COLUMNS, Budget(60.0))
    timer.run()
    assert timer.num_measured == (3, 3)


def test_fingerprints_are_equal_in_another_process() -> None:
    call = "from tests.profiling.test_fingerprint import *\nprint(fingerprint(Turning(3, 'closure')))"
    found = {
        subprocess.run(
            [sys.executable, "-c", call],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
