"""Codec of a tensor and its size in bytes on the wire, which type and shape determine before a byte is sent.

A stage on a GPU encodes and decodes there. A link between hosts then carries its tensors as CodedTensor:

    device   encode --> wire bytes --copy--> CodedTensor --> frame --> link --> frame --> CodedTensor --copy--> decode
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from raypipe.engine.codec.tah import FORMS
from raypipe.errors import ConfigError
from raypipe.ir.schedule import Op

BLOCK = 128
"""Number of consecutive elements that share one 4-byte scale, in int8, fp8 and int4."""

CODECS = ("none", "bf16", "fp16", "int8", "fp8", "int4", "tah4", "tah3")
"""Names of the codecs. The index of a name is its code on the wire, so new names may only be appended."""

_AT_RANDOM = ("int8", "int4")

_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, *_HALVES)
_TAKES: dict[str, tuple[torch.dtype, ...]] = {
    "none": (), "bf16": (torch.float32,), "fp16": (torch.float32,), "int8": _FLOATS, "fp8": _FLOATS, "int4": _FLOATS,
    "tah4": _FLOATS, "tah3": _FLOATS,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Codec:
    """Codec of one direction of a link.

    Attributes:
        name: one of CODECS.
        rounding_seed: seed of stochastic rounding, for int8 and int4. The random numbers of a message are a function of
            this seed, the message's action and the position in the message. None rounds to nearest.

    Raises:
        ConfigError: the name is unknown, or a codec other than int8 and int4 has a seed.
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
        """Return the codec of the messages of SEND_F (activations) or SEND_B (their gradients); NONE for others."""
        if op is Op.SEND_F:
            return self.forward
        return self.backward if op is Op.SEND_B else NONE


def message_bytes(op: Op, tensors: Sequence[torch.Tensor | None], codecs: Codecs) -> tuple[int, int]:
    """Return the bytes of a message's tensors (before encoding, after encoding), without padding and header."""
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
    """Return True if the codec ``name`` may encode a tensor of a message with the operation ``op``.

    In a forward message, only tensors that require a gradient are encoded.
    """
    return name != "none" and (op is not Op.SEND_F or tensor.requires_grad)


def wire_bytes(name: str, dtype: torch.dtype, elements: int) -> int:
    """Return the bytes of a tensor with ``elements`` distinct elements, after encoding by the codec ``name``."""
    match name:
        case "none":
            return elements * dtype.itemsize
        case "int8" | "fp8":
            return elements + 4 * -(-elements // BLOCK)
        case "tah4" | "tah3":
            return FORMS[name].wire_bytes(elements)
        case "int4":
            return (elements + 1) // 2 + 4 * -(-elements // BLOCK)
        case _:
            return 2 * elements


def applies(name: str, dtype: torch.dtype, elements: int) -> bool:
    """Return True if a codec supports a dtype and saves bytes; one element with its scale is no smaller than before."""
    return dtype in _TAKES[name] and wire_bytes(name, dtype, elements) < elements * dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class CodedTensor:
    """Encoded tensor, as exchanged between a link and a device that encodes and decodes tensors itself.

    Attributes:
        wire: encoded bytes, uint8, shape (wire bytes,).
        codec: name of the codec.
        dtype, shape, strides, requires_grad: properties of the decoded tensor, which is dense or expanded.
        elements: number of distinct elements.
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
