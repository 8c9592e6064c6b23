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

__all__ = ["dense", "distinct_elements", "raw_bytes", "span"]


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


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a packed copy if its memory is not the dense image of its values."""
    if tensor.is_conj() or tensor.is_neg():  # lazy: the memory holds other values than the tensor shows
        tensor = tensor.detach().resolve_conj().resolve_neg()
    shape, strides = tuple(tensor.shape), tensor.stride()
    if distinct_elements(shape, strides) is not None:
        return tensor
    distinct = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
    packed, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (strides[d], -d)):
        if strides[dim]:
            packed[dim] = step
            step *= distinct[dim]
    copy = torch.empty_strided(distinct, packed, dtype=tensor.dtype)
    copy.copy_(tensor.detach().as_strided(distinct, strides))
    return copy.as_strided(shape, packed)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor made by ``dense``, writable; the view keeps it alive.

    It asks torch for the address only. The way over as_strided, view(uint8) and numpy makes three
    tensors on the path of every message, which between two steps of idling took 90 us instead of 10.
    """
    elements = distinct_elements(tuple(tensor.shape), tensor.stride())
    assert elements is not None, "raw_bytes takes what dense returned"
    if elements == 0:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * (elements * tensor.itemsize)).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory)
