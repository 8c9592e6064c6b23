"""Codecs on tensors of an NVIDIA device: one kernel to encode a tensor, one to decode it, by CuPy.

    flat --(its address, no copy)--> kernel of kernels.cu in torch's current stream --> wire

The results are bitwise equal to those of ``host``. NVRTC compiles the kernels when a process first uses them on a
device, and CuPy keeps them in its cache folder. CuPy is an extra (``pip install raypipe[cuda13]``), imported at the
first call. A kernel takes 15 to 30 us for 64 MiB. So the kernel found by name and CuPy's view of the stream are cached,
to keep a launch short (see docs/design/0046).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from raypipe.engine.codec.codec import BLOCK

SOURCE = Path(__file__).with_name("kernels.cu")

OPTIONS = ("--std=c++17",)
"""Options of NVRTC. CuPy adds -ftz=true, which kernels.cu provides for."""

THREADS = 256
"""Number of threads in a CUDA thread block, a multiple of 32."""

_TYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_F32 = (torch.float32,)

KERNELS: dict[str, tuple[torch.dtype, ...]] = {
    "bf16": _F32, "fp16": _F32, "int8": tuple(_TYPES), "fp8": tuple(_TYPES), "int4": tuple(_TYPES),
    "tah4": tuple(_TYPES), "tah3": tuple(_TYPES),
}  # fmt: skip
"""Dtypes that each codec supports."""


def kernel_name(way: str, name: str, dtype: torch.dtype) -> str:
    """Return the name in kernels.cu of a codec's kernel; ``way`` is "encode" or "decode"."""
    return f"{way}_{name}_{_TYPES[dtype]}"


def grid_of(kernel: str, elements: int) -> int:
    """Return the number of thread blocks of a launch. A thread computes 4 elements in bf16 and fp16, else 16."""
    of_thread = 4 if kernel.split("_")[1] in ("bf16", "fp16") else BLOCK // 8
    return -(-elements // (of_thread * THREADS))


def encode(name: str, flat: torch.Tensor, wire: torch.Tensor, key: int | None = None) -> None:
    """Fill ``wire`` from ``flat``, in torch's current stream of their device; see ``host.encode``."""
    low, high = (0, 0) if key is None else (key & 0xFFFFFFFF, key >> 32)
    _launch(kernel_name("encode", name, flat.dtype), flat, wire, flat.numel(), low, high, key is not None)


def decode(name: str, wire: torch.Tensor, flat: torch.Tensor) -> None:
    """Fill ``flat`` from ``wire``, in torch's current stream of their device; see ``host.decode``."""
    _launch(kernel_name("decode", name, flat.dtype), wire, flat, flat.numel())


def _launch(kernel: str, source: torch.Tensor, into: torch.Tensor, elements: int, *key: int) -> None:
    if not elements:
        return
    place = source.device
    with torch.cuda.device(place), _stream(torch.cuda.current_stream(place).cuda_stream, place.index):
        # Addresses, because CuPy has no bfloat16; 32 bits are the key's words, a plain int is 64.
        words = [np.uint32(word) for word in key]
        _kernel(kernel)(
            (grid_of(kernel, elements),), (THREADS,), (source.data_ptr(), into.data_ptr(), elements, *words)
        )


class _Handle(NamedTuple):
    """Adapter that presents a stream of torch to CuPy."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return (version of CUDA's stream protocol, cudaStream_t as an integer)."""
        return 0, self.address


@functools.cache
def _stream(address: int, device: int) -> Any:
    """Return CuPy's view of the torch stream with this handle. The view is cached: torch never destroys its streams.

    Args:
        address: cudaStream_t as an integer; 0 for the default stream.
        device: index of the current CUDA device; only distinguishes the cached streams of different devices.
    """
    from cupy.cuda import Stream

    return Stream.from_external(_Handle(address)) if address else Stream.null


@functools.cache
def _kernel(name: str) -> Any:
    """Return the kernel ``name`` of kernels.cu. CuPy loads it on each device that launches it."""
    return _module().get_function(name)


@functools.cache
def _module() -> Any:
    import cupy

    return cupy.RawModule(code=SOURCE.read_text(encoding="utf-8"), options=OPTIONS)
