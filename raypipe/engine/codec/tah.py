"""Codecs tah4 and tah3 on tensors in host memory: a Hadamard transform, and codes whose lengths add up to a fixed size.

    chunk    16384 neighbouring elements as 128 rows and 128 columns; the last one has ceil(elements / 128) columns,
             filled up with zeros
    tile     a column of a chunk: 128 elements, with one scale. A warp reads neighbouring columns, numpy whole rows
    y        each 16 neighbouring rows of a tile times the Hadamard matrix H, whose entries are 1 and -1; H H = 16
    cell     floor(y / step), an integer; decoded as the middle of the cell, (cell + 1/2) step
    code     of y, ``low_bits`` + 2 bits: | bits of the magnitude m below a unit | m has a unit | y is negative |,
             with m = cell, or -1 - cell of a negative y. A unit is 2^low_bits cells; m has m >> low_bits units
    units    the units of a tile in unary, ``units`` bits: bit s - 1 is 1 if s is the sum of the units of some element
             that has a unit and of all elements before it. So an element costs as many bits as it has units
    wire     | units of each tile ... | scale of each tile ..., bfloat16 | codes of each chunk ... |

The codes are Golomb-Rice codes, which are nearly as short as their entropy for what a Hadamard transform makes of most
tensors. The encoder takes about the smallest step with which the units of a tile fit, so the bytes depend on the number
of elements only. Transform, tiles and 3 to 4 bits as in TAH-Quant (arXiv:2506.01352); instead of its pivots and numbers
of bits by tile, outliers take units from their neighbours.

Bits do not depend on the order of a library's sums: ``_total`` adds in a fixed order, and the decoder adds integers.
``kernels.cu`` computes the same bits.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

TILE = 128
"""Number of elements with one scale."""
CHUNK = 128 * TILE
"""Number of elements that are neighbours in memory, and have 128 tiles."""
GROUP = 16
"""Number of rows that are transformed together."""
PART = 8
"""Number of chunks that are encoded or decoded at a time, so that intermediate values stay in the cache."""
LEAST, MOST = 2.0**-57, 2.0**112
"""Bounds of the sum of a tile's |y|: below it the tile is decoded as zeros, from there on as NaN."""
EDGE = 2.0**-12
"""Added to y / step before rounding down, so that a denormal y is as good as 0, whether a processor flushes it or not.
"""


