"""Three stages on one GPU: the same bits every time, and the numbers of the CPU but for the order of sums."""

from __future__ import annotations

import torch

from raypipe.engine.cuda_device import CudaDevice
from raypipe.engine.device import CPU
from tests.device_run import run


def test_a_run_on_a_gpu_computes_what_the_cpu_does() -> None:
    plain, first, again = run(lambda worker: CPU), run(lambda worker: CudaDevice()), run(lambda worker: CudaDevice())
    assert len(plain) == len(first)
    for a, b, c in zip(plain, first, again, strict=True):
        if isinstance(a, torch.Tensor):
            assert torch.equal(b, c)  # type: ignore[arg-type]
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
        else:
            assert b == c
            assert (a is None) == (b is None)
            assert a is None or abs(a - b) <= 1e-4 * abs(a)  # type: ignore[operator]
