"""Frames with checksums: the seal behind the header of one, on a checked link, so that damage on the way is seen.

    header | number | checksum of the payload | checksum of all before it | payload
             `------------------ seal ------------------'

The header's checksum is looked at before its payload's size is believed. The number counts the messages of one
direction of a link; by it a damaged one is asked for again. TCP's own checksum has 16 bits, and network cards and
middle boxes compute it anew over what they damaged. Source: XXH3 of https://github.com/Cyan4973/xxHash, 64 bits. It
detects damage, never forgery.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

import xxhash

from raypipe.engine.messages import frame
from raypipe.engine.messages.frame import Frame
from raypipe.errors import LinkError

__all__ = ["SEAL_BYTES", "Seal", "checksum", "guessed_name", "opened", "sealed"]

_SEAL = struct.Struct("<QQQ")
SEAL_BYTES = _SEAL.size
_SUM_BYTES = 8


class Seal(NamedTuple):
    """Of a header that came undamaged: the number of its message, and the checksum that its payload has to have."""

    number: int
    payload_checksum: int


def checksum(parts: Iterable[bytes | bytearray | memoryview]) -> int:
    """XXH3 of the bytes of all parts, one behind the other."""
    found = xxhash.xxh3_64()
    for part in parts:
        found.update(part)
    return found.intdigest()


def sealed(message: Frame, number: int) -> bytes:
    """The header of a frame with its seal, for which the payload is read once."""
    begin = message.header + struct.pack("<QQ", number, checksum(message.buffers))
    return begin + struct.pack("<Q", xxhash.xxh3_64_intdigest(begin))


def opened(header: bytes | bytearray | memoryview) -> Seal | None:
    """What the seal behind a header says; None where the header or the seal changed on its way."""
    number, payload_checksum, own_checksum = _SEAL.unpack_from(header, len(header) - SEAL_BYTES)
    if xxhash.xxh3_64_intdigest(header[: len(header) - _SUM_BYTES]) != own_checksum:
        return None
    return Seal(number, payload_checksum)


def guessed_name(number: int, header: bytes | bytearray | memoryview, *, generation: int, max_tensors: int) -> str:
    """What a message whose header is damaged seems to be, for people; ``header`` is without its seal."""
    try:
        action = frame.parse(header, generation=generation, max_tensors=max_tensors).action
    except LinkError as error:
        return f"message {number} with a damaged header ({str(error).rstrip('.')})"
    return f"message {number}, by its damaged header {action.words},"
