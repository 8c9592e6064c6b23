"""Checksums of frames on checked links: a seal (two checksums) after the header detects bits that changed on the way.

    header | checksum of the payload | checksum of all before it | payload
             `---------------- seal -----------------'

The header is checked before the payload size in it is used. TCP's own checksum has 16 bits only, and network cards and
middle boxes that damage data compute a new one over the damaged data. The checksum is XXH3 of
https://github.com/Cyan4973/xxHash, 64 bits. It detects damage, but no forgery.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import xxhash

from raypipe.engine.messages import frame
from raypipe.engine.messages.frame import Frame, FrameFormat, Head
from raypipe.errors import LinkError

_SUM = struct.Struct("<Q")
SEAL_BYTES = 2 * _SUM.size


def checksum(parts: Iterable[bytes | bytearray | memoryview]) -> int:
    """Compute XXH3 over the bytes of all parts, in order."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest()


def sealed(message: Frame) -> bytes:
    """Return a frame's header followed by the seal: the payload's checksum, and the checksum of all before it."""
    begin = message.header + _SUM.pack(checksum(message.buffers))
    return begin + _SUM.pack(xxhash.xxh3_64_intdigest(begin))


def parse(header: bytes | bytearray | memoryview, form: FrameFormat, *, checked: bool) -> tuple[Head, int | None]:
    """Return (parsed header, checksum that the payload must have).

    Args:
        checked: True if a seal (two checksums) follows the header; if False, the returned checksum is None.

    Raises:
        LinkError: header or seal are damaged, or ``frame.parse`` refuses the header.
    """
    if not checked:
        return frame.parse(header, form), None
    plain = header[:-SEAL_BYTES]
    (expected,), received = _SUM.unpack_from(header, len(header) - _SUM.size), checksum([header[: -_SUM.size]])
    if received != expected:
        raise _damaged(_guessed_name(plain, form), "header", received, expected)
    (payload_checksum,) = _SUM.unpack_from(header, len(header) - SEAL_BYTES)
    return frame.parse(plain, form), payload_checksum


def check_payload(head: Head, payload: Iterable[bytes | bytearray | memoryview], expected: int | None) -> None:
    """Compare the checksum of a received payload with ``expected``, the sender's; None skips the check.

    Raises:
        LinkError: the checksums differ.
    """
    if expected is not None and (received := checksum(payload)) != expected:
        raise _damaged(head.action.words, "payload", received, expected)


def _guessed_name(plain: bytes | bytearray | memoryview, form: FrameFormat) -> str:
    """Describe a message whose header is damaged, by its action if the header can still be parsed."""
    try:
        action = frame.parse(plain, form).action
    except LinkError as error:
        return f"a message with an unreadable header ({str(error).rstrip('.')})"
    return f"a message, by its damaged header {action.words},"


def _damaged(name: str, part: str, received: int, expected: int) -> LinkError:
    return LinkError(
        f"{name} arrived damaged: its {part} has checksum {received:016x}, its sender computed {expected:016x}. "
        "Something between the two hosts changes bits: check network cards and memory. To train on after such an "
        "error, set FailureConfig(max_failures=...): the run then opens its links again and repeats the step."
    )
