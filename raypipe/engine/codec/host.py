"""Codecs on torch tensors in host memory: straight from a tensor into the bytes of a message, and back.

    bf16   torch's conversion, rounded to nearest even
    fp16   IEEE 754 binary16; a number that is too large becomes infinite
    int8   | 4-byte scale of each block ... | 1 byte of each element ... |, byte = round(x / scale), x' = byte * scale
    fp8    the same, with x / scale as FP8 E4M3 (1 sign, 4 exponent, 3 mantissa bits; no infinity)
    int4   the same, two elements in a byte, the first one in the lower half; the last half byte may be empty, 0
    tah4, tah3   a Hadamard transform and codes of several lengths: see tah.py

Blocks are 128 elements, the last one shorter; scale = a / most, with a the block's largest magnitude and most 127, 448
or 7. Blockwise 8-bit quantisation as in Dettmers et al. (arXiv:2110.02861), with linear instead of dynamic bytes; E4M3
as in Micikevicius et al. (arXiv:2209.05433); stochastic rounding as in Gupta et al. (arXiv:1502.02551). Its random
numbers are a function of key and position: no generator has state, and parts of a tensor may be encoded in any order.

A block whose scale would be denormal is decoded as zeros, so that nothing depends on a processor's flushing of
denormals. ``kernels.cu`` computes bitwise equal results, except the payload of a NaN, in one pass over a GPU's memory.
Here the thread of each link uses one core (docs/results/codec.md), and encodes in parts that fit in the core's cache.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from raypipe.engine.codec import tah
from raypipe.engine.codec.codec import BLOCK, wire_bytes
from raypipe.engine.torch_settings import one_thread

PART = 1024 * BLOCK
"""Number of elements that are encoded or decoded at a time, so that intermediate values stay in the cache."""

DRAW = 2.0**-16
"""Factor of the random int16 of ``draws``. The product is added to an element, divided by the block's scale, before it
is rounded.
"""
_MOST = float(np.finfo(np.float32).max)


class Levels(NamedTuple):
    """Range of a codec's codes, to which the elements of a block are scaled.

    Attributes:
        most: largest magnitude of a code.
        least: power of two just above ``most`` times the smallest normal float32. A block whose largest magnitude is
            below ``least`` is decoded as zeros.
    """

    most: int
    least: float

    @property
    def most_scale(self) -> float:
        """Largest scale whose product with ``most`` is finite in float32."""
        return float(np.nextafter(np.float32(_MOST / self.most), np.float32(0)))


INT8, FP8, INT4 = Levels(127, 2.0**-119), Levels(448, 2.0**-117), Levels(7, 2.0**-123)

_local = threading.local()
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LEVELS = {"int8": INT8, "fp8": FP8, "int4": INT4}


def one_core() -> None:
    """Limit torch to one thread in the calling thread, which serves a link; other cores are for computing threads."""
    if not getattr(_local, "one_core", False):
        torch.set_num_threads(1)
        _local.one_core = True


def encode(name: str, flat: torch.Tensor, wire: torch.Tensor, key: int | None = None) -> None:
    """Encode ``flat`` into ``wire``.

    Args:
        name: codec that supports the tensor's dtype, not "none".
        flat: tensor to encode, shape (elements,), contiguous, without requires_grad.
        wire: memory for the encoded bytes, uint8, shape (wire bytes,), aligned to 4 bytes.
        key: key of stochastic rounding, for int8 and int4; None rounds to nearest.
    """
    if name in _HALVES:
        wire.view(_HALVES[name]).copy_(flat)
        return
    flat = flat.to(torch.float32)
    if name in tah.FORMS:
        tah.encode(tah.FORMS[name], flat, wire)
        return
    scales, code = _scales_and_code(wire, flat.numel())
    largest, scratch = torch.empty_like(scales), _scratch()
    for start, stop, width in _parts(flat.numel()):
        steps = scratch[: stop - start].view(-1, width)
        torch.abs(flat[start:stop].view(-1, width), out=steps)
        torch.amax(steps, 1, out=largest[start // BLOCK : -(-stop // BLOCK)])
    block_scales, inverse = _scales_of(largest.numpy(), _LEVELS[name])
    scales.numpy()[:] = block_scales
    columns = torch.from_numpy(inverse).view(-1, 1)
    for start, stop, width in _parts(flat.numel()):
        steps = scratch[: stop - start].view(-1, width)
        torch.mul(flat[start:stop].view(-1, width), columns[start // BLOCK : -(-stop // BLOCK)], out=steps)
        if key is not None:
            drawn = torch.from_numpy(draws(key, start, stop - start))
            steps.add_(drawn.view(-1, width), alpha=DRAW)
        match name:
            case "fp8":
                code[start:stop].view(torch.float8_e4m3fn).view(-1, width).copy_(steps)
            case "int4":
                _pack(steps.round_().view(-1), code[start // 2 : (stop + 1) // 2])
            case _:
                code[start:stop].view(torch.int8).view(-1, width).copy_(steps.round_())


def decode(name: str, wire: torch.Tensor, flat: torch.Tensor) -> None:
    """Decode ``wire`` into ``flat``, shape (elements,), with the dtype of the tensor that the codec ``name`` encoded.

    Nothing is raised, whatever bytes ``wire`` has.
    """
    if name in _HALVES:
        flat.copy_(wire.view(_HALVES[name]))
        return
    if name in tah.FORMS:
        tah.decode(tah.FORMS[name], wire, flat)
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


def _scales_of(largest: np.ndarray, levels: Levels) -> tuple[np.ndarray, np.ndarray]:
    """Return (scales that decode codes, inverse scales that encode elements), both float32 of shape (blocks,).

    ``largest`` has the largest magnitude of each block.
    """
    most, least = levels.most, levels.least
    with np.errstate(all="ignore"):
        finite = np.where(largest <= _MOST, np.minimum(largest / most, levels.most_scale), np.nan)
        scales = np.where(largest < least, 0, finite).astype(np.float32)
        return scales, (most / np.maximum(largest, least)).astype(np.float32)


def draws(key: int, start: int, count: int) -> np.ndarray:
    """Return pseudo-random odd int16, shape (count,), for ``key`` and the positions from ``start``, an even number.

    Multiplied by DRAW they are uniform in (-1/2, 1/2), symmetric about 0. An element is rounded stochastically by
    adding such a number to the element divided by its scale, and rounding to nearest. A whole number is never changed.
    """
    low, high = key & 0xFFFFFFFF, key >> 32 & 0xFFFFFFFF
    # One word for two neighbours. Multiply, shift and fold, as in Wellons' "lowbias32"; the key comes in twice.
    bits = np.arange(start // 2, (start + count + 1) // 2, dtype=np.uint32)
    bits *= 0x9E3779B1
    bits += low
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= high
    bits ^= bits >> 15
    bits *= 0x846CA68B
    bits ^= bits >> 16
    bits |= 0x00010001
    return bits.view(np.int16)[:count]


def _pack(whole: torch.Tensor, pairs: torch.Tensor) -> None:
    """Pack ``whole``, float32 integers from -7 to 7, into ``pairs``, two to a byte; an unused last half byte is 0."""
    nibbles = whole.to(torch.int8).view(torch.uint8) & 0x0F
    pairs.copy_(nibbles[0::2])
    pairs[: whole.numel() // 2] |= nibbles[1::2] << 4


def _unpacked(pairs: torch.Tensor) -> torch.Tensor:
    """Return the two signed 4-bit integers of each byte, lower half first, as int8 of shape (2 * bytes,)."""
    signed = pairs.view(torch.int8)
    return torch.stack(((signed << 4) >> 4, signed >> 4), dim=1).view(-1)  # shifts to the right extend the sign


def _scales_and_code(wire: torch.Tensor, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the two parts of an encoded tensor: (scales, float32 of shape (blocks,); codes, uint8)."""
    split = 4 * -(-elements // BLOCK)
    return wire[:split].view(torch.float32), wire[split:]


def _scratch() -> torch.Tensor:
    """Return this thread's float32 scratch memory of PART elements. New memory would cost as much as the arithmetic."""
    scratch = getattr(_local, "scratch", None)
    if scratch is None:
        scratch = _local.scratch = torch.empty(PART)
    return scratch


def _parts(elements: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, elements per block) of each part of a tensor. A shorter last block is a separate part."""
    whole = elements - elements % BLOCK
    for start in range(0, whole, PART):
        yield start, min(start + PART, whole), BLOCK
    if whole < elements:
        yield whole, elements, elements - whole


SAMPLE_ELEMENTS = 1 << 18
ROUNDS = 5


def codec_cost(name: str) -> tuple[float, float, float]:
    """Measure a codec; return (compression ratio, seconds to encode a byte, seconds to decode a byte).

    Seconds are per byte of the float32 tensor, before encoding: the shortest of ROUNDS rounds over 1 MiB on one thread.
    The measurement takes some milliseconds.
    """
    plain = torch.linspace(-3.0, 3.0, SAMPLE_ELEMENTS)
    wire = torch.empty(wire_bytes(name, plain.dtype, plain.numel()), dtype=torch.uint8)
    encode_s, decode_s = [], []
    with one_thread():
        for _ in range(ROUNDS):
            begin_s = time.perf_counter()
            encode(name, plain, wire, None)
            middle_s = time.perf_counter()
            decode(name, wire, plain)
            encode_s.append(middle_s - begin_s)
            decode_s.append(time.perf_counter() - middle_s)
    return plain.nbytes / wire.nbytes, min(encode_s) / plain.nbytes, min(decode_s) / plain.nbytes
