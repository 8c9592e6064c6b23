"""bf16, bf16-autocast and fp16 on a GPU, as users ask for it: the bits of plain PyTorch doing the same there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.runs.test_precision import children, faults, plainly, words

STAGES = 3
ON_GPU = SimpleNamespace(num_workers=STAGES, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 0.25})
"""All stages in threads with the same GPU."""


@pytest.fixture(autouse=True)
def _kernels_that_repeat_themselves(kernels_that_repeat_themselves: None) -> None: ...


@pytest.mark.parametrize(
    "fields", [{"schedule": "1f1b"}, {"schedule": "zb-h1"}, {"schedule": "1f1b", "recompute": "always"}],
    ids=lambda f: "-".join(f.values()),
)  # fmt: skip
@pytest.mark.parametrize("make", [words, children])
@pytest.mark.parametrize("precision", ["bf16", "bf16-autocast", "fp16"])
def test_equal_to_plain_pytorch(precision: str, make: Any, fields: dict[str, Any], tmp_path: Path) -> None:
    model = make()
    plain = plainly(model, precision, device="cuda")
    assert faults(model, tmp_path, plain, precision=precision, num_stages=STAGES, scaling_config=ON_GPU, **fields) == []
    assert torch.cuda.max_memory_allocated() > 0, "it was computed elsewhere"
