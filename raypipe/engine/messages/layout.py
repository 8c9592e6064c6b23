"""Memory layout: which bytes a tensor owns, and the strides that rebuild it over a copy of them.

dense        channels_last, transposed, contiguous      its memory extent, as it is
expanded     a stride of 0 over more than one element   the distinct elements only
other        gaps (x[::2]) or overlaps (unfold)         packed first, order of strides kept
"""

from __future__ import annotations

import ctypes
import functools
import math

import torch

__all__ = ["densified", "distinct_elements", "is_plain", "raw_bytes", "span"]


def span(shape: tuple[int, ...]) -> int:
    """Elements of a shape whose empty dimensions are taken as 1: bounds all arithmetic on shape and strides."""
    return math.prod(max(size, 1) for size in shape)


@functools.lru_cache(maxsize=256)
def distinct_elements(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """Elements in memory of a dense or expanded tensor; None if it has gaps or overlaps."""
    if 0 in shape:
        return 0
    elements = 1
    for stride, size in sorted((t, s) for s, t in zip(shape, strides, strict=True) if s != 1 and t != 0):
        if stride != elements:
            return None
        elements *= size
    return elements


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor has strides and a host address, and its memory holds the values that it shows."""
    return tensor.layout is torch.strided and tensor.is_cpu and not (tensor.is_conj() or tensor.is_neg())


def densified(tensor: torch.Tensor) -> torch.Tensor:
    """A dense or expanded tensor of the same values: a packed copy, unless lazy conjugation was all."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    shape, strides = tuple(plain.shape), plain.stride()
    if distinct_elements(shape, strides) is not None:
        return plain
    distinct = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
    packed, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (strides[d], -d)):
        if strides[dim]:
            packed[dim] = step
            step *= distinct[dim]
    copy = torch.empty_strided(distinct, packed, dtype=plain.dtype, device=plain.device)
    copy.copy_(plain.as_strided(distinct, strides))
    return copy.as_strided(shape, packed)


def raw_bytes(tensor: torch.Tensor, extent_bytes: int) -> memoryview:
    """The first ``extent_bytes`` of a plain tensor's memory, writable; the view keeps it alive.

    It asks torch for the address only. The way over as_strided, view(uint8) and numpy makes three
    tensors on the path of every message, which doubles the time of a send after some idling.
    """
    if extent_bytes == 0:  # an empty tensor may have no address
        return memoryview(b"")
    memory = (ctypes.c_ubyte * extent_bytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory)
