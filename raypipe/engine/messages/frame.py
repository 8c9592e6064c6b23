"""Frames: the tensors of one message as a fixed-size header and one payload, without pickle.

    header                                              payload
    +---------+----------+-----+----------------------+ +----------+-----+----------+
    | prelude | record 0 | ... | record max_tensors-1 | | tensor 0 | pad | tensor 1 | ...
    +---------+----------+-----+----------------------+ +----------+-----+----------+

All headers of a channel have the same size, which the receiver must know before it reads one. A tensor is sent as its
raw memory, or as a codec's output, together with its strides: a channels_last activation arrives channels_last, because
kernels, and so results, depend on the layout. For the same reason every tensor starts at a multiple of 64 bytes. Each
record names its codec, so that the receiver need not know the sender's choice.

Headers are not trusted: for any bytes, ``parse`` and ``decode`` return tensors that are inside the payload or raise a
LinkError. Checksums are in checked_frame.py. ``encode_on`` and ``decode_on`` are ``encode`` and ``decode`` for payloads
that stay on a device.

Tensors that are still being copied to host memory are sent as a PendingCopy, so that the computing thread does not
wait:

    compute         F0 | send(pending copy) | F1 ...       the next forward is launched at once
    device             F0 ........| copy | F1 ...
    sending thread                  waits | header, payload --> link
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch

from raypipe.engine.codec import NONE, Codec, host
from raypipe.engine.codec.codec import CodedTensor, travels_coded
from raypipe.engine.device.device import CPU, Device
from raypipe.engine.messages.record import (
    ALIGNMENT_BYTES,
    NO_TENSOR,
    PAYLOAD_LIMIT_BYTES,
    RECORD_BYTES,
    Described,
    TensorRecord,
    describe,
    is_plain,
    parse_records,
    prepare,
    raw_bytes,
)
from raypipe.errors import LinkError
from raypipe.ir.schedule import Action, Op
from raypipe.splitmix import mixed


class PendingCopy(tuple[torch.Tensor | CodedTensor | None, ...]):
    """Tensors in host memory whose copies are under way. ``arrive``, callable in any thread, waits for the copies."""

    arrive: Callable[[], None]

    @classmethod
    def of(cls, tensors: Iterable[torch.Tensor | CodedTensor | None], arrive: Callable[[], None]) -> PendingCopy:
        pending = cls(tensors)
        pending.arrive = arrive
        return pending


def wait_for_copies(tensors: object) -> None:
    """Wait until the tensors of a PendingCopy may be read; return at once for any other object."""
    if isinstance(tensors, PendingCopy):
        tensors.arrive()


MAGIC = b"RPFR"
VERSION = 2

# magic, version, generation, op, stage, microbatch, num_tensors, weight_version, payload_bytes, sent_at
_PRELUDE = struct.Struct("<4sHIBHQHIQd")

_OPS = tuple(Op)
_OP_CODES = {op: code for code, op in enumerate(_OPS)}
_PADDING = memoryview(bytes(ALIGNMENT_BYTES))
_NO_MEMORY = torch.empty(0, dtype=torch.uint8)

Payload = Sequence[torch.Tensor | CodedTensor | None]
"""Tensors of a message; None for a tensor that is not sent. A CodedTensor is already encoded and is sent unchanged."""

Allocate = Callable[[int], torch.Tensor]
"""Function that allocates memory: number of bytes -> uint8 tensor whose address is a multiple of 64 bytes."""


class FrameFormat(NamedTuple):
    """Format of the frames of a channel, equal on both ends.

    Attributes:
        generation: number that grows whenever a run opens its links anew. The receiver drops messages of a smaller
            number, and refuses messages of a larger number.
        max_tensors: maximum number of tensors in a message, which determines the size of headers.
    """

    generation: int
    max_tensors: int


class Head(NamedTuple):
    """Parsed and checked header of a message.

    Attributes:
        sent_at_s: time of sending on the sender's wall clock.
        records: layout of each tensor; None for a tensor that was not sent.
    """

    generation: int
    action: Action
    weight_version: int
    payload_bytes: int
    sent_at_s: float
    records: tuple[TensorRecord | None, ...]


class Frame(NamedTuple):
    """Frame of a message, ready to be written: ``header``, then every buffer in order.

    The buffers are views of the tensors' memory or of a codec's output, and keep that memory alive. The caller must not
    change the memory until the buffers are sent.
    """

    header: bytes
    buffers: list[memoryview]
    payload_bytes: int


def header_bytes(max_tensors: int) -> int:
    """Return the size in bytes of every header on a channel whose messages have at most ``max_tensors`` tensors."""
    return _PRELUDE.size + max_tensors * RECORD_BYTES


def check_count(action: Action, tensors: Payload, max_tensors: int) -> None:
    """Check that a message has at most ``max_tensors`` tensors.

    Raises:
        LinkError: the message has more; names the action.
    """
    if len(tensors) > max_tensors:
        raise LinkError(f"{action.words} has {len(tensors)} tensors, its channel was opened for at most {max_tensors}.")


def encode(action: Action, tensors: Payload, form: FrameFormat, weight_version: int = 0, codec: Codec = NONE) -> Frame:
    """Create the frame of a message. Tensors are copied only if they have gaps or overlaps, or a codec encodes them.

    The call waits for pending copies, so it should run in a sending thread, not in the computing thread. A stride of 0
    (an expanded dimension) is kept, and only the distinct elements are sent. A tensor with gaps or overlaps is packed
    first; the order of its strides is kept.

    Args:
        codec: codec of the tensors that it supports. In a forward message it encodes only tensors that require a
            gradient, so no masks or positions.
        weight_version: see ``Channel.send``.

    Raises:
        LinkError: there are too many tensors, or one has an unsupported type, device or size; names the action.
    """
    check_count(action, tensors, form.max_tensors)
    wait_for_copies(tensors)
    described, parts = _described(CPU, action, tensors, codec)
    header, places, payload_bytes = _header_of(action, described, form, weight_version)
    buffers: list[memoryview] = []
    end_bytes = 0
    for begin_bytes, (memory, nbytes) in zip(places, parts, strict=True):
        if nbytes:
            if padding_bytes := begin_bytes - end_bytes:
                buffers.append(_PADDING[:padding_bytes])
            buffers.append(raw_bytes(memory, nbytes))
            end_bytes = begin_bytes + nbytes
    return Frame(header, buffers, payload_bytes)


def encode_on(
    device: Device, action: Action, tensors: Payload, form: FrameFormat, weight_version: int, codec: Codec
) -> tuple[bytes, torch.Tensor]:
    """Create the frame of a message on a device, in the current stream, as ``encode`` does on the host.

    Returns:
        (header, payload as uint8 in device memory).
    """
    described, parts = _described(device, action, tensors, codec)
    header, places, payload_bytes = _header_of(action, described, form, weight_version)
    payload = device.empty(payload_bytes, torch.uint8)
    for begin, (memory, nbytes) in zip(places, parts, strict=True):
        if nbytes:
            flat = memory.detach().as_strided((nbytes // memory.element_size(),), (1,)).to(device.place)
            payload[begin : begin + nbytes].copy_(flat.view(torch.uint8))
    return header, payload


def _described(
    device: Device, action: Action, tensors: Payload, codec: Codec
) -> tuple[list[Described | None], list[tuple[torch.Tensor, int]]]:
    """Return (description of each tensor of a message or None for None, [(memory to send, its size in bytes)])."""
    described: list[Described | None] = []
    parts: list[tuple[torch.Tensor, int]] = []
    for place, tensor in enumerate(tensors):
        if tensor is None:
            described.append(None)
            parts.append((_NO_MEMORY, 0))
            continue
        known, memory = _as_sent(device, action, place, tensor, codec)
        described.append(known)
        parts.append((memory, known.extent_bytes))
    return described, parts


def _as_sent(
    device: Device, action: Action, place: int, tensor: torch.Tensor | CodedTensor, codec: Codec
) -> tuple[Described, torch.Tensor]:
    """Return (description of a tensor, memory to send): the tensor's own memory, a packed copy or a codec's output.

    Args:
        place: index of the tensor in the message.
    """
    known = None
    if isinstance(tensor, CodedTensor):
        known = describe(tensor.dtype, tensor.shape, tensor.strides, tensor.requires_grad, tensor.codec)
        assert known is not None, "a device encodes dense tensors"
        assert known.codec == tensor.codec, "in codecs that apply to them"
        return known, tensor.wire
    name = codec.name if travels_coded(codec.name, action.op, tensor) else "none"
    if is_plain(tensor) and (tensor.is_cpu or not device.immediate):
        known = describe(tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad, name)
    if known is None:
        tensor, known = prepare(action, tensor, name, on_host=device.immediate)
    if known.codec == "none" or not known.extent_bytes:
        return known, tensor
    if not (device.codes or device.immediate):
        raise LinkError(
            f"{action.words}: links between devices encode there, and {device.title} has no CuPy. Install it (pip "
            "install 'raypipe[cuda13]'), leave codecs out, or take transport='tcp'."
        )
    flat = tensor.detach().as_strided((known.elements,), (1,)).to(device.place)
    wire = device.empty(known.extent_bytes, torch.uint8)
    device.encode(known.codec, flat, wire, key_of(codec, action, place))
    return known, wire


def _header_of(
    action: Action, described: Sequence[Described | None], form: FrameFormat, weight_version: int
) -> tuple[bytes, list[int], int]:
    """Return (header, offset in bytes of each tensor in the payload, size of the payload in bytes).

    Raises:
        LinkError: the payload is too large; names the action.
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
        form.generation,
        _OP_CODES[action.op],
        action.stage,
        action.microbatch,
        len(described),
        weight_version,
        end_bytes,
        time.time(),
    )
    records = [NO_TENSOR if known is None else known.record for known in described]
    records.append(NO_TENSOR * (form.max_tensors - len(described)))
    return prelude + b"".join(records), places, end_bytes


