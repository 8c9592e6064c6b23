"""Stages that wait for no norm: the driver's total has torch's bits, and what is not finite still ends the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raypipe.engine.optim.norms import block_norms, norm_of, to_report_norms
from raypipe.errors import StageError
from raypipe.run.plans.blueprint import predicted_step
from tests.given_times import with_times
from tests.models import CASES
from tests.runs.test_asynchronous_life import STEPS, fit, trainer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_stages_tell_makes_the_norm_that_torch_makes(dtype: torch.dtype) -> None:
    drawn = torch.Generator().manual_seed(0)
    for count in (1, 2, 7, 50, 301):
        gradients = [torch.randn(3, generator=drawn).to(dtype) for _ in range(count)]
        norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
        places = torch.randperm(count, generator=drawn)
        parts = [to_report_norms(held, norms[held]) for held in places.tensor_split(3)]
        assert norm_of(parts) == float(torch.nn.utils.get_total_norm(gradients))


def test_a_parameter_without_elements_has_no_norm() -> None:
    assert block_norms(torch.zeros(0)).tolist() == [0.0]


@pytest.mark.parametrize(("limit", "words"), [(None, "so it refused the update"), (0.5, "so no stage took")])
def test_a_loss_that_is_no_number_ends_the_run(limit: float | None, words: str, tmp_path: Path) -> None:
    case = CASES["mlp"]
    calls = iter(range(100))

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert case.loss_fn is not None
        return case.loss_fn(output, target) * (float("nan") if next(calls) == 30 else 1.0)

    with pytest.raises(StageError, match=words):
        fit(
            trainer(tmp_path, "run", loss_fn=loss_fn, loss_reduction="mean", schedule="zb-h1", max_grad_norm=limit),
            STEPS,
        )


def test_the_plan_counts_the_steady_state(tmp_path: Path) -> None:
    free, clipped = (trainer(tmp_path, "run", schedule="zb-h1", slack=1, max_grad_norm=limit) for limit in (None, 0.5))
    assert free.plan().schedule.wiring.norm_per_stage
    assert not clipped.plan().schedule.wiring.norm_per_stage
    assert not trainer(tmp_path, "run", name="tied-sequential", schedule="zb-h1").plan().schedule.wiring.norm_per_stage
    plan = free.plan(profiled=with_times(free.profile()))
    one_step = predicted_step(plan)
    assert one_step is not None
    assert plan.prediction is not None
    assert plan.prediction.step_s < one_step.makespan_s
