"""Codec of a tensor and its bytes on the wire: known to both ends before a byte is sent.

A stage on a GPU encodes and decodes itself; its tensors cross a link as CodedTensor:

    device   encode --> wire bytes --copy--> CodedTensor --> frame --> link --> frame --> CodedTensor --copy--> decode
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from raypipe.errors import ConfigError
from raypipe.ir.schedule import Op

BLOCK = 128
"""Elements that share a scale."""

CODECS = ("none", "bf16", "fp16", "int8", "fp8", "int4")
"""The position is the code on the wire: append only."""

_AT_RANDOM = ("int8", "int4")

_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, *_HALVES)
_TAKES: dict[str, tuple[torch.dtype, ...]] = {
    "none": (), "bf16": (torch.float32,), "fp16": (torch.float32,), "int8": _FLOATS, "fp8": _FLOATS, "int4": _FLOATS,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Codec:
    """Codec of one direction of a link.

    Attributes:
        name: one of CODECS.
        rounding_seed: for int8 and int4; rounds at random, with the true value as the mean. Draws of a message are a
            function of this seed, its action and the position in it. None rounds to nearest.

    Raises:
        ConfigError: no such codec, or a seed for one that does not round at random.
    """

    name: str = "none"
    rounding_seed: int | None = None

    def __post_init__(self) -> None:
        if self.name not in CODECS:
            raise ConfigError(f"codec {self.name!r} is not one of {', '.join(map(repr, CODECS))}.")
        if self.rounding_seed is not None and self.name not in _AT_RANDOM:
            raise ConfigError(
                f"codec {self.name!r} does not round at random: leave rounding_seed={self.rounding_seed} out, "
                "or take 'int8' or 'int4'."
            )


NONE = Codec()


class Codecs(NamedTuple):
    """A codec for each direction of a link."""

    forward: Codec = NONE
    backward: Codec = NONE

    def of(self, op: Op) -> Codec:
        """Return the codec of an operation's messages: NONE, but for activations and their gradients."""
        if op is Op.SEND_F:
            return self.forward
        return self.backward if op is Op.SEND_B else NONE


def message_bytes(op: Op, tensors: Sequence[torch.Tensor | None], codecs: Codecs) -> tuple[int, int]:
    """Return (bytes of the tensors, bytes on the wire) of a message, without padding."""
    plain = sum(x.nbytes for x in tensors if x is not None)
    name = codecs.of(op).name
    if name == "none":
        return plain, plain
    saved = sum(
        x.nbytes - wire_bytes(name, x.dtype, x.numel())
        for x in tensors
        if x is not None and travels_coded(name, op, x) and applies(name, x.dtype, x.numel())
    )
    return plain, plain - saved


def travels_coded(name: str, op: Op, tensor: torch.Tensor) -> bool:
    """Return True if a codec is meant for a tensor: forward only for tensors that require a gradient."""
    return name != "none" and (op is not Op.SEND_F or tensor.requires_grad)


def wire_bytes(name: str, dtype: torch.dtype, elements: int) -> int:
    """Return the bytes on the wire of ``elements`` distinct elements."""
    match name:
        case "none":
            return elements * dtype.itemsize
        case "int8" | "fp8":
            return elements + 4 * -(-elements // BLOCK)
        case "int4":
            return (elements + 1) // 2 + 4 * -(-elements // BLOCK)
        case _:
            return 2 * elements


def applies(name: str, dtype: torch.dtype, elements: int) -> bool:
    """Return True if a codec takes a type and makes it smaller: a lone 32-bit number would grow by its scale."""
    return dtype in _TAKES[name] and wire_bytes(name, dtype, elements) < elements * dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class CodedTensor:
    """Tensor in the bytes of its codec, between a link and a device that encodes and decodes itself.

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
        """Bytes of the decoded tensor, as ``torch.Tensor.nbytes``."""
        return math.prod(self.shape) * self.dtype.itemsize
