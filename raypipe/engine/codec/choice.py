"""Which codec a tensor travels with, and how many bytes that takes: known to both ends before a byte is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from raypipe.engine.codec.arrays import BLOCK
from raypipe.errors import ConfigError
from raypipe.ir.schedule import Op

__all__ = [
    "CODECS", "NONE", "Codec", "Codecs", "applies", "message_bytes", "rounding_key", "travels_coded", "wire_bytes",
]  # fmt: skip

CODECS = ("none", "bf16", "fp16", "int8", "fp8", "int4")
"""The position is the code on the wire: append only."""

_AT_RANDOM = ("int8", "int4")

_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, *_HALVES)
_TAKES: dict[str, tuple[torch.dtype, ...]] = {
    "none": (), "bf16": (torch.float32,), "fp16": (torch.float32,), "int8": _FLOATS, "fp8": _FLOATS, "int4": _FLOATS,
}  # fmt: skip
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Codec:
    """What the tensors of one direction of a link travel as.

    Attributes:
        name: one of CODECS.
        rounding_seed: for int8 and int4; rounds at random, up or down with the chances that make the mean exact. Every
            message has its own draws, a function of this seed, its action and the position in it. None rounds to the
            nearest.

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
        """What messages of this operation travel as; all but activations and their gradients as they are."""
        if op is Op.SEND_F:
            return self.forward
        return self.backward if op is Op.SEND_B else NONE


def message_bytes(op: Op, tensors: Sequence[torch.Tensor | None], codecs: Codecs) -> tuple[int, int]:
    """(bytes of the tensors, bytes on the wire) of a message, padding apart."""
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
    """Whether a codec is meant for this tensor: of what goes forward only for what a gradient comes back for."""
    return name != "none" and (op is not Op.SEND_F or tensor.requires_grad)


def wire_bytes(name: str, dtype: torch.dtype, elements: int) -> int:
    """Bytes on the wire of ``elements`` distinct elements."""
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
    """Whether a codec takes this type and makes it smaller: by blocks a lone 32-bit number would grow."""
    return dtype in _TAKES[name] and wire_bytes(name, dtype, elements) < elements * dtype.itemsize


def rounding_key(seed: int, stage: int, op_code: int, microbatch: int, place: int) -> int:
    """64 bits that decide the draws of one tensor: every bit of every argument reaches all of them."""
    state = 0
    for part in (seed, stage, op_code, microbatch, place):
        state = _mix(state ^ (part & _MASK64))
    return state


def _mix(value: int) -> int:
    """The finaliser of splitmix64."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
