"""What a device can do, described or measured.

seconds = overhead + max(FLOPs / rate, bytes moved / bandwidth)        (the roofline of Williams et al., CACM 2009)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from raypipe.engine.one_thread import one_thread
from raypipe.errors import ConfigError

__all__ = ["Rates", "measure_rates"]

SQUARE, REPEATS = 512, 5
"""Side of the matrices whose product tells the rate, and how often each rate is measured."""
GPU_SQUARE = 8192
"""The same on a GPU, which is not busy with less."""
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device can do.

    Attributes:
        flops_per_s: floating-point operations, a multiplication and an addition each counted.
        bytes_per_s: to and from its memory.
        overhead_s: of one operation, however small.
        device: in words.
    """

    flops_per_s: float
    bytes_per_s: float
    overhead_s: float = 5e-6
    device: str = "a described device"

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"Rates.{name}={getattr(self, name)} must be above 0.")

    def seconds(self, flops: float, moved_bytes: float) -> float:
        """Of one operation."""
        return self.overhead_s + max(flops / self.flops_per_s, moved_bytes / self.bytes_per_s)


def measure_rates(where: torch.device = CPU, dtype: torch.dtype = torch.float32) -> Rates:
    """Rates of one of this machine's devices, from a matrix product and a copy; of its CPU with one thread.

    Args:
        where: CPU or a GPU that torch can use here.
        dtype: of the product.
    """
    on_gpu = where.type == "cuda"
    side, finished = (GPU_SQUARE, torch.cuda.synchronize) if on_gpu else (SQUARE, lambda: None)
    with one_thread(), torch.device(where):
        a, b = torch.rand(side, side).to(dtype), torch.rand(side, side).to(dtype)
        source = torch.rand((64 if on_gpu else 16) << 20)
        target = torch.empty_like(source)
        product_s = _least(lambda: a @ b, finished)
        copy_s = _least(lambda: target.copy_(source), finished)
        small = torch.rand(1)
        overhead_s = _least(lambda: [small + small for _ in range(100)], finished) / 100
    name = f"{torch.cuda.get_device_name(where)} here, {dtype}" if on_gpu else "cpu, 1 thread"
    return Rates(2 * side**3 / product_s, 2 * source.nbytes / copy_s, overhead_s, name.replace("torch.", ""))


def _least(call: Callable[[], Any], finished: Callable[[], object]) -> float:
    call()
    seconds = []
    for _ in range(REPEATS):
        finished()
        begin_s = time.perf_counter()
        call()
        finished()
        seconds.append(time.perf_counter() - begin_s)
    return min(seconds)
