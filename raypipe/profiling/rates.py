"""Speed of devices: measured on this machine, or from a table of GPU data sheets, by Ray's names of GPU kinds.

    seconds = overhead + max(FLOPs / rate, bytes moved / bandwidth)      (the roofline of Williams et al., CACM 2009)

A step does not reach the rates of a data sheet: matrix products reach about 0.6 of them, and memory 0.8. Seconds from
the table are rough, but good enough to compare computing with sending; the run itself measures its stages.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from raypipe.engine.torch_settings import one_thread
from raypipe.errors import ConfigError
from raypipe.ir.precision import Precision

SQUARE, REPEATS = 512, 5
"""Side of the matrices whose product gives the CPU's FLOPs per second, and repeats of each measurement."""
GPU_SQUARE = 8192
"""Side of the matrices on a GPU, which smaller products do not keep busy."""
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Rates:
    """Speed of a device.

    Attributes:
        flops_per_s: floating-point operations per second; a multiply-add counts as two.
        bytes_per_s: bandwidth of the memory, reads and writes together.
        overhead_s: constant seconds of every operation.
        device: description of the device.
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
        """Estimate the seconds of one operation from its FLOPs and the bytes that it reads and writes."""
        return self.overhead_s + max(flops / self.flops_per_s, moved_bytes / self.bytes_per_s)


def measure_rates(where: torch.device = CPU, dtype: torch.dtype = torch.float32) -> Rates:
    """Measure the rates of a device of this machine by a matrix product and a copy; the CPU with one thread.

    Args:
        where: the CPU, or a GPU that torch can use here.
        dtype: dtype of the matrix product.
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


PRODUCTS, MEMORY = 0.6, 0.8
"""Fractions of the data sheet's FLOPs and bytes per second that a step reaches."""
LAUNCH_S = 8e-6
"""Overhead of any GPU operation, in seconds: Python, torch's dispatch and a kernel launch."""
ASSUMED = "A10G"
"""Kind of GPU that is assumed if the kind is not known."""


class Gpu(NamedTuple):
    """Rates in a GPU's data sheet, without sparsity.

    Attributes:
        fp32_tflops: TFLOP/s in fp32, without TF32.
        half_tflops: TFLOP/s of 16-bit matrix products with sums in fp32.
        gbyte_s: bandwidth of the memory, in GB/s.
        bf16: True if the tensor cores support bfloat16.
    """

    fp32_tflops: float
    half_tflops: float
    gbyte_s: float
    bf16: bool = True


GPUS: Mapping[str, Gpu] = {
    "P4": Gpu(5.5, 5.5, 192, bf16=False),
    "P100": Gpu(10.6, 21.2, 732, bf16=False),
    "V100": Gpu(15.7, 125, 900, bf16=False),
    "T4": Gpu(8.1, 65, 320, bf16=False),
    "A10": Gpu(31.2, 125, 600),
    "A10G": Gpu(31.5, 70, 600),
    "L4": Gpu(30.3, 121, 300),
    "L40S": Gpu(91.6, 362, 864),
    "A100": Gpu(19.5, 312, 1555),
    "A100-40G": Gpu(19.5, 312, 1555),
    "A100-80G": Gpu(19.5, 312, 2039),
    "H20": Gpu(44, 148, 4000),
    "H100": Gpu(67, 989, 3350),
    "H200": Gpu(67, 989, 4800),
    "B200": Gpu(75, 2250, 7700),
}
"""Rates by kind of GPU, from NVIDIA's data sheets; if several cards share a name, those of the smallest SXM card."""


def kind_of(name: str) -> str:
    """Return a GPU's kind from its CUDA name: "A100" of "NVIDIA A100-SXM4-40GB".

    An unknown name is returned as it is.
    """
    words = re.split(r"[^A-Za-z0-9]+", name)
    return next((kind for kind in GPUS if kind in words), name)


def rates_of_kind(kind: str, precision: Precision) -> Rates:
    """Return the rates that a step reaches on a GPU of this kind, a key of ``GPUS``, in this precision."""
    gpu = GPUS[kind]
    dtype = precision.leaves or precision.autocast
    fast = dtype == "float16" or (dtype == "bfloat16" and gpu.bf16)
    tflops = gpu.half_tflops if fast else gpu.fp32_tflops
    words = (
        f"{kind} by its data sheet, {PRODUCTS:g} of {tflops:g} TFLOP/s ({dtype if fast else 'float32'}) and {MEMORY:g} "
        f"of {gpu.gbyte_s:g} GB/s"
    )
    return Rates(PRODUCTS * tflops * 1e12, MEMORY * gpu.gbyte_s * 1e9, LAUNCH_S, words)


def share_of_rates(rates: Rates, share: float) -> Rates:
    """Return the rates of a worker that has this share of a GPU's rates, while other workers use the rest."""
    if share >= 1:
        return rates
    words = f"{share:g} of {rates.device}"
    return Rates(share * rates.flops_per_s, share * rates.bytes_per_s, rates.overhead_s, words)
