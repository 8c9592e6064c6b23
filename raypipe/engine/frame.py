"""Frames: the tensors of one message as a fixed-size header and one payload, without pickle.

    header                                              payload
    +---------+----------+-----+----------------------+ +----------+-----+----------+
    | prelude | record 0 | ... | record max_tensors-1 | | tensor 0 | pad | tensor 1 | ...
    +---------+----------+-----+----------------------+ +----------+-----+----------+

The header has the same size for every message of a channel, so a receiver knows how much to read
before it knows anything else. A tensor travels as its raw memory, and its strides with it: a
channels_last activation arrives channels_last, because kernels choose their path, and so their
bits, by layout. For the same reason every tensor starts at a multiple of 64 bytes.

Nothing in a header is believed: ``parse`` and ``decode`` answer any bytes with tensors that lie
inside the payload or with a LinkError. Left out: devices (tensors are in host memory here) and
checksums (TCP has its own).
"""

from __future__ import annotations

import functools
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from raypipe.engine import layout
from raypipe.errors import LinkError
from raypipe.ir.schedule import Action, Op

__all__ = [
    "PAYLOAD_LIMIT_BYTES",
    "Frame",
    "Head",
    "TensorRecord",
    "decode",
    "encode",
    "gather",
    "header_bytes",
    "parse",
]

PAYLOAD_LIMIT_BYTES = 2 << 30
ALIGNMENT_BYTES = 64
MAX_DIMS = 8

MAGIC = b"RPFR"
VERSION = 1
NO_CODEC = 0

# magic, version, generation, op, stage, microbatch, num_tensors, codec, weight_version, payload_bytes, sent_at
_PRELUDE = struct.Struct("<4sHIBHQHBIQd")
# dtype, flags, ndim, shape, strides
_RECORD = struct.Struct("<BBB5x8Q8Q")

_PRESENT, _REQUIRES_GRAD = 1, 2
_OPS = tuple(Op)
_OP_CODES = {op: code for code, op in enumerate(_OPS)}
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
_MAX_STRIDE = (1 << 63) - 1
_PADDING = memoryview(bytes(ALIGNMENT_BYTES))
_NO_TENSOR = bytes(_RECORD.size)


class TensorRecord(NamedTuple):
    """Where a tensor lies in the payload; ``strides`` count elements, as in torch."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    offset_bytes: int
    extent_bytes: int


class Head(NamedTuple):
    """A checked header. ``sent_at_s`` is the sender's wall clock, for measuring links."""

    generation: int
    action: Action
    weight_version: int
    payload_bytes: int
    sent_at_s: float
    records: tuple[TensorRecord | None, ...]


class Frame(NamedTuple):
    """A message ready to be written: ``header``, then every buffer in order.

    The buffers are views of the tensors' own memory and keep it alive; nobody may write to it
    until they are sent.
    """

    header: bytes
    buffers: list[memoryview]
    payload_bytes: int


def header_bytes(max_tensors: int) -> int:
    """Size of the header on a channel whose messages have at most ``max_tensors`` tensors."""
    return _PRELUDE.size + max_tensors * _RECORD.size


def check_count(action: Action, tensors: Sequence[torch.Tensor | None], max_tensors: int) -> None:
    """Refuse a message with more tensors than its channel's header has room for; names the action."""
    if len(tensors) > max_tensors:
        raise LinkError(f"{action} has {len(tensors)} tensors, its channel was opened for at most {max_tensors}.")


def encode(
    action: Action,
    tensors: Sequence[torch.Tensor | None],
    *,
    generation: int,
    max_tensors: int,
    weight_version: int = 0,
) -> Frame:
    """Describe ``tensors`` and point at their memory, without a copy unless a tensor has gaps.

    A stride of 0 (an expanded dimension) is kept and only the distinct elements travel. A tensor
    with gaps or overlaps is packed first, its dimensions in the same order of strides.

    Raises:
        LinkError: too many tensors, or a tensor of an unsupported type, device or size; names the action.
    """
    check_count(action, tensors, max_tensors)
    records: list[bytes] = []
    buffers: list[memoryview] = []
    end_bytes = 0
    for tensor in tensors:
        if tensor is None:
            records.append(_NO_TENSOR)
            continue
        known = None
        if layout.is_plain(tensor):
            known = _describe(tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad)
        if known is None:
            tensor, known = _prepare(action, tensor)
        record, extent_bytes = known
        records.append(record)
        if extent_bytes:
            if padding_bytes := -end_bytes % ALIGNMENT_BYTES:
                buffers.append(_PADDING[:padding_bytes])
            buffers.append(layout.raw_bytes(tensor, extent_bytes))
            end_bytes += padding_bytes + extent_bytes
    if end_bytes > PAYLOAD_LIMIT_BYTES:
        raise LinkError(f"{action} has {end_bytes} bytes, more than the limit of {PAYLOAD_LIMIT_BYTES} per message.")
    prelude = _PRELUDE.pack(
        MAGIC,
        VERSION,
        generation,
        _OP_CODES[action.op],
        action.stage,
        action.microbatch,
        len(tensors),
        NO_CODEC,
        weight_version,
        end_bytes,
        time.time(),
    )
    records.append(_NO_TENSOR * (max_tensors - len(tensors)))
    return Frame(prelude + b"".join(records), buffers, end_bytes)


