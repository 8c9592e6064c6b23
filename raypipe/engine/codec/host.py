"""Codecs on torch tensors in host memory: straight from a tensor into the bytes of a message, and back.

Where numpy is too slow torch does the same, to the bit but for the payload of a NaN: it converts to 16 bits in one
pass, which takes numpy seven (bf16) or is no vector code there (fp16). int8 goes through ``arrays`` in parts that stay
in a core's cache. docs/design/0014-codecs.md has the measurements.
"""

from __future__ import annotations

import numpy as np
import torch

from raypipe.engine.codec import arrays

__all__ = ["PART", "decode", "encode"]

PART = 128 * arrays.BLOCK
"""Elements that are encoded at a time: their copies stay in the cache of a core."""
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def encode(name: str, flat: torch.Tensor, wire: torch.Tensor, key: int | None = None) -> None:
    """Fill ``wire`` from ``flat``.

    Args:
        name: of a codec that applies to the tensor, not "none".
        flat: (elements,), contiguous, without a gradient.
        wire: (wire bytes,) of uint8, at a multiple of 4 bytes.
        key: of random rounding, for int8.
    """
    if name in _HALVES:
        wire.view(_HALVES[name]).copy_(flat)
        return
    scales, code = _int8_parts(wire, flat.numel())
    for start in range(0, flat.numel(), PART):
        part = flat[start : start + PART].to(torch.float32).numpy()
        place = start // arrays.BLOCK
        found = arrays.encode_int8(part, np, key, start)
        scales[place : place + found[0].size], code[start : start + part.size] = found


def decode(name: str, wire: torch.Tensor, flat: torch.Tensor) -> None:
    """Fill ``flat``, of the type that the sender had, from ``wire``; any bytes give some numbers."""
    if name in _HALVES:
        flat.copy_(wire.view(_HALVES[name]))
        return
    scales, code = _int8_parts(wire, flat.numel())
    for start in range(0, flat.numel(), PART):
        part = code[start : start + PART]
        place = start // arrays.BLOCK
        values = arrays.decode_int8(scales[place : place - (-part.size // arrays.BLOCK)], part, np)
        flat[start : start + part.size].copy_(torch.from_numpy(values))


def _int8_parts(wire: torch.Tensor, elements: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales and bytes, as views."""
    split = wire.numel() - elements
    raw = wire.numpy()
    return raw[:split].view(np.float32), raw[split:].view(np.int8)