class TileForm(NamedTuple):
    """Sizes of a codec.

    Attributes:
        low_bits: bits of a code for the magnitude below a unit.
        units: bits of a tile for units, a multiple of 32.
        guess: units in the sum of a tile's magnitudes with the first step that is tried. A tile of normally
            distributed numbers has about 59 more than the sum of its whole units.
    """

    low_bits: int
    units: int

    @property
    def width(self) -> int:
        """Bits of a code."""
        return self.low_bits + 2

    @property
    def guess(self) -> float:
        return self.units + 59.0

    def wire_bytes(self, elements: int) -> int:
        """Return the bytes of a tensor on the wire."""
        return -(-elements // TILE) * (self.units // 8 + 2 + self.width * TILE // 8)


FORMS = {"tah4": TileForm(2, 96), "tah3": TileForm(0, 192)}

_LEVELS = (1, 2, 4, 8)
"""Distances in rows of the numbers that each level of the transform of 16 rows adds and subtracts."""
_NAN = 0x7FC0
_MOST_FP16 = 65504.0
_HADAMARD: np.ndarray = np.ones((1, 1), np.float32)
for _ in _LEVELS:
    _HADAMARD = np.block([[_HADAMARD, _HADAMARD], [_HADAMARD, -_HADAMARD]])
_GROWTH = 1 + 2.0**-6
"""Factor on a unit that is too small; its difference from 1 doubles each time, so that few times suffice."""
_local = threading.local()


def encode(form: TileForm, flat: torch.Tensor, wire: torch.Tensor) -> None:
    """Encode a float32 tensor, shape (elements,), into ``wire``; see ``host.encode``."""
    units, scales, codes = _views(form, wire, flat.numel())
    for first, last, columns in _parts(flat.numel()):
        x = flat[first * TILE : last * TILE]
        if x.numel() < (last - first) * TILE:
            x = torch.cat([x, x.new_zeros((last - first) * TILE - x.numel())])
        y = _transformed(x.view(-1, TILE, columns))
        inverse, scales[first:last] = _steps(form, y)
        cells = _floor(y, inverse, EDGE, y).astype(np.int16)
        negative = cells >> 15
        cells ^= negative
        units[first:last] = _in_unary(form, (cells >> form.low_bits).astype(np.uint8))
        unit = 1 << form.low_bits
        code = cells & (unit - 1)
        code |= unit
        np.minimum(code, cells, out=code)
        negative &= 2 * unit
        code |= negative
        _pack(form, code.astype(np.uint8), codes[first:last])


def decode(form: TileForm, wire: torch.Tensor, flat: torch.Tensor) -> None:
    """Decode ``wire`` into ``flat``; see ``host.decode``. Units of a tile that do not fit its codes count as none."""
    units, scales, codes = _views(form, wire, flat.numel())
    factors = torch.from_numpy(scales.astype(np.uint32) << 16).view(torch.float32)
    for first, last, columns in _parts(flat.numel()):
        code = _unpacked(form, codes[first:last], columns)
        magnitude = _units_of(form, units[first:last], code).astype(np.int16) << form.low_bits
        magnitude |= code & ((1 << form.low_bits) - 1)
        magnitude <<= 1
        magnitude |= 1
        negative = -((code >> (form.low_bits + 1)).astype(np.int16))
        magnitude ^= negative
        magnitude -= negative
        groups = magnitude.reshape(-1, GROUP, columns)
        doubled, sums = (_buffer(number, np.float32, groups.shape) for number in (0, 1))
        np.copyto(doubled, groups)  # 2 (cell + 1/2)
        np.matmul(_HADAMARD, doubled, out=sums)  # of integers, so exact in any order
        found = torch.from_numpy(sums).view(-1, TILE, columns).mul_(factors[first:last].view(-1, 1, columns))
        into = flat[first * TILE : last * TILE]
        if flat.dtype is torch.float16:  # an error must not make a number infinite
            found.clamp_(-_MOST_FP16, _MOST_FP16)
        into.copy_(found.view(-1)[: into.numel()])


def _transformed(x: torch.Tensor) -> np.ndarray:
    """Return H times each 16 rows of chunks, float32 of shape (chunks, 128, columns), in the buffer 1."""
    first, second = (torch.from_numpy(_buffer(number, np.float32, x.shape)) for number in (0, 1))
    source = x
    for distance, into in zip(_LEVELS, (first, second, first, second), strict=True):
        pairs, found = (t.view(-1, 2, distance * x.shape[2]).unbind(1) for t in (source, into))
        torch.add(*pairs, out=found[0])
        torch.sub(*pairs, out=found[1])
        source = into
    return source.numpy()


def _floor(x: np.ndarray, factors: np.ndarray, edge: float, into: np.ndarray) -> np.ndarray:
    """Return floor(x times the factor of its tile + ``edge``) in ``into``, float32 of shape (chunks, 128, columns)."""
    np.multiply(x, factors[:, None], out=into)
    into += np.float32(edge)
    return np.floor(into, out=into)


def _total(magnitudes: np.ndarray) -> np.ndarray:
    """Compute the sum of each column, shape (chunks, columns): halves of 16 rows first, then halves of the tile."""
    chunks, _, columns = magnitudes.shape
    rows = magnitudes.reshape(-1, GROUP, columns)
    sums = np.add(rows[:, :8], rows[:, 8:], out=_buffer(0, np.float32, (len(rows), 8, columns)))
    for half in (4, 2, 1):
        sums[:, :half] += sums[:, half : 2 * half]
    tiles: np.ndarray = sums[:, 0].reshape(chunks, -1, columns)
    for half in (4, 2, 1):
        tiles = tiles[:, :half] + tiles[:, half:]
    return tiles[:, 0]


@np.errstate(over="ignore", invalid="ignore")
def _steps(form: TileForm, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find each tile's step; return (1 / step, float32 of shape (chunks, columns); scales, the bits of bfloat16).

    The first unit follows from the sum of the magnitudes and the second from the units that it gave. Then units grow
    until they fit. Tiles without codes have 0 instead of 1 / step; if they are not finite, ``y`` is changed to 0.

    Args:
        y: transformed chunks, shape (chunks, 128, columns).
    """
    buffer, magnitudes = (_buffer(number, np.float32, y.shape) for number in (0, 2))
    np.abs(y, out=magnitudes)
    total = _total(magnitudes)
    coded = (total >= np.float32(LEAST)) & (total < np.float32(MOST))
    safe = np.where(coded, total, np.float32(1))
    most, edge = np.float32(form.units), EDGE / (1 << form.low_bits)

    def count(unit: np.ndarray) -> np.ndarray:
        return _floor(magnitudes, np.float32(1) / unit, edge, buffer).sum(1)

    unit = _rounded_up(safe / np.float32(form.guess))
    surplus = safe * (np.float32(1) / unit) - count(unit)
    unit = np.where(coded, _rounded_up(safe / np.where(coded, surplus + (most - 1), 1)), np.float32(1))
    full = (count(unit) > most) & coded
    if full.any():
        rows, grown = magnitudes.transpose(0, 2, 1)[full], unit[full]
        wrong, growth = np.arange(len(rows)), np.float32(_GROWTH)
        while len(wrong):
            grown[wrong] = _rounded_up(grown[wrong] * growth)
            growth += growth - np.float32(1)
            inverse = np.float32(1) / grown[wrong]
            counted = np.floor(rows[wrong] * inverse[:, None] + np.float32(edge)).sum(1)
            wrong = wrong[counted > most]
        unit[full] = grown
    if not (total < np.float32(MOST)).all():
        np.nan_to_num(y, copy=False, posinf=0.0, neginf=0.0)
    scales = np.where(coded, unit * np.float32(2.0 ** -(form.low_bits + 5)), np.float32(0))
    bits = (scales.view(np.uint32) >> 16).astype(np.uint16)
    bits[~(total < np.float32(MOST))] = _NAN
    inverse = np.where(coded, np.float32(1 << form.low_bits) / unit, np.float32(0))
    return inverse, bits.reshape(-1)


def _running(units: np.ndarray) -> np.ndarray:
    """Replace each number of a tile, uint8 of shape (chunks, 128, columns), by the sum of those up to it; return it."""
    for distance in (1, 2, 4, 8, 16, 32, 64):
        units[:, distance:] += units[:, :-distance]
    return units


def _rounded_up(x: np.ndarray) -> np.ndarray:
    """Return positive float32 numbers rounded up to bfloat16."""
    return ((x.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)


def _in_unary(form: TileForm, units: np.ndarray) -> np.ndarray:
    """Return the bytes for units of chunks, shape (tiles, units / 8); ``units`` are replaced by their running sums."""
    sums = _running(units)
    tiles, stride = units.size // TILE, form.units + 8
    # A byte more for each tile, whose last bit takes what elements write before the first unit.
    places = _buffer(0, np.int64, units.shape)
    np.add(sums, (np.arange(tiles) * stride + 7).reshape(units.shape[0], 1, -1), out=places)
    bits = np.zeros(tiles * stride, np.uint8)
    bits[places.reshape(-1)] = 1
    return np.packbits(bits, bitorder="little").reshape(tiles, -1)[:, 1:]


def _units_of(form: TileForm, packed: np.ndarray, code: np.ndarray) -> np.ndarray:
    """Return the units of each element of chunks, uint8 of the shape of ``code``."""
    tiles, shape = len(packed), (code.shape[0], code.shape[2])
    marked = np.empty((tiles, 1 + form.units // 8), np.uint8)
    marked[:, 0], marked[:, 1:] = 0x80, packed  # a bit before the first unit, as place 0
    places = np.flatnonzero(np.unpackbits(marked, bitorder="little").view(bool)).astype(np.uint8)
    counts = np.bitwise_count(marked).sum(1, dtype=np.int64)
    starts = (np.cumsum(counts) - counts).reshape(shape)
    ranks = _running((code >> form.low_bits) & 1)
    fits = ranks[:, -1] == counts.reshape(shape) - 1
    if not fits.all():
        ranks *= fits[:, None]
    numbers = np.add(ranks, starts[:, None], out=_buffer(0, np.int64, code.shape))
    sums = places.take(numbers)  # modulo 256, as their differences
    units = np.empty_like(sums)
    np.subtract(sums[:, 1:], sums[:, :-1], out=units[:, 1:])
    np.subtract(sums[:, 0], places[starts], out=units[:, 0])
    return units


def _pack(form: TileForm, code: np.ndarray, into: np.ndarray) -> None:
    """Pack codes of chunks, uint8 of shape (chunks, 128, columns), neighbouring rows into a byte, the first lowest."""
    per_byte = 8 // form.width
    rows = code.reshape(code.shape[0], -1, per_byte, code.shape[2])
    packed = into.reshape(code.shape[0], -1, code.shape[2])
    packed[:] = rows[:, :, 0]
    for place in range(1, per_byte):
        packed |= rows[:, :, place] << (form.width * place)


def _unpacked(form: TileForm, packed: np.ndarray, columns: int) -> np.ndarray:
    """Return the codes of chunks, uint8 of shape (chunks, 128, columns)."""
    per_byte = 8 // form.width
    packed = packed.reshape(-1, TILE // per_byte, 1, columns)
    shifts = np.arange(0, 8, form.width, dtype=np.uint8).reshape(-1, 1)
    return ((packed >> shifts) & ((1 << form.width) - 1)).reshape(-1, TILE, columns)


def _views(form: TileForm, wire: torch.Tensor, elements: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return views of the parts of an encoded tensor: units and codes by tile, uint8; scales, uint16."""
    tiles = -(-elements // TILE)
    parts, start = [], 0
    for size in (form.units // 8, 2, form.width * TILE // 8):
        parts.append(wire[start : start + tiles * size].numpy().reshape(tiles, size))
        start += tiles * size
    return parts[0], parts[1].view(np.uint16)[:, 0], parts[2]


def _parts(elements: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first tile, last tile + 1, columns of a chunk) of each part of a tensor."""
    tiles, of_chunk = -(-elements // TILE), CHUNK // TILE
    whole = elements // CHUNK * of_chunk
    for first in range(0, whole, PART * of_chunk):
        yield first, min(first + PART * of_chunk, whole), of_chunk
    if whole < tiles:
        yield whole, tiles, tiles - whole


def _buffer(number: int, dtype: type[np.generic], shape: tuple[int, ...]) -> np.ndarray:
    """Return one of three pieces of this thread's scratch memory. New memory would cost more than the arithmetic."""
    if not hasattr(_local, "memory"):
        _local.memory = [np.empty(PART * CHUNK, np.int64) for _ in range(3)]
    memory: np.ndarray = _local.memory[number]
    return memory.view(dtype)[: math.prod(shape)].reshape(shape)
