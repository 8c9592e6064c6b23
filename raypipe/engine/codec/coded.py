"""A tensor in the bytes of its codec, on its way between a link and a device that encodes and decodes itself.

    device   encode --> wire bytes --copy--> CodedTensor --> frame --> link --> frame --> CodedTensor --copy--> decode

Where stages compute in host memory the threads of a link encode and decode, and nobody sees one of these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["CodedTensor"]


@dataclass(frozen=True, slots=True, eq=False)
class CodedTensor:
    """What the tensor is, and its bytes.

    Attributes:
        wire: uint8, shape (wire bytes,), in host memory.
        codec: its name.
        dtype, shape, strides, requires_grad: of the tensor, which is dense or expanded.
        elements: distinct ones.
    """

    wire: torch.Tensor
    codec: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    elements: int

    @property
    def nbytes(self) -> int:
        """Of the tensor as its shape says, as ``torch.Tensor.nbytes``."""
        return math.prod(self.shape) * self.dtype.itemsize