def parse(
    header: bytes | bytearray | memoryview,
    *,
    generation: int,
    max_tensors: int,
    payload_limit_bytes: int = PAYLOAD_LIMIT_BYTES,
) -> Head:
    """Check a header before a byte of payload is allocated or read.

    An *older* generation is returned like any other: the caller reads past its payload and drops it.

    Raises:
        LinkError: the header is damaged, of another version, or of a newer generation.
    """
    if len(header) != header_bytes(max_tensors):
        raise LinkError(f"A header of {len(header)} bytes came, {header_bytes(max_tensors)} were agreed on.")
    magic, version, theirs, op, stage, microbatch, count, codec, weight_version, payload_bytes, sent_at_s = (
        _PRELUDE.unpack_from(header)
    )
    if magic != MAGIC or version != VERSION:
        raise LinkError(f"Not a raypipe frame of version {VERSION} (magic {magic!r}, version {version}).")
    if theirs > generation:
        raise LinkError(f"A message of generation {theirs} came on a channel of generation {generation}.")
    if op >= len(_OPS) or codec != NO_CODEC:
        raise LinkError(f"Header with unknown operation code {op} or codec {codec}: do both ends run one version?")
    if count > max_tensors or payload_bytes > payload_limit_bytes:
        raise LinkError(
            f"Header announces {count} tensors in {payload_bytes} bytes; "
            f"at most {max_tensors} and {payload_limit_bytes} are allowed."
        )
    records, end_bytes = _parse_records(bytes(header[_PRELUDE.size :]), count, payload_limit_bytes)
    if end_bytes != payload_bytes:
        raise LinkError(f"Header announces {payload_bytes} bytes, but its tensors take {end_bytes}.")
    return Head(theirs, Action(stage, _OPS[op], microbatch), weight_version, payload_bytes, sent_at_s, records)


def decode(head: Head, payload: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Tensors over ``payload``, a uint8 tensor of exactly ``head.payload_bytes`` that nobody else uses.

    Each is a leaf with a version counter of its own: a stage that writes to one in place does not
    make autograd distrust its neighbours, which views of one buffer would.

    Raises:
        LinkError: the payload has another size.
    """
    if payload.numel() != head.payload_bytes:
        raise LinkError(f"{head.action} announced {head.payload_bytes} bytes, {payload.numel()} came.")
    storage = payload.untyped_storage()
    tensors: list[torch.Tensor | None] = []
    for record in head.records:
        if record is None:
            tensors.append(None)
            continue
        tensor = torch.empty(0, dtype=record.dtype)
        tensor.set_(storage, record.offset_bytes // record.dtype.itemsize, record.shape, record.strides)
        tensors.append(tensor.requires_grad_(record.requires_grad))
    return tuple(tensors)


def gather(frame: Frame) -> torch.Tensor:
    """The payload of a frame, copied into one fresh uint8 tensor."""
    payload = torch.empty(frame.payload_bytes, dtype=torch.uint8)
    target, start = payload.numpy(), 0
    for buffer in frame.buffers:
        target[start : start + buffer.nbytes] = np.frombuffer(buffer, np.uint8)
        start += buffer.nbytes
    return payload


@functools.lru_cache(maxsize=256)
def _describe(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], requires_grad: bool
) -> tuple[bytes, int] | None:
    """Record and extent in bytes of a dense tensor, None for any other. A run sends few layouts, many times."""
    elements = layout.distinct_elements(shape, strides)
    if elements is None or dtype not in _DTYPE_CODES or not _within_limits(dtype, shape, PAYLOAD_LIMIT_BYTES):
        return None
    flags = _PRESENT | (_REQUIRES_GRAD if requires_grad else 0)
    unused = (0,) * (MAX_DIMS - len(shape))
    record = _RECORD.pack(_DTYPE_CODES[dtype], flags, len(shape), *shape, *unused, *strides, *unused)
    return record, elements * dtype.itemsize


def _prepare(action: Action, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[bytes, int]]:
    """A dense copy of a tensor that is not dense itself, with its record and extent in bytes."""
    if tensor.dtype not in _DTYPE_CODES or tensor.layout is not torch.strided or not tensor.is_cpu:
        kind = f"{tensor.layout} {tensor.dtype} on {tensor.device}"
        raise LinkError(f"{action}: a {kind} tensor cannot be sent; send a strided tensor in host memory.")
    if not _within_limits(tensor.dtype, tensor.shape, PAYLOAD_LIMIT_BYTES):
        raise LinkError(
            f"{action}: a tensor of shape {tuple(tensor.shape)} cannot be sent; "
            f"at most {MAX_DIMS} dimensions and {PAYLOAD_LIMIT_BYTES} bytes are allowed."
        )
    copy = layout.densified(tensor)
    known = _describe(copy.dtype, copy.shape, copy.stride(), tensor.requires_grad)
    assert known is not None, "a dense tensor within the limits has a record"
    return copy, known


def _within_limits(dtype: torch.dtype, shape: tuple[int, ...], limit_bytes: int) -> bool:
    return len(shape) <= MAX_DIMS and layout.span(shape) * dtype.itemsize <= limit_bytes


@functools.lru_cache(maxsize=256)
def _parse_records(packed: bytes, count: int, limit_bytes: int) -> tuple[tuple[TensorRecord | None, ...], int]:
    """The first ``count`` records, checked, and the bytes that their tensors take."""
    records: list[TensorRecord | None] = []
    end_bytes = 0
    for index in range(count):
        code, flags, ndim, *dims = _RECORD.unpack_from(packed, index * _RECORD.size)
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
        extent_bytes = elements * dtype.itemsize
        offset_bytes = end_bytes + (-end_bytes % ALIGNMENT_BYTES) if extent_bytes else 0
        end_bytes = max(end_bytes, offset_bytes + extent_bytes)
        records.append(TensorRecord(dtype, shape, strides, requires_grad, offset_bytes, extent_bytes))
    return tuple(records), end_bytes
