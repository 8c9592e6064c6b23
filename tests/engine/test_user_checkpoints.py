"""torch.utils.checkpoint draws the same when it computes again, in the reference too, and leaves torch as it was."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from raypipe.engine.stage.activation_checkpointing import key_checkpoints
from raypipe.engine.stage.randomness import KeyedRandomness, RandomKey
from tests.exactness import SHAPES, differences, expected

PLAIN = {
    "reentrant": "not-checkpointed", "not-reentrant": "not-checkpointed",
    "sequential-reentrant": "sequential-not-checkpointed", "sequential-not-reentrant": "sequential-not-checkpointed",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_the_reference_is_that_of_the_model_without_checkpoints(name: str) -> None:
    """A dropout that drew anew in the backward would give the reference wrong gradients, and equal ones a stage."""
    shape = SHAPES["even"]
    one, other = (expected(n, shape, "adamw") for n in (name, PLAIN[name]))
    assert differences(one, other) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("reentrant", [True, False])
def test_outside_of_keyed_draws_checkpoints_are_those_of_torch(reentrant: bool) -> None:
    key_checkpoints()
    x = torch.ones(64, requires_grad=True)
    torch.manual_seed(3)
    y = checkpoint(lambda x: functional.dropout(x * x, 0.5), x, use_reentrant=reentrant)
    y.sum().backward()
    torch.manual_seed(3)
    assert torch.equal(y, functional.dropout(torch.ones(64), 0.5))
    assert torch.equal(x.grad, 2 * y)  # type: ignore[arg-type]


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_global_generator_is_left_alone(reentrant: bool) -> None:
    """Items of a random dataset may be drawn from it meanwhile, in another thread."""
    key_checkpoints()
    x = torch.ones(64, requires_grad=True)

    def inner(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return functional.dropout(x * x, 0.5)

    with KeyedRandomness(RandomKey(0, 0, 0)):
        y = checkpoint(inner, x, use_reentrant=reentrant)
    torch.manual_seed(4)
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(5).get_state())
    assert torch.equal(x.grad, 2 * y)  # type: ignore[arg-type]
