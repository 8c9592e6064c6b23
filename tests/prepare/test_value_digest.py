"""Digests of values: equal for equal ones in any process, other after any change, refused where a part is hidden."""

from __future__ import annotations

import collections
import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raypipe.prepare.value_digest import UnreadableError, digest_of
from tests import nets
from tests.models import CASES

pytestmark = pytest.mark.engine

PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=3), st.binary(max_size=2),
    st.frozensets(st.integers(0, 5), max_size=3),
)  # fmt: skip
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)


def typed(value: Any) -> Any:
    """Return a value that is equal to another only if both have the same types, and NaN is NaN."""
    if isinstance(value, dict):
        return ("dict", [(typed(key), typed(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [typed(item) for item in value])
    if isinstance(value, frozenset):
        return ("frozenset", sorted(map(repr, value)))
    return (type(value).__name__, repr(value))


@given(VALUES, VALUES)
def test_plain_values_have_equal_digests_only_if_they_are_equal(one: Any, other: Any) -> None:
    assert (digest_of(one) == digest_of(other)) == (typed(one) == typed(other))


@pytest.mark.parametrize("name", CASES)
def test_a_model_that_is_built_again_has_the_same_digest(name: str) -> None:
    once, again = CASES[name].model(), CASES[name].model()
    assert digest_of(once) == digest_of(again)
    first = next(once.parameters())
    with torch.no_grad():
        first.view(-1)[-1:].add_(1)
    assert digest_of(once) != digest_of(again)


class Block(nn.Module):
    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.register_buffer("steps", torch.zeros(3, dtype=torch.long))
        self.widths = list(range(300))
        self.act: Callable[[torch.Tensor], torch.Tensor] = lambda x: x * 2
        self.kinds = {"a", "b", "c"}
        self.text = re.compile("a+")
        self.sizes = collections.OrderedDict(a=1)
        self.table = np.arange(4)
        self.part = functools.partial(max, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x) * OFFSET * self.scale


OFFSET = 1.0


def built() -> Block:
    torch.manual_seed(0)
    return Block()


CHANGES: dict[str, Callable[[Any], object]] = {
    "the last item of a long list": lambda m: m.widths.__setitem__(-1, 0),
    "a buffer's value": lambda m: m.steps.add_(1),
    "a buffer's dtype": lambda m: setattr(m, "steps", m.steps.int()),
    "a parameter's dtype": lambda m: m.layers[2].half(),
    "a parameter's shape": lambda m: m.layers.__setitem__(2, nn.Linear(4, 5)),
    "a frozen parameter": lambda m: m.layers[2].weight.requires_grad_(False),
    "a stride": lambda m: setattr(m.layers[2].weight, "data", m.layers[2].weight.data.T.contiguous().T),
    "tied parameters": lambda m: setattr(m.layers[2], "weight", m.layers[1].weight),
    "a mode": lambda m: m.layers[1].eval(),
    "a function": lambda m: setattr(m, "act", lambda x: x * 3),
    "a closure": lambda m: setattr(m, "act", (lambda n: lambda x: x * n)(4)),
    "a set": lambda m: m.kinds.add("d"),
    "a pattern": lambda m: setattr(m, "text", re.compile("a*")),
    "the order of a dict": lambda m: (m.sizes.update(b=2), m.sizes.move_to_end("a")),
    "an array": lambda m: m.table.__setitem__(3, 9),
    "a bound argument": lambda m: setattr(m, "part", functools.partial(max, 4)),
    "the meta device": lambda m: m.to("meta"),
    "a hook": lambda m: m.layers[0].register_forward_hook(print),
    "an attribute of a parameter": lambda m: setattr(m.layers[0].weight, "decay", False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_a_module_changes_its_digest(change: str) -> None:
    module = built()
    CHANGES[change](module)
    assert digest_of(module) != digest_of(built())


def test_globals_and_class_attributes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest_of(built())
    monkeypatch.setattr(Block, "scale", 3.0)
    changed = digest_of(built())
    monkeypatch.undo()
    monkeypatch.setitem(Block.forward.__globals__, "OFFSET", 2.0)
    assert len({before, changed, digest_of(built())}) == 3
    monkeypatch.undo()
    assert digest_of(built()) == before


@functools.cache
def remembered() -> int:
    return 1


HIDDEN: dict[str, Callable[[], Any]] = {
    "an open file": lambda: Path(os.devnull).open(),  # noqa: SIM115
    "a generator": lambda: (x for x in [1]),
    "an object of an extension": lambda: torch._C.Graph(),
    "values of a thread": threading.local,
    "results in a cache": lambda: remembered() and remembered,
    "a sparse tensor": lambda: torch.eye(2).to_sparse(),
    "a set of objects": lambda: {object()},
    "an array of objects": lambda: np.array([object()]),
    "a tensor with a history": lambda: torch.ones(2, requires_grad=True) * 2,
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_cannot_be_read_completely_has_no_digest(name: str) -> None:
    value = HIDDEN[name]()
    with pytest.raises(UnreadableError):
        digest_of({"inside": [value]})
    getattr(value, "close", lambda: None)()


def test_locks_and_cycles_do_not_hinder() -> None:
    module = built()
    module.lock = threading.Lock()  # type: ignore[assignment]
    module.own = [module]  # type: ignore[assignment]
    assert digest_of(module) == digest_of(module)
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(UnreadableError, match="too deeply"):
        digest_of(nested)


def test_processes_agree() -> None:
    code = "from tests.prepare.test_value_digest import *; print(digest_of([built(), nets.Mlp, CASES['mlp'].model()]))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    digests = {
        subprocess.run(
            [sys.executable, "-c", code], env={**environment, "PYTHONHASHSEED": seed}, capture_output=True, text=True,
            timeout=120, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert digests == {f"{digest_of([built(), nets.Mlp, CASES['mlp'].model()])}\n"}
