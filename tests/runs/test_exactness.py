"""A pipeline changes no bit: gradients, norms, losses, parameters and buffers are those of eager PyTorch.

Every model of the zoo, 1 to 4 stages, every schedule, one stage on each worker and two, sample counts that divide and
that do not. The cheap models run every combination; the others a set in which every schedule meets every shape
somewhere.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raypipe import PipelineConfig, PipelineTrainer, load_state_dict
from raypipe.engine.torch_settings import one_thread
from raypipe.testing import reference
from tests.exactness import (
    SCHEDULES,
    SHAPES,
    captured,
    config_of,
    differences,
    expected,
    faults,
    optimizer_of,
    same_bits,
    train,
    unequal,
)  # fmt: skip
from tests.models import CASES, FAST, TIED, Case, case

pytestmark = pytest.mark.xdist_group("tracing")

STAGES = (1, 2, 3, 4)
PLACED = ("interleaved", "zb-v")
"""Four stages on two workers: of a V, stages 1 and 2 are beside each other on one of them."""
COVERED = [name for name in CASES if name not in (*FAST, *TIED, "masked")]
MANNERS = {  # shape -> optimizer and clipping
    "even": ("adamw", {"max_grad_norm": 0.5}),
    "ragged-microbatch": ("sgd", {}),
    "fewer-than-stages": ("adamw", {}),
    "indivisible-by-k": ("sgd", {"max_grad_norm": 0.1}),
    "ragged-epoch": ("adamw", {"max_grad_norm": 0.5}),
}
COMBINATIONS = [(SCHEDULES[i % 8], list(SHAPES)[i % 5]) for i in range(40)]  # 8 and 5 have no common factor


def compare(name: str, cuts: int | tuple[int, ...], schedule: str, shape: str) -> list[str]:
    optimizer, more = MANNERS[shape]
    found = faults(
        name,
        train(name, cuts, SHAPES[shape], schedule, optimizer, **more),
        expected(name, SHAPES[shape], optimizer, **more),
    )
    return [f"{schedule}, {shape}: {fault}" for fault in found]


def some(start: int, count: int) -> list[tuple[str, str]]:
    return [COMBINATIONS[i % 40] for i in range(start, start + count)]


@pytest.mark.slow
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("name", FAST)
def test_every_schedule_and_shape(name: str, stages: int) -> None:
    for schedule, shape in COMBINATIONS if stages > 1 else COMBINATIONS[::3]:
        assert compare(name, stages, schedule, shape) == []


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lag", [(0, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_stages_that_lack_memory_defer_fewer_weight_gradients(lag: tuple[int, ...], shape: str) -> None:
    """zb-h1 defers those of up to 0, 1 and 2 micro-batches on three stages."""
    optimizer, more = MANNERS[shape]
    run = train("mlp", 3, SHAPES[shape], "zb-h1", optimizer, lag=lag, **more)
    assert faults("mlp", run, expected("mlp", SHAPES[shape], optimizer, **more)) == []


@pytest.mark.slow
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("name", COVERED)
def test_every_model(name: str, stages: int) -> None:
    at = COVERED.index(name)
    placed = [(schedule, list(SHAPES)[(at + 2 * turn) % 5]) for turn, schedule in enumerate(PLACED) if stages == 4]
    for schedule, shape in (*some(12 * at + 3 * stages, 3), *placed):
        assert compare(name, stages, schedule, shape) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TIED, "gpt2"])
def test_tied_parameters_do_not_depend_on_the_partition(name: str) -> None:
    """And stay within rounding of plain PyTorch, which adds up in another order."""
    shape = SHAPES["ragged-epoch"]
    one = train(name, 1, shape, "1f1b", "sgd", max_grad_norm=0.5)
    for stages in STAGES[1:]:
        placed = PLACED if stages == 4 else ()
        for schedule in (*(SCHEDULES if name in TIED else SCHEDULES[stages::3]), *placed):
            assert differences(train(name, stages, shape, schedule, "sgd", max_grad_norm=0.5), one) == []
    plain = expected(name, shape, "sgd", max_grad_norm=0.5)
    initial = dict(captured(name)[0].named_parameters())
    for parameter, trained in plain.parameters.items():
        movement = (trained - initial[parameter]).abs().max()
        assert movement > 0
        assert (one.parameters[parameter] - trained).abs().max() <= 1e-5 * movement


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["unet", "cnn", "gpt2-untied", "noisy"])
def test_any_cut(name: str, seed: int) -> None:
    """Wherever the graph says that it can be cut."""
    drawn = random.Random(seed)
    positions = captured(name)[1].graph.cut_positions()
    for stages in (2, 4):
        cuts = tuple(sorted(drawn.sample(positions, stages - 1)))
        schedule, shape = drawn.choice(COMBINATIONS)
        assert compare(name, cuts, schedule, shape) == []


@pytest.mark.slow
def test_any_cut_of_a_tied_model() -> None:
    drawn = random.Random(5)
    one = train("gpt2", 1, SHAPES["even"], "1f1b", "adamw")
    for stages in (2, 3, 4):
        cuts = tuple(sorted(drawn.sample(captured("gpt2")[1].graph.cut_positions(), stages - 1)))
        assert differences(train("gpt2", cuts, SHAPES["even"], "slack", "adamw"), one) == []


def count_valid(target: torch.Tensor) -> float:
    return float((target != -100).sum())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reduction"),
    [("mlp", "sum"), ("masked", "valid_tokens"), ("masked", count_valid), ("buffers", "mean")],
)
def test_loss_reductions(name: str, reduction: object) -> None:
    shape = SHAPES["indivisible-by-k"]
    reference = expected(name, shape, "sgd", loss_reduction=reduction)
    for stages in STAGES:
        for schedule in ("slack", *(PLACED if stages == 4 else ())):
            run = train(name, stages, shape, schedule, "sgd", loss_reduction=reduction)
            assert faults(name, run, reference) == []


def decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)


def eager_evaluation(found: Case, model: torch.nn.Module, data: Any, config: PipelineConfig) -> float:
    """Mean over the samples, mini-batch by mini-batch, with one key per micro-batch as in training."""
    assert found.loss_fn is not None
    inputs, targets = data.tensors
    total = 0.0
    with torch.no_grad(), one_thread():
        for x, y in zip(inputs.split(config.minibatch_size), targets.split(config.minibatch_size), strict=True):
            loss = torch.zeros(())
            size = math.ceil(config.minibatch_size / config.num_microbatches)
            for a, b in zip(x.split(size), y.split(size), strict=True):
                loss = loss + found.loss_fn(model(a), b) * (len(a) / len(x))
            total += float(loss) * len(x)
    return total / len(inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "noisy", "dropout-sequential"])
@pytest.mark.parametrize("stages", [1, 3])
def test_the_trainer_itself(tmp_path: Path, name: str, stages: int) -> None:
    """With a schedule of learning rates, an evaluation, a ragged epoch, and the checkpoint as the witness."""
    found, shape = case(name), SHAPES["ragged-epoch"]
    config, evaluated = config_of(shape, stages, max_grad_norm=0.5), found.data(13)
    # Planning takes steps with an optimizer of its own, so this one keeps no record.
    trainer = PipelineTrainer(
        found.model(), loss_fn=found.loss_fn, optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        lr_scheduler=decay, train_data=found.data(shape.samples),
        eval_data=evaluated, pipeline=config, run_config=SimpleNamespace(name="run", storage_path=str(tmp_path)),
    )  # fmt: skip
    result = trainer.fit(num_epochs=2, local=True, progress=False)
    plain = reference(
        found.model(), loss_fn=found.loss_fn, optimizer=optimizer_of("adamw"), lr_scheduler=decay,
        train_data=found.data(shape.samples), pipeline=config, num_steps=6,
    )  # fmt: skip
    assert [record.loss for record in result.records] == list(plain.losses)
    assert [record.grad_norm for record in result.records] == list(plain.grad_norms)
    state, wanted = load_state_dict(str(tmp_path / "run")), plain.model.state_dict()
    assert unequal(state, wanted) == []
    assert result.metrics["eval_loss"] == eager_evaluation(found, plain.model.eval(), evaluated, config)


@pytest.mark.slow
def test_one_flipped_bit_is_seen() -> None:
    shape = SHAPES["even"]
    run, reference = train("mlp", 2, shape, "1f1b", "sgd"), expected("mlp", shape, "sgd")
    assert differences(run, reference) == []
    for step, name in itertools.product((0, 4), ("layers.0.weight", "layers.3.bias")):
        gradient = run.gradients[step][name]
        assert gradient is not None
        gradient.view(torch.int32).flatten()[-1] ^= 1
        assert differences(run, reference) == [f"gradients[{step}][{name}]"]
        gradient.view(torch.int32).flatten()[-1] ^= 1
    assert differences(run, reference) == []
    wrong_loss = replace(run, losses=[*run.losses[:-1], run.losses[-1] * (1 + 2**-23)])
    assert [d.split(":")[0] for d in differences(wrong_loss, reference)] == ["losses[4]"]
    lacking = replace(run, gradients=[{**step, "layers.0.bias": None} for step in run.gradients])
    assert differences(lacking, reference) == [f"gradients[{step}][layers.0.bias]" for step in range(5)]


def test_a_shared_storage_is_seen() -> None:
    shape = SHAPES["even"]
    reference = expected("mlp", shape, "sgd")
    run = train("mlp", 1, shape, "1f1b", "sgd")
    assert faults("mlp", run, reference) == []
    borrowed = replace(run, parameters=dict(reference.parameters))
    assert faults("mlp", borrowed, reference) == ["the reference and the pipeline share memory"]
    unmoved = replace(run, parameters={n: p.detach() for n, p in captured("mlp")[0].named_parameters()})
    assert "layers.0.weight did not move" in faults("mlp", unmoved, reference)


def test_bits_are_stricter_than_equality() -> None:
    zero, minus = torch.zeros(2), torch.full((2,), -0.0)
    assert torch.equal(zero, minus)
    assert not same_bits(zero, minus)
    assert not same_bits(zero, None)
    assert not same_bits(zero, zero.double())
    assert same_bits(torch.full((2,), float("nan")), torch.full((2,), float("nan")))
