"""Rates of kinds of GPUs, by the names that Ray gives them: for plans that are made where there is none.

What a data sheet promises is not what a step gets: products reach about 0.6 of it, and what moves memory 0.8. Seconds
from here are a guess of the right order, which sets computing against links; the run measures its stages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from raypipe.engine.profiling.rates import Rates
from raypipe.ir.precision import Precision

__all__ = ["ASSUMED", "GPUS", "Gpu", "kind_of", "rates_of_kind", "share_of_rates"]

PRODUCTS, MEMORY = 0.6, 0.8
"""Of the data sheet's operations and bytes per second."""
LAUNCH_S = 8e-6
"""Of one operation, however small: Python, torch's dispatch and a launch."""
ASSUMED = "A10G"
"""A middling one, where nobody knows."""


class Gpu(NamedTuple):
    """What its maker's data sheet says, without sparsity.

    Attributes:
        fp32_tflops: of plain fp32, without TF32.
        half_tflops: of products of 16-bit numbers with sums in fp32.
        gbyte_s: of its memory.
        bf16: its tensor cores know that type.
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
"""NVIDIA's data sheets; where a name stands for several cards, the SXM one with the least memory."""


def kind_of(name: str) -> str:
    """The kind of a GPU by its name in CUDA, as "NVIDIA A100-SXM4-40GB"; the name itself of an unknown one."""
    words = re.split(r"[^A-Za-z0-9]+", name)
    return next((kind for kind in GPUS if kind in words), name)


def rates_of_kind(kind: str, precision: Precision) -> Rates:
    """Of one of ``GPUS``.

    Args:
        precision: in which stages compute.

    Raises:
        KeyError: the table does not have it.
    """
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
    """What one of several workers on a GPU gets while all of them compute."""
    if share >= 1:
        return rates
    words = f"{share:g} of {rates.device}"
    return Rates(share * rates.flops_per_s, share * rates.bytes_per_s, rates.overhead_s, words)
