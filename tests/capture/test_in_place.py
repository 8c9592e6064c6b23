"""In-place operations on activations are replaced by operations that compute the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raypipe.capture.analyse import functional_twin

aten = torch.ops.aten


def in_place() -> list[Any]:
    """All operations of aten that are named as in-place ones."""
    packets = [getattr(aten, name) for name in dir(aten) if name.endswith("_") and not name.startswith("_")]
    return [getattr(packet, name) for packet in packets if hasattr(packet, "overloads") for name in packet.overloads()]


def test_a_twin_takes_the_arguments_of_the_operation() -> None:
    pairs = [(op, functional_twin(op)) for op in in_place()]
    assert sum(twin is not None for _, twin in pairs) > 200
    for op, twin in pairs:
        if twin is not None:
            mine, its = op._schema.arguments, twin._schema.arguments
            assert [str(one.type) for one in mine] == [str(one.type) for one in its], op
            assert [one.name for one in mine] == [one.name for one in its], op
            assert not its[0].alias_info or not its[0].alias_info.is_write, twin


@pytest.mark.parametrize(
    ("op", "more"),
    [
        (aten.pow_.Scalar, (2.5,)),
        (aten.pow_.Tensor, (torch.full((3,), 1.5),)),
        (aten.float_power_.Scalar, (2,)),
        (aten.floor_divide_.Tensor, (torch.full((3,), 0.3),)),
        (aten.ldexp_.default, (torch.tensor([1, 2, 3]),)),
        (aten.transpose_.default, (0, 1)),
        (aten.add_.Tensor, (torch.ones(3),)),
    ],
    ids=str,
)
def test_a_twin_computes_the_same(op: Any, more: Any) -> None:
    x = torch.linspace(0.5, 2, 6, dtype=torch.float64).reshape(2, 3)
    assert torch.equal(functional_twin(op)(x, *more), op(x.clone(), *more))


@pytest.mark.parametrize(
    "op", [aten.copy_.default, aten.bernoulli_.float, aten.normal_.default, aten.add.Tensor], ids=str
)
def test_an_operation_without_an_equal_twin_has_none(op: Any) -> None:
    assert functional_twin(op) is None
