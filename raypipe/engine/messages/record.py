"""Memory layout of a tensor, and the record of fixed size that describes it in a frame's header.

    dense        channels_last, transposed, contiguous      its memory extent, as it is
    expanded     a stride of 0 over more than one element   the distinct elements only
    other        gaps (x[::2]) or overlaps (unfold)         packed first, order of strides kept

    record       dtype, flags, dimensions, codec | 8 sizes | 8 strides

A record describes a tensor as the receiver gets it, decoded. The codec determines the number of its bytes in the
payload. No field of a received record is used unchecked.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from typing import NamedTuple

import torch

from raypipe.engine.codec.codec import CODECS, applies, wire_bytes
from raypipe.errors import LinkError
from raypipe.ir.schedule import Action


def span(shape: tuple[int, ...]) -> int:
    """Return the product of all sizes of a shape, with 0 counted as 1: an upper bound of the number of elements."""
    return math.prod(max(size, 1) for size in shape)


@functools.lru_cache(maxsize=256)
def distinct_elements(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """Return the number of elements in memory of a dense or expanded tensor; None for one with gaps or overlaps."""
    if 0 in shape:
        return 0
    elements = 1
    for stride, size in sorted((t, s) for s, t in zip(shape, strides, strict=True) if s != 1 and t != 0):
        if stride != elements:
            return None
        elements *= size
    return elements


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if the tensor has strides, and its memory contains its values (no lazy conjugation or negation)."""
    return tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())


def densified(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense or expanded tensor with the same values; a tensor with gaps or overlaps is copied and packed."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    shape, strides = tuple(plain.shape), plain.stride()
    if distinct_elements(shape, strides) is not None:
        return plain
    distinct = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
    packed, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (strides[d], -d)):
        if strides[dim]:
            packed[dim] = step
            step *= distinct[dim]
    copy = torch.empty_strided(distinct, packed, dtype=plain.dtype, device=plain.device)
    copy.copy_(plain.as_strided(distinct, strides))
    return copy.as_strided(shape, packed)


def raw_bytes(tensor: torch.Tensor, extent_bytes: int) -> memoryview:
    """Return a writable view of the first ``extent_bytes`` bytes of a host tensor; the view keeps the tensor alive.

    ctypes reads the tensor's address: as_strided, view(uint8) and numpy would create three tensors per message, which
    doubles the time of a send after some idling.
    """
    if extent_bytes == 0:  # an empty tensor may have no address
        return memoryview(b"")
    memory = (ctypes.c_ubyte * extent_bytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory)


PAYLOAD_LIMIT_BYTES = 2 << 30
"""Maximum size in bytes of a message's payload, and of each of its decoded tensors."""
ALIGNMENT_BYTES = 64
MAX_DIMS = 8

# dtype, flags, ndim, codec, shape, strides
_RECORD = struct.Struct("<BBBB4x8Q8Q")
RECORD_BYTES = _RECORD.size
NO_TENSOR = bytes(RECORD_BYTES)

_PRESENT, _REQUIRES_GRAD = 1, 2
# The position is the code on the wire: append only.
_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_CODEC_CODES = {name: code for code, name in enumerate(CODECS)}
_MAX_STRIDE = (1 << 63) - 1


