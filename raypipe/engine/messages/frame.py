"""Frames: the tensors of one message as a fixed-size header and one payload, without pickle.

    header                                              payload
    +---------+----------+-----+----------------------+ +----------+-----+----------+
    | prelude | record 0 | ... | record max_tensors-1 | | tensor 0 | pad | tensor 1 | ...
    +---------+----------+-----+----------------------+ +----------+-----+----------+

The header has the same size for every message of a channel, so a receiver knows how much to read
before it knows anything else. A tensor travels as its raw memory, or as what a codec made of it, and
its strides with it: a channels_last activation arrives channels_last, because kernels choose their
path, and so their bits, by layout. For the same reason every tensor starts at a multiple of 64 bytes.
Each record says its codec, so a receiver needs to know nothing of the sender's choice.

Nothing in a header is believed: ``parse`` and ``decode`` answer any bytes with tensors that lie
inside the payload or with a LinkError. Left out: devices (tensors are in host memory here) and
checksums (checked_frame.py).
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch

from raypipe.engine.codec import NONE, Codec, host
from raypipe.engine.codec.choice import rounding_key, travels_coded
from raypipe.engine.codec.coded import CodedTensor
from raypipe.engine.messages import layout
from raypipe.engine.messages.late import arrived
from raypipe.engine.messages.record import (
    ALIGNMENT_BYTES,
    NO_TENSOR,
    PAYLOAD_LIMIT_BYTES,
    RECORD_BYTES,
    Described,
    TensorRecord,
    describe,
    parse_records,
    prepare,
)
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
    "header_of",
    "is_coded",
    "key_of",
    "parse",
]

MAGIC = b"RPFR"
VERSION = 2

# magic, version, generation, op, stage, microbatch, num_tensors, weight_version, payload_bytes, sent_at
_PRELUDE = struct.Struct("<4sHIBHQHIQd")

_OPS = tuple(Op)
_OP_CODES = {op: code for code, op in enumerate(_OPS)}
_PADDING = memoryview(bytes(ALIGNMENT_BYTES))

Payload = Sequence[torch.Tensor | CodedTensor | None]
"""What a message has; what a device has encoded travels as it is."""

Allocate = Callable[[int], torch.Tensor]
"""Bytes -> memory as a uint8 tensor, at a multiple of 64 bytes."""


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

    The buffers are views of the tensors' own memory, but where a codec made new bytes, and keep it alive; nobody may
    write to it until they are sent.
    """

    header: bytes
    buffers: list[memoryview]
    payload_bytes: int


def header_bytes(max_tensors: int) -> int:
    """Size of the header on a channel whose messages have at most ``max_tensors`` tensors."""
    return _PRELUDE.size + max_tensors * RECORD_BYTES


def check_count(action: Action, tensors: Payload, max_tensors: int) -> None:
    """Refuse a message with more tensors than its channel's header has room for; names the action."""
    if len(tensors) > max_tensors:
        raise LinkError(f"{action.words} has {len(tensors)} tensors, its channel was opened for at most {max_tensors}.")


def encode(
    action: Action,
    tensors: Payload,
    *,
    generation: int,
    max_tensors: int,
    weight_version: int = 0,
    codec: Codec = NONE,
) -> Frame:
    """Describe ``tensors`` and point at their memory, without a copy unless a tensor has gaps or a codec applies.

    Late ones are waited for, so this is done by whoever sends, and not by who computes where there is another thread.
    A stride of 0 (an expanded dimension) is kept and only the distinct elements travel. A tensor
    with gaps or overlaps is packed first, its dimensions in the same order of strides.

    Args:
        codec: for tensors that it applies to; of a forward message only for those that require a gradient, which masks
            and positions do not.

    Raises:
        LinkError: too many tensors, or a tensor of an unsupported type, device or size; names the action.
    """
    check_count(action, tensors, max_tensors)
    arrived(tensors)
    described: list[Described | None] = []
    held: list[torch.Tensor | None] = []
    for place, tensor in enumerate(tensors):
        known, memory = (None, None) if tensor is None else _as_it_travels(action, place, tensor, codec)
        described.append(known)
        held.append(memory)
    header, places, payload_bytes = header_of(
        action, described, generation=generation, max_tensors=max_tensors, weight_version=weight_version
    )
    return Frame(header, _buffers(described, held, places), payload_bytes)


