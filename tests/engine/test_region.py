"""Generated source calls operations without Python between, and still names the one that raises."""

from __future__ import annotations

import traceback

import pytest
import torch

from raypipe.engine.region import compiled

SOURCE = """
def forward(self, x, y):
    added = torch.ops.aten.add.Tensor(x, y, alpha = 2)
    return (torch.ops.aten.mm.default(added, y), torch.ops.aten.sym_size.int(x, 1))
"""


@pytest.mark.parametrize("direct", [False, True])
def test_a_function_computes_what_its_source_says(*, direct: bool) -> None:
    function = compiled(SOURCE, {}, "part", direct=direct)
    x, y = torch.randn(3, 3), torch.randn(3, 3)
    product, size = function(None, x, y)
    assert torch.equal(product, (x + 2 * y) @ y)
    assert size == 3


def test_a_traceback_shows_the_operation_as_it_was_captured() -> None:
    function = compiled(SOURCE, {}, "part", direct=True)
    with pytest.raises(RuntimeError) as caught:
        function(None, torch.randn(2, 3), torch.randn(2, 3))
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.filename.startswith("<part")
    assert "torch.ops.aten.mm.default(added, y)" in str(last.line)


def test_only_what_is_an_operation_is_called_otherwise() -> None:
    source = "def forward(self, x):\n    return torch.ops.aten.relu(x) + torch.exp(x)\n"
    function = compiled(source, {}, "part", direct=True)
    x = torch.randn(3)
    assert torch.equal(function(None, x), x.relu() + x.exp())
    assert not any(name.startswith("torch.ops") for name in function.__globals__)
