"""Stages that wait for no norm: the driver's total has torch's bits."""

from __future__ import annotations

import pytest
import torch

from raypipe.engine.optim.norms import block_norms, norm_of, to_report_norms

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
