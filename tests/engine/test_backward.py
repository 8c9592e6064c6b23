"""The engine's own entry point gives what torch.autograd.grad gives."""

from __future__ import annotations

import pytest
import torch

from raypipe.engine import backward


@pytest.mark.parametrize("direct", [True, False])
def test_gradients_are_those_of_autograd(monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    if not direct:
        monkeypatch.setattr(backward, "_run", None)
    assert (backward._run is not None) == direct
    x, w, unused = (torch.randn(3, 3, requires_grad=True) for _ in range(3))
    seeds = (torch.randn(3, 3), torch.randn(3, 3))
    expected = torch.autograd.grad([(x @ w).relu(), x], [x, w], seeds)
    y = (x @ w).relu()
    found = backward.gradients([y, x], seeds, [x, w, unused])  # x is a relayed input: a root and a leaf
    assert found[2] is None
    assert torch.equal(found[0], expected[0])  # type: ignore[arg-type]
    assert torch.equal(found[1], expected[1])  # type: ignore[arg-type]
    assert w.grad is None
    with pytest.raises(RuntimeError, match="second time"):
        backward.gradients([y], seeds[:1], [w])
