"""torch.utils.checkpoint changes no bit, inside stages and in the reference: what is computed again draws the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.engine.stage.activation_checkpointing import key_checkpoints
from raypipe.engine.stage.randomness import KeyedRandomness, RandomKey
from tests.exactness import SHAPES, differences, expected, same_bits
from tests.models import case
from tests.operations import as_in_plain_pytorch

PLAIN = {
    "reentrant": "not-checkpointed", "not-reentrant": "not-checkpointed",
    "sequential-reentrant": "sequential-not-checkpointed", "sequential-not-reentrant": "sequential-not-checkpointed",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_checkpoints_are_as_in_plain_pytorch(name: str) -> None:
    assert as_in_plain_pytorch(name) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN)
def test_the_reference_is_that_of_the_model_without_checkpoints(name: str) -> None:
    """A dropout that drew anew in the backward would give the reference wrong gradients, and equal ones a stage."""
    shape = SHAPES["even"]
    one, other = (expected(n, shape, "adamw") for n in (name, PLAIN[name]))
    assert differences(one, other) == []  # type: ignore[arg-type]


def state_after(name: str, schedule: str, folder: Path) -> dict[str, torch.Tensor]:
    """What an asynchronous run of three stages ends with."""
    found = case(name)
    trainer = PipelineTrainer(
        found.model(), loss_fn=found.loss_fn, optimizer=lambda named: torch.optim.SGD(named, lr=5e-2, momentum=0.9),
        train_data=found.data(40),
        pipeline=PipelineConfig(
            num_stages=3, minibatch_size=8, num_microbatches=4, partitioner=("1", "3"), schedule=schedule,
            loss_reduction="mean",
        ),
        run_config=SimpleNamespace(name="run", storage_path=str(folder)),
    )  # fmt: skip
    trainer.fit(num_steps=10, local=True, progress=False)
    return load_state_dict(str(folder / "run"))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_versions_of_weights_meet_their_own_backward(schedule: str, tmp_path: Path) -> None:
    """Other weights are bound to the children by the time that one is computed again."""
    wanted = state_after("sequential-not-checkpointed", schedule, tmp_path / "plain")
    for name in ("sequential-reentrant", "sequential-not-reentrant"):
        found = state_after(name, schedule, tmp_path / name)
        assert [n for n in wanted if not same_bits(found[n], wanted[n])] == []


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