def _buffers(
    described: Sequence[Described | None], held: Sequence[torch.Tensor | None], places: Sequence[int]
) -> list[memoryview]:
    """What is written one after the other: memory of each tensor at its place, and padding between."""
    buffers: list[memoryview] = []
    end_bytes = 0
    for known, memory, begin_bytes in zip(described, held, places, strict=True):
        if known is not None and memory is not None and known.extent_bytes:
            if padding_bytes := begin_bytes - end_bytes:
                buffers.append(_PADDING[:padding_bytes])
            buffers.append(layout.raw_bytes(memory, known.extent_bytes))
            end_bytes = begin_bytes + known.extent_bytes
    return buffers


def _as_it_travels(
    action: Action, place: int, tensor: torch.Tensor | CodedTensor, codec: Codec
) -> tuple[Described, torch.Tensor]:
    """What the header says of it, and the memory that goes: its own, a packed copy's, or what the codec makes."""
    if isinstance(tensor, CodedTensor):
        return _as_encoded(tensor), tensor.wire
    name = codec.name if travels_coded(codec.name, action.op, tensor) else "none"
    known = None
    if layout.is_plain(tensor):
        known = describe(tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad, name)
    if known is None:
        tensor, known = prepare(action, tensor, name)
    if known.codec != "none" and known.extent_bytes:
        tensor = _coded(action, place, tensor, known, codec)
    return known, tensor


def header_of(
    action: Action,
    described: Sequence[Described | None],
    *,
    generation: int,
    max_tensors: int,
    weight_version: int = 0,
) -> tuple[bytes, list[int], int]:
    """(header, where each tensor begins in the payload, bytes of the payload) of a message of such tensors.

    Raises:
        LinkError: they are too large; names the action.
    """
    places: list[int] = []
    end_bytes = 0
    for known in described:
        extent_bytes = 0 if known is None else known.extent_bytes
        places.append(end_bytes + (-end_bytes % ALIGNMENT_BYTES if extent_bytes else 0))
        end_bytes = max(end_bytes, places[-1] + extent_bytes) if extent_bytes else end_bytes
    if end_bytes > PAYLOAD_LIMIT_BYTES:
        raise LinkError(f"{action.words} has {end_bytes} bytes; {PAYLOAD_LIMIT_BYTES} is the limit of a message.")
    prelude = _PRELUDE.pack(
        MAGIC,
        VERSION,
        generation,
        _OP_CODES[action.op],
        action.stage,
        action.microbatch,
        len(described),
        weight_version,
        end_bytes,
        time.time(),
    )
    records = [NO_TENSOR if known is None else known.record for known in described]
    records.append(NO_TENSOR * (max_tensors - len(described)))
    return prelude + b"".join(records), places, end_bytes


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
    magic, version, theirs, op, stage, microbatch, count, weight_version, payload_bytes, sent_at_s = (
        _PRELUDE.unpack_from(header)
    )
    if magic != MAGIC or version != VERSION:
        raise LinkError(f"Not a raypipe frame of version {VERSION} (magic {magic!r}, version {version}).")
    if theirs > generation:
        raise LinkError(f"A message of generation {theirs} came on a channel of generation {generation}.")
    if op >= len(_OPS):
        raise LinkError(f"Header with unknown operation code {op}: do both ends run one version?")
    if count > max_tensors or payload_bytes > payload_limit_bytes:
        raise LinkError(
            f"Header announces {count} tensors in {payload_bytes} bytes; "
            f"at most {max_tensors} and {payload_limit_bytes} are allowed."
        )
    records, end_bytes = parse_records(bytes(header[_PRELUDE.size :]), count, payload_limit_bytes)
    if end_bytes != payload_bytes:
        raise LinkError(f"Header announces {payload_bytes} bytes, but its tensors take {end_bytes}.")
    return Head(theirs, Action(stage, _OPS[op], microbatch), weight_version, payload_bytes, sent_at_s, records)


