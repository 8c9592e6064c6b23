"""Three stages on one GPU: the same bits every time, and the numbers of the CPU but for the order of sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raypipe.engine.codec import Codec, Codecs, cuda, host
from raypipe.engine.device.cuda_device import CudaDevice
from raypipe.engine.device.device import CPU
from tests.device_run import run
from tests.runs.test_fake_device import run_replicas


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_codecs_in_a_run_are_kernels_of_the_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Links see bytes only: what a stage sends is encoded and decoded where it computes."""
    launched: list[str] = []
    launch = cuda._launch
    monkeypatch.setattr(cuda, "_launch", lambda kernel, *rest: (launched.append(kernel), launch(kernel, *rest))[1])
    for way in ("encode", "decode"):
        monkeypatch.delattr(host, way)
    codecs = Codecs(Codec(name), Codec(name))
    first, again = run(lambda worker: CudaDevice(), codecs=codecs), run(lambda worker: CudaDevice(), codecs=codecs)
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(first, again, strict=True))  # type: ignore[arg-type]
    assert {cuda.kernel_name(way, name, torch.float32) for way in ("encode", "decode")} <= set(launched)
    monkeypatch.undo()
    for a, b in zip(run(lambda worker: CPU, codecs=codecs), first, strict=True):
        if isinstance(a, torch.Tensor):  # a code may be another where a sum was taken in another order
            torch.testing.assert_close(b, a, rtol=2e-2, atol=2e-3)


def test_a_run_on_a_gpu_computes_what_the_cpu_does() -> None:
    plain, first, again = run(lambda worker: CPU), run(lambda worker: CudaDevice()), run(lambda worker: CudaDevice())
    same_and_close(plain, first, again, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_replicas_exchange_gradients_in_streams_of_their_own(codec: str) -> None:
    """What the CPU computes, the same bits every time."""
    plain = run_replicas(lambda worker: CPU, codec_sums=codec)
    first, again = (run_replicas(lambda worker: CudaDevice(), codec_sums=codec) for _ in range(2))
    same_and_close(plain, first, again, rtol=1e-2, atol=1e-3)


def same_and_close(plain: list[Any], first: list[Any], again: list[Any], *, rtol: float, atol: float) -> None:
    """Two runs on a GPU have the same bits, and what the CPU computed but for the order of sums."""
    for a, b, c in zip(plain, first, again, strict=True):
        if isinstance(a, torch.Tensor):
            assert torch.equal(b, c)
            torch.testing.assert_close(b, a, rtol=rtol, atol=atol)
        else:
            assert b == c
            assert (a is None) == (b is None)
            assert a is None or abs(a - b) <= rtol * abs(a)
