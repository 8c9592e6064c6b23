"""Codecs on torch tensors in host memory: straight from a tensor into the bytes of a message, and back.

They do what ``arrays`` defines, to the bit but for the payload of a NaN; on a CPU torch does it in fewer passes than
numpy, and one core per link's thread does it (docs/design/0014-codecs.md has the measurements). Codecs by blocks go
through a tensor in parts whose copies stay in a core's cache.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import torch

from raypipe.engine.codec import arrays
from raypipe.engine.codec.arrays import BLOCK, FP8, INT4, INT8

__all__ = ["PART", "decode", "encode", "one_core"]

PART = 1024 * BLOCK
"""Elements of a part."""

_local = threading.local()
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LEVELS = {"int8": INT8, "fp8": FP8, "int4": INT4}


def one_core() -> None:
    """Keep the codecs of the calling thread, a link's, on one core: the others compute. Costs nothing but once."""
    if not getattr(_local, "one_core", False):
        torch.set_num_threads(1)
        _local.one_core = True


def encode(name: str, flat: torch.Tensor, wire: torch.Tensor, key: int | None = None) -> None:
    """Fill ``wire`` from ``flat``.

    Args:
        name: of a codec that applies to the tensor, not "none".
        flat: (elements,), contiguous, without a gradient.
        wire: (wire bytes,) of uint8, at a multiple of 4 bytes.
        key: of random rounding, for int8 and int4.
    """
    if name in _HALVES:
        wire.view(_HALVES[name]).copy_(flat)
        return
    flat = flat.to(torch.float32)
    scales, code = _scales_and_code(wire, flat.numel())
    largest, scratch = torch.empty_like(scales), _scratch()
    for start, stop, width in _parts(flat.numel()):
        steps = scratch[: stop - start].view(-1, width)
        torch.abs(flat[start:stop].view(-1, width), out=steps)
        torch.amax(steps, 1, out=largest[start // BLOCK : -(-stop // BLOCK)])
    found, inverse = arrays.scales_of(largest.numpy(), np, _LEVELS[name])
    scales.numpy()[:] = found
    columns = torch.from_numpy(inverse).view(-1, 1)
    for start, stop, width in _parts(flat.numel()):
        steps = scratch[: stop - start].view(-1, width)
        torch.mul(flat[start:stop].view(-1, width), columns[start // BLOCK : -(-stop // BLOCK)], out=steps)
        if key is not None:
            drawn = torch.from_numpy(arrays.draws(key, start, stop - start, np))
            steps.add_(drawn.view(-1, width), alpha=arrays.DRAW)
        match name:
            case "fp8":
                code[start:stop].view(torch.float8_e4m3fn).view(-1, width).copy_(steps)
            case "int4":
                _pack(steps.round_().view(-1), code[start // 2 : (stop + 1) // 2])
            case _:
                code[start:stop].view(torch.int8).view(-1, width).copy_(steps.round_())


def decode(name: str, wire: torch.Tensor, flat: torch.Tensor) -> None:
    """Fill ``flat``, of the type that the sender had, from ``wire``; any bytes give some numbers."""
    if name in _HALVES:
        flat.copy_(wire.view(_HALVES[name]))
        return
    scales, code = _scales_and_code(wire, flat.numel())
    columns = scales.view(-1, 1)
    for start, stop, width in _parts(flat.numel()):
        values = flat[start:stop].view(-1, width)
        match name:
            case "fp8":
                steps = _scratch()[: stop - start].copy_(code[start:stop].view(torch.float8_e4m3fn))
            case "int4":
                steps = _unpacked(code[start // 2 : (stop + 1) // 2])[: stop - start]
            case _:
                steps = code[start:stop].view(torch.int8)
        torch.mul(steps.view(-1, width), columns[start // BLOCK : -(-stop // BLOCK)], out=values)


def _pack(whole: torch.Tensor, pairs: torch.Tensor) -> None:
    """Whole numbers from -7 to 7 as float32 to two in a byte; an empty half is 0."""
    nibbles = whole.to(torch.int8).view(torch.uint8) & 0x0F
    pairs.copy_(nibbles[0::2])
    pairs[: whole.numel() // 2] |= nibbles[1::2] << 4


def _unpacked(pairs: torch.Tensor) -> torch.Tensor:
    """int8, two for each byte."""
    signed = pairs.view(torch.int8)
    return torch.stack(((signed << 4) >> 4, signed >> 4), dim=1).view(-1)  # shifts to the right extend the sign


def _scales_and_code(wire: torch.Tensor, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales as float32 and what follows as uint8, as views."""
    split = 4 * -(-elements // BLOCK)
    return wire[:split].view(torch.float32), wire[split:]


def _scratch() -> torch.Tensor:
    """Room for one part, kept by each thread: fresh pages would take as long as the arithmetic."""
    found = getattr(_local, "scratch", None)
    if found is None:
        found = _local.scratch = torch.empty(PART)
    return found


def _parts(elements: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, width of a row) of all parts; the last block, where it is shorter, is a part of its own."""
    whole = elements - elements % BLOCK
    for start in range(0, whole, PART):
        yield start, min(start + PART, whole), BLOCK
    if whole < elements:
        yield whole, elements, elements - whole
