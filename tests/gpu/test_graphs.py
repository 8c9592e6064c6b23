"""Training from CUDA graphs has the bits of training without them, on one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.engine.device.cuda_device import CudaDevice
from tests.exactness import unequal
from tests.gpu.test_compiled import ON_GPU
from tests.runs.test_compiled import Narrow, Wide, trained
from tests.runs.test_cuda_graphs import RUNS, run, same


@pytest.fixture(autouse=True)
def _kernels_that_repeat_themselves(kernels_that_repeat_themselves: None) -> None: ...


@pytest.mark.parametrize("name", RUNS)
def test_replayed_steps_have_the_bits_of_eager_ones(name: str) -> None:
    eager, again, replayed = (
        run(lambda worker: CudaDevice(), graphs=graphs, **RUNS[name]) for graphs in (False, False, True)
    )
    assert same(again, eager), "eager steps differ from each other"
    assert same(replayed, eager)


@pytest.mark.parametrize("model", [Narrow, Wide])
def test_a_run_on_a_gpu_does_too(model: Any, tmp_path: Path) -> None:
    eager, replayed = (
        trained(tmp_path, f"graphs {graphs}", model, scaling_config=ON_GPU, cuda_graphs=graphs)
        for graphs in (False, True)
    )
    assert unequal(replayed, eager) == []
