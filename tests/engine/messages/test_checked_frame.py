"""Seals: every bit that changes in a header, its seal or its payload is seen."""

from __future__ import annotations

import pytest
import torch

from raypipe.engine.messages import checked_frame, frame
from raypipe.errors import LinkError
from raypipe.ir.schedule import Action, Op

pytestmark = pytest.mark.engine

TENSORS = [torch.arange(5, dtype=torch.float32), torch.arange(3, dtype=torch.int64)]
FORM = frame.FrameFormat(2, 3)
MESSAGE = frame.encode(Action(1, Op.SEND_F, 4), TENSORS, FORM)
PAYLOAD = b"".join(MESSAGE.buffers)


def parsed(header: bytes | bytearray) -> tuple[frame.Head, int | None]:
    return checked_frame.parse(header, FORM, checked=True)


def test_a_seal_holds_the_checksum_of_the_payload() -> None:
    header = checked_frame.sealed(MESSAGE)
    assert len(header) == frame.header_bytes(3) + checked_frame.SEAL_BYTES
    assert header[: -checked_frame.SEAL_BYTES] == MESSAGE.header
    plain = checked_frame.parse(MESSAGE.header, FORM, checked=False)
    assert parsed(header) == (plain[0], checked_frame.checksum([PAYLOAD]))
    assert plain[1] is None


def test_a_checksum_is_of_the_bytes_and_not_of_the_parts() -> None:
    assert len(MESSAGE.buffers) > 1
    assert (
        checked_frame.checksum(MESSAGE.buffers)
        == checked_frame.checksum([PAYLOAD])
        == checked_frame.checksum([PAYLOAD[:9], PAYLOAD[9:]])
    )


def test_every_bit_of_a_header_and_its_seal_counts() -> None:
    header = bytearray(checked_frame.sealed(MESSAGE))
    for bit in range(8 * len(header)):
        header[bit // 8] ^= 1 << bit % 8
        with pytest.raises(LinkError, match="arrived damaged: its header has checksum"):
            parsed(header)
        header[bit // 8] ^= 1 << bit % 8
    parsed(header)


def test_every_bit_of_a_payload_counts() -> None:
    payload = bytearray(PAYLOAD)
    head, expected = parsed(checked_frame.sealed(MESSAGE))
    for bit in range(8 * len(payload)):
        payload[bit // 8] ^= 1 << bit % 8
        with pytest.raises(LinkError, match=r"1SEND_F4 \(micro-batch 4\) arrived damaged: its payload has checksum"):
            checked_frame.check_payload(head, [payload], expected)
        payload[bit // 8] ^= 1 << bit % 8
    checked_frame.check_payload(head, [payload], expected)
