"""Objects that hold several optimizers: which become one, and which stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from raypipe.engine.optim.several import Together, as_one

Named = list[tuple[str, nn.Parameter]]


def named(*shapes: tuple[int, ...]) -> Named:
    return [(f"p{at}", nn.Parameter(torch.ones(shape))) for at, shape in enumerate(shapes)]


class Both(torch.optim.Optimizer):
    def __init__(self, named: Named) -> None:
        matrices, others = [p for _, p in named if p.ndim == 2], [p for _, p in named if p.ndim != 2]
        self.one = torch.optim.SGD(matrices, lr=0.1) if matrices else None
        self.other = torch.optim.AdamW(others, lr=0.1) if others else None
        super().__init__([*matrices, *others], {})

    def state_dict(self) -> dict[str, Any]:
        return {"one": self.one and self.one.state_dict(), "other": self.other and self.other.state_dict()}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in (self.one, self.other):
            if one:
                one.step()


class Around(torch.optim.Optimizer):
    """Weights kept beside those of one optimizer, as Lookahead."""

    more: Mapping[str, Any] = MappingProxyType({"slow": 1})

    def __init__(self, named: Named) -> None:
        parameters = [p for _, p in named]
        self.base = torch.optim.AdamW(parameters, lr=0.1)
        super().__init__(parameters, {"lr": 0.1})

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), **self.more}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


class AroundWithoutMore(Around):
    more = MappingProxyType({})


class BothAndMore(Both):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": torch.ones(2)}


@pytest.mark.parametrize("shapes", [[(2, 2), (2,)], [(2, 2)], [(2,)]])
def test_an_optimizer_that_only_holds_others_becomes_one(shapes: list[tuple[int, ...]]) -> None:
    assert isinstance(as_one(Both(named(*shapes))), Together)


@pytest.mark.parametrize("kind", [Around, AroundWithoutMore, BothAndMore])
def test_an_optimizer_with_a_state_of_its_own_stays_as_it_is(kind: Any) -> None:
    optimizer = kind(named((2, 2), (2,)))
    assert as_one(optimizer) is optimizer


def test_names_of_parameters_are_dropped_unless_all_groups_have_them() -> None:
    class Pairs:
        def __init__(self, matrix: Named, bias: list[Any]) -> None:
            self.held = [torch.optim.SGD(matrix, lr=0.1), torch.optim.AdamW(bias, lr=0.1)]

        def step(self) -> None:
            for one in self.held:
                one.step()

    matrix, bias = named((2, 2), (2,))
    groups = as_one(Pairs([matrix], [bias[1]])).param_groups
    assert [group["params"] for group in groups] == [[matrix[1]], [bias[1]]]
    assert not any("param_names" in group for group in groups)
    assert all("param_names" in group for group in as_one(Pairs([matrix], [bias])).param_groups)
