"""Records: how a frame's header describes one tensor, in a fixed number of bytes.

    dtype, flags, dimensions, codec | 8 sizes | 8 strides

A tensor is described as the receiver shall have it; the codec says what its bytes in the payload are. Nothing in a
record is believed.
"""

from __future__ import annotations

import functools
import struct
from typing import NamedTuple

import torch

from raypipe.engine.codec.choice import CODECS, applies, wire_bytes
from raypipe.engine.messages import layout
from raypipe.errors import LinkError
from raypipe.ir.schedule import Action

__all__ = [
    "ALIGNMENT_BYTES", "NO_TENSOR", "PAYLOAD_LIMIT_BYTES", "RECORD_BYTES", "Described", "TensorRecord", "describe",
    "parse_records", "prepare",
]  # fmt: skip

PAYLOAD_LIMIT_BYTES = 2 << 30
"""For a message on the wire, and for each of its tensors once it is decoded."""
ALIGNMENT_BYTES = 64
MAX_DIMS = 8

# dtype, flags, ndim, codec, shape, strides
_RECORD = struct.Struct("<BBBB4x8Q8Q")
RECORD_BYTES = _RECORD.size
NO_TENSOR = bytes(RECORD_BYTES)

_PRESENT, _REQUIRES_GRAD = 1, 2
# The position is the code on the wire: append only.
_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_CODEC_CODES = {name: code for code, name in enumerate(CODECS)}
_MAX_STRIDE = (1 << 63) - 1


class TensorRecord(NamedTuple):
    """Where a tensor lies in the payload; ``strides`` count elements, as in torch.

    ``elements`` are the distinct ones, of which an expanded tensor has fewer than its shape says; ``extent_bytes`` are
    those of the payload.
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
    """A dense tensor's record and what it needs in the payload."""

    record: bytes
    codec: str
    elements: int
    extent_bytes: int


@functools.lru_cache(maxsize=256)
def describe(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], requires_grad: bool, codec: str
) -> Described | None:
    """A dense tensor with this codec where it applies, else "none"; None for a tensor that is not dense.

    A run sends few layouts, many times.
    """
    elements = layout.distinct_elements(shape, strides)
    if elements is None or dtype not in _DTYPE_CODES or not _within_limits(dtype, shape, PAYLOAD_LIMIT_BYTES):
        return None
    used = codec if applies(codec, dtype, elements) else "none"
    flags = _PRESENT | (_REQUIRES_GRAD if requires_grad else 0)
    unused = (0,) * (MAX_DIMS - len(shape))
    record = _RECORD.pack(
        _DTYPE_CODES[dtype], flags, len(shape), _CODEC_CODES[used], *shape, *unused, *strides, *unused
    )
    return Described(record, used, elements, wire_bytes(used, dtype, elements))


def prepare(action: Action, tensor: torch.Tensor, codec: str) -> tuple[torch.Tensor, Described]:
    """A dense copy of a tensor that is not dense itself, described.

    Raises:
        LinkError: a tensor of an unsupported type, device or size; names the action.
    """
    if tensor.dtype not in _DTYPE_CODES or tensor.layout is not torch.strided or not tensor.is_cpu:
        kind = f"{tensor.layout} {tensor.dtype} on {tensor.device}"
        raise LinkError(f"{action.words}: a {kind} tensor cannot be sent; send a strided tensor in host memory.")
    if not _within_limits(tensor.dtype, tensor.shape, PAYLOAD_LIMIT_BYTES):
        raise LinkError(
            f"{action.words}: a tensor of shape {tuple(tensor.shape)} cannot be sent; "
            f"at most {MAX_DIMS} dimensions and {PAYLOAD_LIMIT_BYTES} bytes are allowed."
        )
    copy = layout.densified(tensor)
    known = describe(copy.dtype, copy.shape, copy.stride(), tensor.requires_grad, codec)
    assert known is not None, "a dense tensor within the limits has a record"
    return copy, known


@functools.lru_cache(maxsize=256)
def parse_records(packed: bytes, count: int, limit_bytes: int) -> tuple[tuple[TensorRecord | None, ...], int]:
    """The first ``count`` records, checked, and the bytes that their tensors take in the payload.

    Raises:
        LinkError: a record that nobody sends.
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
            raise LinkError(f"Tensor {index} of a header is {dtype} and asks for a gradient.")
        shape, strides = tuple(dims[:ndim]), tuple(dims[MAX_DIMS : MAX_DIMS + ndim])
        elements = layout.distinct_elements(shape, strides)
        if elements is None or not _within_limits(dtype, shape, limit_bytes) or max(strides, default=0) > _MAX_STRIDE:
            raise LinkError(f"Tensor {index} of a header has shape {shape} and strides {strides}, which nobody sends.")
        if codec >= len(CODECS) or (codec and not applies(CODECS[codec], dtype, elements)):
            raise LinkError(
                f"Tensor {index} of a header is {dtype}, {elements} elements, in codec {codec}, which nobody sends: "
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
    return len(shape) <= MAX_DIMS and layout.span(shape) * dtype.itemsize <= limit_bytes
