"""Stages under torch.compile on a GPU: kernels that Triton generates."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.runs.test_compiled import Narrow, Wide, trained

ON_GPU = SimpleNamespace(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 0.5})


@pytest.mark.parametrize("model", [Narrow, Wide])
def test_generated_kernels_repeat_their_bits_and_are_close_to_eager_ones(
    model: type[torch.nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    how = {"scaling_config": ON_GPU, "num_stages": 2, "partitioner": "parameters", "num_microbatches": 2}
    how |= {"minibatch_size": 10}
    first, again = (trained(tmp_path, name, model, compile_stages="inductor", **how) for name in ("first", "again"))
    eager = trained(tmp_path, "eager", model, **how)
    assert first.keys() == eager.keys()
    for name, found in first.items():
        assert torch.equal(found, again[name])
        torch.testing.assert_close(found, eager[name], rtol=1e-3, atol=1e-4)