class TensorRecord(NamedTuple):
    """Parsed and checked record of a received tensor.

    Attributes:
        strides: strides in elements, as in torch.
        elements: number of distinct elements; an expanded tensor has fewer than its shape.
        offset_bytes, extent_bytes: position and size in the payload, after encoding.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    codec: str
    elements: int
    offset_bytes: int
    extent_bytes: int


class Described(NamedTuple):
    """Description of a tensor to send: its packed record, codec, number of distinct elements and encoded bytes."""

    record: bytes
    codec: str
    elements: int
    extent_bytes: int


@functools.lru_cache(maxsize=256)
def describe(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], requires_grad: bool, codec: str
) -> Described | None:
    """Describe a tensor to send; None if it cannot be sent as it is.

    This is the case if the tensor has gaps or overlaps, an unsupported dtype, or too many dimensions or bytes. Results
    are cached, because a run sends few layouts many times.

    Args:
        codec: codec of the description if it supports the tensor; else the description has the codec "none".
    """
    elements = distinct_elements(shape, strides)
    if elements is None or dtype not in _DTYPE_CODES or not _within_limits(dtype, shape, PAYLOAD_LIMIT_BYTES):
        return None
    used = codec if applies(codec, dtype, elements) else "none"
    flags = _PRESENT | (_REQUIRES_GRAD if requires_grad else 0)
    unused = (0,) * (MAX_DIMS - len(shape))
    record = _RECORD.pack(
        _DTYPE_CODES[dtype], flags, len(shape), _CODEC_CODES[used], *shape, *unused, *strides, *unused
    )
    return Described(record, used, elements, wire_bytes(used, dtype, elements))


def prepare(action: Action, tensor: torch.Tensor, codec: str, *, on_host: bool) -> tuple[torch.Tensor, Described]:
    """Copy a tensor that ``describe`` refuses; return (dense copy, description of the copy).

    Args:
        on_host: True if the tensor must be in host memory.

    Raises:
        LinkError: the tensor has an unsupported type, layout, device or size; names the action.
    """
    place = " in host memory" if on_host else ""
    if tensor.dtype not in _DTYPE_CODES or tensor.layout is not torch.strided or (on_host and not tensor.is_cpu):
        kind = f"{tensor.layout} {tensor.dtype} on {tensor.device}"
        raise LinkError(f"{action.words}: a {kind} tensor cannot be sent; send a strided tensor{place}.")
    if not _within_limits(tensor.dtype, tensor.shape, PAYLOAD_LIMIT_BYTES):
        raise LinkError(
            f"{action.words}: a tensor of shape {tuple(tensor.shape)} cannot be sent; "
            f"at most {MAX_DIMS} dimensions and {PAYLOAD_LIMIT_BYTES} bytes are allowed."
        )
    copy = densified(tensor)
    known = describe(copy.dtype, copy.shape, copy.stride(), tensor.requires_grad, codec)
    assert known is not None, "a dense tensor within the limits has a record"
    return copy, known


@functools.lru_cache(maxsize=256)
def parse_records(packed: bytes, count: int, limit_bytes: int) -> tuple[tuple[TensorRecord | None, ...], int]:
    """Parse and check the first ``count`` records of a header.

    Returns:
        (records, size in bytes of the payload that they describe).

    Raises:
        LinkError: no sender creates such a record; names the tensor by its index.
    """
    records: list[TensorRecord | None] = []
    end_bytes = 0
    for index in range(count):
        code, flags, ndim, codec, *dims = _RECORD.unpack_from(packed, index * RECORD_BYTES)
        if flags == 0:
            records.append(None)
            continue
        if not flags & _PRESENT or flags > _PRESENT | _REQUIRES_GRAD or code >= len(_DTYPES) or ndim > MAX_DIMS:
            raise LinkError(f"Tensor {index} of a header has dtype code {code}, flags {flags}, {ndim} dimensions.")
        dtype, requires_grad = _DTYPES[code], bool(flags & _REQUIRES_GRAD)
        if requires_grad and not (dtype.is_floating_point or dtype.is_complex):
            raise LinkError(f"Tensor {index} of a header is {dtype} and requires a gradient.")
        shape, strides = tuple(dims[:ndim]), tuple(dims[MAX_DIMS : MAX_DIMS + ndim])
        elements = distinct_elements(shape, strides)
        if elements is None or not _within_limits(dtype, shape, limit_bytes) or max(strides, default=0) > _MAX_STRIDE:
            raise LinkError(
                f"Tensor {index} of a header has shape {shape} and strides {strides}, which no sender makes."
            )
        if codec >= len(CODECS) or (codec and not applies(CODECS[codec], dtype, elements)):
            raise LinkError(
                f"Tensor {index} of a header is {dtype}, {elements} elements, in codec {codec}, which no sender makes: "
                "do both ends run one version?"
            )
        extent_bytes = wire_bytes(CODECS[codec], dtype, elements)
        offset_bytes = end_bytes + (-end_bytes % ALIGNMENT_BYTES) if extent_bytes else 0
        end_bytes = max(end_bytes, offset_bytes + extent_bytes)
        records.append(
            TensorRecord(dtype, shape, strides, requires_grad, CODECS[codec], elements, offset_bytes, extent_bytes)
        )
    return tuple(records), end_bytes


def _within_limits(dtype: torch.dtype, shape: tuple[int, ...], limit_bytes: int) -> bool:
    return len(shape) <= MAX_DIMS and span(shape) * dtype.itemsize <= limit_bytes
