"""The engine's own entry point does what torch.autograd.backward does."""

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
    backward.accumulate([y, x], seeds, [x, w, unused])  # x is a relayed input: a root and a leaf
    assert unused.grad is None
    assert torch.equal(x.grad, expected[0])  # type: ignore[arg-type]
    assert torch.equal(w.grad, expected[1])  # type: ignore[arg-type]
    backward.accumulate([(x.detach() @ w).relu()], seeds[:1], [w])
    assert torch.equal(w.grad, 2 * expected[1])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="second time"):
        backward.accumulate([y], seeds[:1], [w])