def parse(
    header: bytes | bytearray | memoryview, form: FrameFormat, payload_limit_bytes: int = PAYLOAD_LIMIT_BYTES
) -> Head:
    """Parse and check a header, before memory for the payload is allocated.

    A header of an older generation is returned too; the caller must then read the payload and drop it.

    Raises:
        LinkError: the header is damaged, of another format version, or of a newer generation.
    """
    generation, max_tensors = form
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
    """Return the key of stochastic rounding for the tensor of index ``place``; None if the codec rounds to nearest."""
    if codec.rounding_seed is None:
        return None
    return mixed(codec.rounding_seed, action.stage, _OP_CODES[action.op], action.microbatch, place)


def is_coded(head: Head) -> bool:
    """Return True if a tensor of the message is encoded by a codec."""
    return any(record is not None and record.codec != "none" for record in head.records)


def decode(
    head: Head, payload: torch.Tensor, allocate: Allocate | None = None, *, coded: bool = False
) -> tuple[torch.Tensor | None, ...]:
    """Create the tensors of a message in the memory of ``payload``; encoded tensors are decoded into separate memory.

    Each tensor is a leaf with its own version counter. So a stage may change one in place, and autograd still accepts
    the others, which it would refuse if all were views of one tensor.

    Args:
        payload: uint8, shape (head.payload_bytes,), without other users.
        allocate: allocates the memory of decoded tensors; None uses torch.empty.
        coded: True returns encoded tensors as CodedTensor, without decoding.

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
    """Copy the payload of a frame into one tensor, and return that tensor.

    Args:
        into: uint8 tensor whose first bytes are overwritten; None allocates a new tensor.
    """
    payload = torch.empty(frame.payload_bytes, dtype=torch.uint8) if into is None else into
    target, start = payload.numpy(), 0
    for buffer in frame.buffers:
        target[start : start + buffer.nbytes] = np.frombuffer(buffer, np.uint8)
        start += buffer.nbytes
    return payload


def _as_it_came(record: TensorRecord, payload: torch.Tensor) -> CodedTensor:
    wire = payload[record.offset_bytes : record.offset_bytes + record.extent_bytes]
    _, shape, strides, requires_grad, codec, elements, _, _ = record
    return CodedTensor(wire, codec, record.dtype, shape, strides, requires_grad, elements)


def _decoded(record: TensorRecord, payload: torch.Tensor, allocate: Allocate | None) -> torch.Tensor:
    """Decode the distinct elements of an encoded tensor into new memory (of ``allocate``); return the memory, uint8."""
    nbytes = record.elements * record.dtype.itemsize
    memory = torch.empty(nbytes, dtype=torch.uint8) if allocate is None else allocate(nbytes)
    wire = payload[record.offset_bytes : record.offset_bytes + record.extent_bytes]
    host.decode(record.codec, wire, memory.view(record.dtype))
    return memory


def decode_on(device: Device, head: Head, payload: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Create the tensors of a message whose payload is on a device, in the current stream, as ``decode`` does.

    Encoded tensors are decoded by the device into separate memory.
    """
    tensors: list[torch.Tensor | None] = []
    for tensor in decode(head, payload, coded=True):
        if not isinstance(tensor, CodedTensor):
            tensors.append(tensor)
            continue
        flat = device.empty(tensor.elements, tensor.dtype)
        device.decode(tensor.codec, tensor.wire, flat)
        tensors.append(flat.as_strided(tensor.shape, tensor.strides).detach().requires_grad_(tensor.requires_grad))
    return tuple(tensors)
