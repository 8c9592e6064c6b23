"""Arguments that Ray cannot send to workers are refused before any actor starts, wherever they hold such a value."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray  # noqa: F401  (plan() checks what travels in a process that has loaded it)
import torch
from torch import nn
from torch.nn import functional

from raypipe.errors import ConfigError
from raypipe.preflight.arguments import check_travel
from tests import nets
from tests.prepare.test_prepare import DATA, refusal, sgd

pytestmark = pytest.mark.ray


def holding(value: Any) -> Callable[[Any], Any]:
    """An optimizer with something in its closure."""
    return lambda named: sgd(named) if value else None


class Holder:
    def __init__(self, value: Any) -> None:
        self.inside = {"deep": [value]}


@pytest.mark.parametrize("make", [threading.Lock, lambda: open(__file__, "rb"), lambda: (n for n in "ab")])  # noqa: SIM115, PTH123
def test_what_cannot_travel_is_found_wherever_it_is(make: Callable[[], Any]) -> None:
    with contextlib.closing(make()) if make is not threading.Lock else contextlib.nullcontext(make()) as value:
        check_travel_of(value)


def check_travel_of(value: Any) -> None:
    error = rf"it cannot be sent to another process: TypeError: cannot pickle '[\w.]*{type(value).__name__}' object\."
    for outer in (value, holding(value), Holder(value)):
        with pytest.raises(ConfigError, match=error):
            check_travel({"it": outer})
    assert str(refusal(optimizer=holding(value))).startswith("optimizer cannot be sent to another process: TypeError")


@pytest.mark.parametrize(
    "value",
    [
        functional.cross_entropy, nn.CrossEntropyLoss(), sgd, holding(3), holding(np.ones(3)), Holder(torch.ones(3)),
        nets.sequential(), DATA, "data/train", holding(os), [Holder({"a": {1, 2}})] * 3, holding(nets.Mlp),
    ],
)  # fmt: skip
def test_what_travels_is_left_in_peace(value: Any) -> None:
    check_travel({"it": value})


def test_the_text_of_an_open_file_travels() -> None:
    with Path(__file__).open(encoding="utf-8") as opened:
        check_travel({"it": holding(opened)})