def key_of(codec: Codec, action: Action, place: int) -> int | None:
    """Of random rounding, for the tensor at this place of a message; None for a codec that rounds to the nearest."""
    if codec.rounding_seed is None:
        return None
    return rounding_key(codec.rounding_seed, action.stage, _OP_CODES[action.op], action.microbatch, place)


def is_coded(head: Head) -> bool:
    """Whether a tensor of the message is in a codec, so that it does not lie in the payload as it is."""
    return any(record is not None and record.codec != "none" for record in head.records)


def decode(
    head: Head, payload: torch.Tensor, allocate: Allocate | None = None, *, coded: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """Tensors over ``payload``, a uint8 tensor of exactly ``head.payload_bytes`` that nobody else uses.

    Each is a leaf with a version counter of its own: a stage that writes to one in place does not
    make autograd distrust its neighbours, which views of one buffer would. A tensor in a codec gets memory of its own,
    from ``allocate`` where it is given.

    Args:
        coded: leave those in a codec as they came: as CodedTensor, which whoever asks for them knows of.

    Raises:
        LinkError: the payload has another size.
    """
    if payload.numel() != head.payload_bytes:
        raise LinkError(f"{head.action.words} announced {head.payload_bytes} bytes, {payload.numel()} came.")
    tensors: list[torch.Tensor | None] = []
    for record in head.records:
        if record is None:
            tensors.append(None)
            continue
        if coded and record.codec != "none":
            tensors.append(cast(torch.Tensor, _as_it_came(record, payload)))
            continue
        memory, start = payload, record.offset_bytes // record.dtype.itemsize
        if record.codec != "none":
            memory, start = _decoded(record, payload, allocate), 0
        tensor = torch.empty(0, dtype=record.dtype, device=memory.device)
        tensor.set_(memory.untyped_storage(), start, record.shape, record.strides)
        tensors.append(tensor.requires_grad_(record.requires_grad))
    return tuple(tensors)


def gather(frame: Frame, into: torch.Tensor | None = None) -> torch.Tensor:
    """The payload of a frame, copied into the front of a uint8 tensor, a fresh one where none is given."""
    payload = torch.empty(frame.payload_bytes, dtype=torch.uint8) if into is None else into
    target, start = payload.numpy(), 0
    for buffer in frame.buffers:
        target[start : start + buffer.nbytes] = np.frombuffer(buffer, np.uint8)
        start += buffer.nbytes
    return payload


def _coded(action: Action, place: int, tensor: torch.Tensor, known: Described, codec: Codec) -> torch.Tensor:
    """The bytes of a dense tensor in its codec; its elements are taken in the order of memory."""
    wire = torch.empty(known.extent_bytes, dtype=torch.uint8)
    flat = tensor.detach().as_strided((known.elements,), (1,))
    host.encode(known.codec, flat, wire, key_of(codec, action, place))
    return wire


def _as_encoded(tensor: CodedTensor) -> Described:
    """The record of what a device has encoded, by the same rules as here."""
    known = describe(tensor.dtype, tensor.shape, tensor.strides, tensor.requires_grad, tensor.codec)
    assert known is not None, "a device encodes dense tensors"
    assert known.codec == tensor.codec, "in codecs that apply to them"
    return known


def _as_it_came(record: TensorRecord, payload: torch.Tensor) -> CodedTensor:
    wire = payload[record.offset_bytes : record.offset_bytes + record.extent_bytes]
    _, shape, strides, requires_grad, codec, elements, _, _ = record
    return CodedTensor(wire, codec, record.dtype, shape, strides, requires_grad, elements)


def _decoded(record: TensorRecord, payload: torch.Tensor, allocate: Allocate | None) -> torch.Tensor:
    """The distinct elements of a tensor in a codec, in memory of their own."""
    nbytes = record.elements * record.dtype.itemsize
    memory = torch.empty(nbytes, dtype=torch.uint8) if allocate is None else allocate(nbytes)
    wire = payload[record.offset_bytes : record.offset_bytes + record.extent_bytes]
    host.decode(record.codec, wire, memory.view(record.dtype))
    return memory
