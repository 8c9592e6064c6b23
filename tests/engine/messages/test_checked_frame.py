"""Seals: every bit that changes in a header, its seal or its payload is seen."""

from __future__ import annotations

import pytest
import torch

from raypipe.engine.messages import checked_frame, frame
from raypipe.ir.schedule import Action, Op

pytestmark = pytest.mark.engine

TENSORS = [torch.arange(5, dtype=torch.float32), torch.arange(3, dtype=torch.int64)]
MESSAGE = frame.encode(Action(1, Op.SEND_F, 4), TENSORS, generation=2, max_tensors=3)
PAYLOAD = b"".join(MESSAGE.buffers)


def test_a_seal_says_the_number_and_the_checksum_of_the_payload() -> None:
    header = checked_frame.sealed(MESSAGE, 7)
    assert len(header) == frame.header_bytes(3) + checked_frame.SEAL_BYTES
    assert header[: -checked_frame.SEAL_BYTES] == MESSAGE.header
    assert checked_frame.opened(header) == checked_frame.Seal(7, checked_frame.checksum([PAYLOAD]))


def test_a_checksum_is_of_the_bytes_and_not_of_the_parts() -> None:
    assert len(MESSAGE.buffers) > 1
    assert (
        checked_frame.checksum(MESSAGE.buffers)
        == checked_frame.checksum([PAYLOAD])
        == checked_frame.checksum([PAYLOAD[:9], PAYLOAD[9:]])
    )


def test_every_bit_of_a_header_and_its_seal_counts() -> None:
    header = bytearray(checked_frame.sealed(MESSAGE, 7))
    for bit in range(8 * len(header)):
        header[bit // 8] ^= 1 << bit % 8
        assert checked_frame.opened(header) is None, bit
        header[bit // 8] ^= 1 << bit % 8
    assert checked_frame.opened(header) is not None


def test_every_bit_of_a_payload_counts() -> None:
    payload, sound = bytearray(PAYLOAD), checked_frame.checksum([PAYLOAD])
    for bit in range(8 * len(payload)):
        payload[bit // 8] ^= 1 << bit % 8
        assert checked_frame.checksum([payload]) != sound, bit
        payload[bit // 8] ^= 1 << bit % 8
