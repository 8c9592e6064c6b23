"""What each codec does to an array, once for all array modules: pass numpy or cupy as ``xp``.

    bf16   the upper half of the 32 bits, rounded to nearest even
    fp16   IEEE 754 binary16
    int8   blocks of 128 elements, the last one shorter: | 4-byte scale of each block ... | 1 byte of each element ... |
           scale = a / 127 with a the block's largest magnitude, byte = round(x / scale), x' = byte * scale

Arrays are of one dimension. Blockwise 8-bit quantisation as in Dettmers et al. (arXiv:2110.02861), with linear instead
of dynamic bytes; rounding at random as in Gupta et al. (arXiv:1502.02551), with draws that are a function of key and
position: no generator has state, and parts of a tensor may be encoded in any order.

A block whose scale would be no normal number arrives as zeros, so that nothing depends on whether a processor flushes
denormals.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = [
    "BLOCK", "DRAW", "LEAST", "decode_bf16", "decode_fp16", "decode_int8", "draws", "encode_bf16", "encode_fp16",
    "encode_int8", "scales_of",
]  # fmt: skip

BLOCK = 128
"""Elements that share a scale."""

LEAST = 2.0**-119
"""Blocks whose largest magnitude is below it arrive as zeros; 127 times the least normal number is just above."""

DRAW = 2.0**-16
"""Steps that a draw of 1 stands for."""

_MOST = float(np.finfo(np.float32).max)
_MOST_SCALE = float(np.nextafter(np.float32(_MOST / 127), np.float32(0)))  # 127 times this does not overflow


def encode_bf16(x: Any, xp: Any) -> Any:
    """float32 to the bits of bfloat16, as uint16; a NaN keeps its sign and is quiet."""
    bits = x.view(xp.uint32)
    upper = bits >> 16
    rounded = (bits + ((upper & 1) + 0x7FFF)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000  # adding to it could end in infinity, or in zero
    return xp.where(is_nan, upper | 0x0040, rounded).astype(xp.uint16)


def decode_bf16(code: Any, xp: Any) -> Any:
    """The bits of bfloat16 to float32, exactly."""
    return (code.astype(xp.uint32) << 16).view(xp.float32)


def encode_fp16(x: Any, xp: Any) -> Any:
    """float32 to float16; what is too large becomes infinite, which a check of the step finds."""
    with np.errstate(over="ignore", under="ignore"):
        return x.astype(xp.float16)


def decode_fp16(code: Any, xp: Any) -> Any:
    """float16 to float32, exactly."""
    return code.astype(xp.float32)


def encode_int8(x: Any, xp: Any, key: int | None = None) -> tuple[Any, Any]:
    """float32 to (scales as float32, one per block; bytes as int8).

    Args:
        x: the elements.
        key: rounds at random, by draws of this key; None rounds to nearest even.
    """
    whole = x.size - x.size % BLOCK
    blocks, rest = x[:whole].reshape(-1, BLOCK), x[whole:]
    largest = xp.abs(blocks).max(axis=1)
    if rest.size:  # the last, shorter block
        largest = xp.concatenate([largest, xp.abs(rest).max(keepdims=True)])
    scales, inverse = scales_of(largest, xp)
    with np.errstate(all="ignore"):  # a block that is not finite gets any bytes
        steps = xp.concatenate([(blocks * inverse[: len(blocks), None]).reshape(-1), rest * inverse[len(blocks) :]])
        if key is not None:
            steps += draws(key, 0, x.size, xp) * xp.float32(DRAW)
        return scales, xp.rint(steps).astype(xp.int8)


def scales_of(largest: Any, xp: Any) -> tuple[Any, Any]:
    """Of blocks by their largest magnitude: what a byte is multiplied by, and what an element is; float32."""
    with np.errstate(all="ignore"):
        finite = xp.where(largest <= _MOST, xp.minimum(largest / 127, _MOST_SCALE), xp.nan)
        scales = xp.where(largest < LEAST, 0, finite).astype(xp.float32)
        return scales, (127 / xp.maximum(largest, LEAST)).astype(xp.float32)


def decode_int8(scales: Any, code: Any, xp: Any) -> Any:
    """(scales, bytes) to float32."""
    whole = code.size - code.size % BLOCK
    values = code.astype(xp.float32)
    blocks, rest = values[:whole].reshape(-1, BLOCK), values[whole:]
    with np.errstate(all="ignore"):  # 0 * NaN is how a block says that it was not finite
        xp.multiply(blocks, scales[: len(blocks), None], out=blocks)
        xp.multiply(rest, scales[len(blocks) :], out=rest)  # of one scale, or nothing by none
    return values


def draws(key: int, start: int, count: int, xp: Any) -> Any:
    """int16 for positions ``start``, an even number, to ``start + count``: odd, and as often above 0 as below.

    Times DRAW they are uniform in (-1/2, 1/2), and added to an element in steps they round it at random. So few bits
    that adding one to a whole number of steps is exact: what needs no rounding is not rounded.
    """
    low, high = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    # One word for two neighbours. Multiply, shift and fold, as in Wellons' "lowbias32"; the key comes in twice.
    bits = xp.arange(start // 2, (start + count + 1) // 2, dtype=xp.uint32)
    bits *= 0x9E3779B1
    bits += low
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= high
    bits ^= bits >> 15
    bits *= 0x846CA68B
    bits ^= bits >> 16
    bits |= 0x00010001
    return bits.view(xp.int16)[:count]
