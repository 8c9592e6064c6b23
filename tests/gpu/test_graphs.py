"""Training from CUDA graphs has the bits of training without them, on one GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from raypipe.engine.device.cuda_device import CudaDevice
from raypipe.engine.device.device import Device
from raypipe.engine.stage.randomness import GraphKey, RandomKey, keyed_call
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


@pytest.mark.parametrize("model", [Narrow, Wide, partial(Wide, 0.2)], ids=["narrow", "wide", "dropout"])
def test_a_run_on_a_gpu_does_too(model: Any, tmp_path: Path) -> None:
    eager, replayed = (
        trained(tmp_path, f"graphs {graphs}", model, scaling_config=ON_GPU, cuda_graphs=graphs)
        for graphs in (False, True)
    )
    assert unequal(replayed, eager) == []


FUSED = {SDPBackend.FLASH_ATTENTION: torch.bfloat16, SDPBackend.EFFICIENT_ATTENTION: torch.float32}
"""Kernels of attention that draw from the default generator, and a dtype of each."""


@pytest.mark.parametrize("backend", FUSED, ids=str)
def test_recorded_attention_drops_what_eager_one_does(backend: SDPBackend) -> None:
    same_draws(CudaDevice(), backend, FUSED[backend])


def same_draws(device: Device, backend: SDPBackend, dtype: torch.dtype) -> None:
    attention = torch.ops.aten.scaled_dot_product_attention.default
    keys, generators = [RandomKey(0, 0, microbatch) for microbatch in range(3)], dict[int, torch.Generator]()
    with device.prepare_thread(), sdpa_kernel(backend):
        x, upstream = (device.empty(2 * 4 * 64 * 32, dtype).normal_().view(2, 4, 64, 32) for _ in range(2))
        x.requires_grad_()

        def forward(key: RandomKey) -> torch.Tensor:
            return keyed_call(attention, key, 0, x, x, x, None, 0.3)

        def backward(output: torch.Tensor) -> torch.Tensor:
            return torch.autograd.grad(output, x, upstream, retain_graph=True)[0]

        wanted = [(output, backward(output)) for output in map(forward, keys)]
        forward(GraphKey(keys[0], generators))
        pool = device.new_pool()
        ahead, output = device.record(
            partial(forward, GraphKey(keys[0], generators)), pool, generators.values()
        )  # fmt: skip
        back, gradient = device.record(partial(backward, output), pool)
        found = []
        for key in keys:
            GraphKey(key, generators).seed_generators()
            ahead()
            back()
            found.append((output.detach().clone(), gradient.clone()))
        device.finish(device.mark(), "test: what was computed is read")
    for (output, gradient), (output_wanted, gradient_wanted) in zip(found, wanted, strict=True):
        assert torch.equal(output, output_wanted)
        assert torch.equal(gradient, gradient_wanted)
    assert not torch.equal(wanted[0][0], wanted[1][0])
