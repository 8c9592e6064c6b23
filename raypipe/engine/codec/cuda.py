"""Codecs on tensors of an NVIDIA device: one kernel to encode a tensor, one to decode it, by CuPy.

    flat --(DLPack, no copy)--> CuPy --> kernel of kernels.cu in torch's current stream --> wire

They do what ``arrays`` defines. NVRTC compiles the kernels when a process first uses them on a device, and CuPy keeps
them in its cache folder. CuPy is an extra (``pip install raypipe[cuda13]``), imported at the first call.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from raypipe.engine.codec.arrays import BLOCK

__all__ = ["KERNELS", "OPTIONS", "SOURCE", "THREADS", "decode", "encode", "grid_of", "kernel_name"]

SOURCE = Path(__file__).with_name("kernels.cu")

OPTIONS = ("--std=c++17",)
"""Of NVRTC. Not --use_fast_math, by which numbers below the normal ones would become 0."""

THREADS = 256
"""Of a block: a multiple of the 32 that share a scale."""

PER_THREAD = BLOCK // 32
"""Elements."""

_TYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_F32 = (torch.float32,)

KERNELS: dict[str, tuple[torch.dtype, ...]] = {
    "bf16": _F32, "fp16": _F32, "int8": tuple(_TYPES), "fp8": tuple(_TYPES), "int4": tuple(_TYPES),
}  # fmt: skip
"""Types that each codec takes."""


def kernel_name(way: str, name: str, dtype: torch.dtype) -> str:
    """Of the kernel, in the source.

    Args:
        way: "encode" or "decode".
    """
    return f"{way}_{name}_{_TYPES[dtype]}"


def grid_of(elements: int) -> int:
    """Blocks of a launch."""
    return -(-elements // (PER_THREAD * THREADS))


def encode(name: str, flat: torch.Tensor, wire: torch.Tensor, key: int | None = None) -> None:
    """Fill ``wire`` from ``flat``, in torch's current stream of their device; see ``host.encode``."""
    low, high = (0, 0) if key is None else (key & 0xFFFFFFFF, key >> 32)
    _launch(kernel_name("encode", name, flat.dtype), flat, wire, flat.numel(), low, high, key is not None)


def decode(name: str, wire: torch.Tensor, flat: torch.Tensor) -> None:
    """Fill ``flat`` from ``wire``, in torch's current stream of their device; see ``host.decode``."""
    _launch(kernel_name("decode", name, flat.dtype), wire, flat, flat.numel())


def _launch(kernel: str, source: torch.Tensor, into: torch.Tensor, elements: int, *key: int) -> None:
    import cupy
    import numpy as np

    if not elements:
        return
    device = source.device.index
    stream = torch.cuda.current_stream(source.device).cuda_stream
    with cupy.cuda.Device(device), cupy.cuda.ExternalStream(stream, device):
        # As bytes, because CuPy has no bfloat16.
        given = [cupy.from_dlpack(tensor.detach().view(torch.uint8)) for tensor in (source, into)]
        words = [np.uint32(word) for word in key[:2]] + [np.int32(word) for word in key[2:]]
        _kernels(device).get_function(kernel)((grid_of(elements),), (THREADS,), (*given, np.int64(elements), *words))


@functools.cache
def _kernels(device: int) -> Any:
    """The compiled source, loaded on a device, which is the current one."""
    import cupy

    return cupy.RawModule(code=SOURCE.read_text(encoding="utf-8"), options=OPTIONS)
