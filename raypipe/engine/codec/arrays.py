"""What each codec does to an array, once for all array modules: pass numpy or cupy as ``xp``.

    bf16   the upper half of the 32 bits, rounded to nearest even
    fp16   IEEE 754 binary16
    int8   | 4-byte scale of each block ... | 1 byte of each element ... |, byte = round(x / scale), x' = byte * scale
    fp8    the same, with x / scale as FP8 E4M3 (1 sign, 4 exponent, 3 mantissa bits; no infinity)
    int4   the same, two elements in a byte, the first one in the lower half; the last half byte may be empty, 0

Blocks are 128 elements, the last one shorter; scale = a / most, with a the block's largest magnitude and most 127, 448
or 7. Arrays are of one dimension. Blockwise 8-bit quantisation as in Dettmers et al. (arXiv:2110.02861), with linear
instead of dynamic bytes; E4M3 as in Micikevicius et al. (arXiv:2209.05433); rounding at random as in Gupta et al.
(arXiv:1502.02551), with draws that are a function of key and position: no generator has state, and parts of a tensor
may be encoded in any order.

A block whose scale would be no normal number arrives as zeros, so that nothing depends on whether a processor flushes
denormals. ``kernels.cu`` is the same in one pass over a GPU's memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "BLOCK", "DRAW", "FP8", "INT4", "INT8", "Levels", "decode_bf16", "decode_fp8", "decode_fp16",
    "decode_int4", "decode_int8", "draws", "encode_bf16", "encode_fp8", "encode_fp16", "encode_int4", "encode_int8",
    "scales_of",
]  # fmt: skip

BLOCK = 128
"""Elements that share a scale."""

DRAW = 2.0**-16
"""Steps that a draw of 1 stands for."""

_MOST = float(np.finfo(np.float32).max)


class Levels(NamedTuple):
    """What the elements of a block are scaled to.

    Attributes:
        most: largest magnitude of a code.
        least: blocks whose largest magnitude is below it arrive as zeros; ``most`` times the least normal number is
            just below.
    """

    most: int
    least: float

    @property
    def most_scale(self) -> float:
        """The largest scale that does not overflow when it is multiplied by ``most``."""
        return float(np.nextafter(np.float32(_MOST / self.most), np.float32(0)))


INT8, FP8, INT4 = Levels(127, 2.0**-119), Levels(448, 2.0**-117), Levels(7, 2.0**-123)

_LEAST_NORMAL_FP8 = 2.0**-6


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
    scales, steps = _in_steps(x, xp, INT8, key)
    with np.errstate(invalid="ignore"):
        return scales, xp.rint(steps).astype(xp.int8)


def decode_int8(scales: Any, code: Any, xp: Any) -> Any:
    """(scales, bytes) to float32."""
    return _times_scales(scales, code.astype(xp.float32), xp)


def encode_int4(x: Any, xp: Any, key: int | None = None) -> tuple[Any, Any]:
    """float32 to (scales as float32, one per block; pairs of elements as uint8); see ``encode_int8``."""
    scales, steps = _in_steps(x, xp, INT4, key)
    with np.errstate(invalid="ignore"):
        nibbles = xp.rint(steps).astype(xp.int8).view(xp.uint8) & 0x0F
    pairs = nibbles[0::2].copy()
    pairs[: x.size // 2] |= nibbles[1::2] << 4
    return scales, pairs


def decode_int4(scales: Any, code: Any, elements: int, xp: Any) -> Any:
    """(scales, pairs) to ``elements`` of float32."""
    values = xp.empty(2 * code.size, xp.int8)
    values[0::2] = (code << 4).view(xp.int8) >> 4  # which extends the sign
    values[1::2] = code.view(xp.int8) >> 4
    return _times_scales(scales, values[:elements].astype(xp.float32), xp)


def encode_fp8(x: Any, xp: Any) -> tuple[Any, Any]:
    """float32 to (scales as float32, one per block; E4M3 as uint8), rounded to nearest even."""
    scales, steps = _in_steps(x, xp, FP8, None)
    bits = steps.view(xp.uint32)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + (0x7FFFF + ((magnitude >> 20) & 1))) >> 20) - (120 << 3)
    with np.errstate(all="ignore"):  # a block that is not finite gets any bytes
        denormal = xp.rint(xp.abs(steps) * 512).astype(xp.uint32)
    code = xp.where(magnitude.view(xp.float32) < _LEAST_NORMAL_FP8, denormal, normal)
    return scales, (code & 0x7F | (bits >> 31) << 7).astype(xp.uint8)


def decode_fp8(scales: Any, code: Any, xp: Any) -> Any:
    """(scales, E4M3) to float32."""
    return _times_scales(scales, xp.asarray(_fp8_values())[code], xp)


def _fp8_values() -> Any:
    """What the 256 bytes of E4M3 stand for, as float32."""
    code = np.arange(256, dtype=np.uint32)
    exponent, mantissa = code >> 3 & 0xF, code & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8.0 + mantissa) * 2.0 ** (exponent - 10.0))
    magnitude[code & 0x7F == 0x7F] = np.nan
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


def scales_of(largest: Any, xp: Any, levels: Levels = INT8) -> tuple[Any, Any]:
    """Of blocks by their largest magnitude: what a code is multiplied by, and what an element is; float32."""
    most, least = levels.most, levels.least
    with np.errstate(all="ignore"):
        finite = xp.where(largest <= _MOST, xp.minimum(largest / most, levels.most_scale), xp.nan)
        scales = xp.where(largest < least, 0, finite).astype(xp.float32)
        return scales, (most / xp.maximum(largest, least)).astype(xp.float32)


def _in_steps(x: Any, xp: Any, levels: Levels, key: int | None) -> tuple[Any, Any]:
    """(scales, elements in steps of their block's scale), which with a key have their draws added."""
    whole = x.size - x.size % BLOCK
    blocks, rest = x[:whole].reshape(-1, BLOCK), x[whole:]
    largest = xp.abs(blocks).max(axis=1)
    if rest.size:  # the last, shorter block
        largest = xp.concatenate([largest, xp.abs(rest).max(keepdims=True)])
    scales, inverse = scales_of(largest, xp, levels)
    with np.errstate(all="ignore"):  # a block that is not finite gets any bytes
        steps = xp.concatenate([(blocks * inverse[: len(blocks), None]).reshape(-1), rest * inverse[len(blocks) :]])
        if key is not None:
            steps += draws(key, 0, x.size, xp) * xp.float32(DRAW)
    return scales, steps


def _times_scales(scales: Any, values: Any, xp: Any) -> Any:
    """Elements in steps, which are changed, times the scales of their blocks."""
    whole = values.size - values.size % BLOCK
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
