"""Tensors through Ray's object store as plain bytes: numpy views that workers read without a copy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch

__all__ = ["PackedTensor", "pack", "unpack"]


class PackedTensor(NamedTuple):
    """dtype by torch's name, shape, and the bytes in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


def pack(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, PackedTensor]:
    """The named tensors; views of their memory where it is contiguous."""
    packed = {}
    for name in names:
        tensor = tensors[name].detach().cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy()
        packed[name] = PackedTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)
    return packed


def unpack(packed: Mapping[str, PackedTensor]) -> dict[str, torch.Tensor]:
    """Tensors with memory of their own."""
    tensors = {}
    for name, (dtype, shape, data) in packed.items():
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = data
        tensors[name] = tensor
    return tensors
