"""Channels over sockets of both kinds: the contract, and what only sockets can do to them. Needs no Ray."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raypipe.engine.messages import frame
from raypipe.errors import LinkError
from raypipe.runtime.transport.socket_channel import Connections, SocketChannel
from tests.contract.channel import WAIT_S, WAKE_S, ChannelContract, Failing, Pair, b, f
from tests.runtime.transport.ends import open_link, use_and_close
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
KINDS, FORM = ("tcp", "unix"), frame.FrameFormat(3, 2)


class TestTcpChannel(ChannelContract):
    def open_pair(self, max_tensors: int = 4) -> Pair:
        return open_link(max_tensors, kind="tcp")


class TestUnixChannel(ChannelContract):
    def open_pair(self, max_tensors: int = 4) -> Pair:
        return open_link(max_tensors, kind="unix")


class Wire:
    """A channel whose peer is this test, byte by byte."""

    def __init__(self) -> None:
        outgoing, self.outgoing = socket.socketpair()
        incoming, self.incoming = socket.socketpair()
        self.outgoing.settimeout(WAIT_S)
        self.incoming.settimeout(WAIT_S)
        self.channel = SocketChannel(Connections("a <-> b", FORM, outgoing, incoming))

    def write(self, microbatch: int, value: float, generation: int = 3) -> None:
        message = frame.encode(f(microbatch), [torch.full((100,), value)], FORM._replace(generation=generation))
        self.incoming.sendall(b"".join([message.header, *message.buffers]))

    def close(self) -> None:
        self.channel.close()
        self.outgoing.close()
        self.incoming.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


SOUND = frame.encode(f(0), [torch.arange(25.0), None], FORM)
SOUND_BYTES = b"".join([SOUND.header, *SOUND.buffers])


@pytest.mark.slow
@given(st.data())
def test_whatever_comes_is_a_message_or_an_error(data: st.DataObject) -> None:
    """Noise, bits turned over in the header, an end too early: never a crash, a hang or a tensor beyond its bytes."""
    sent = bytearray(SOUND_BYTES)
    kind = data.draw(st.sampled_from(("noise", "flip", "cut")))
    if kind == "noise":
        sent = bytearray(data.draw(st.binary(min_size=1, max_size=2 * len(sent))))
    elif kind == "flip":
        for bit in data.draw(st.sets(st.integers(0, 8 * len(SOUND.header) - 1), min_size=1, max_size=3)):
            sent[bit // 8] ^= 1 << bit % 8
    else:
        del sent[data.draw(st.integers(0, len(sent) - 1)) :]
    made = Wire()
    try:
        made.incoming.sendall(sent)
        made.incoming.shutdown(socket.SHUT_WR)
        wait = Failing(lambda: made.channel.recv(f(1), WAIT_S))  # once this fails, all that came has been looked at
        if kind != "flip":
            wait.result()
        try:
            got = made.channel.recv(f(0), WAIT_S)
        except LinkError:
            got = ()
        assert kind == "flip" or got == ()
        extents = [t.untyped_storage().nbytes() for t in got if t is not None]
        assert all(nbytes == SOUND.payload_bytes for nbytes in extents), "what came is what the tensors are made of"
        made.channel.close()
    finally:
        made.close()


def test_messages_of_one_shape_do_not_share_memory(wire: Wire) -> None:
    """Memory is prepared ahead for a message like the last one; each message has its own."""
    for m in range(4):
        wire.write(m, float(m), generation=2 if m == 2 else 3)
    got = [wire.channel.recv(f(m), WAIT_S)[0] for m in (0, 1, 3)]
    assert [t[50].item() for t in got if t is not None] == [0.0, 1.0, 3.0]
    got[0].zero_()  # type: ignore[union-attr]
    message = frame.encode(f(4), [torch.arange(100, dtype=torch.int32)], FORM)
    wire.incoming.sendall(b"".join([message.header, *message.buffers]))
    assert wire.channel.recv(f(4), WAIT_S)[0].tolist() == list(range(100))  # type: ignore[union-attr]


def test_bytes_may_come_one_by_one(wire: Wire) -> None:
    message = frame.encode(f(0), [torch.arange(8.0)], FORM)
    for byte in b"".join([message.header, *message.buffers]):
        wire.incoming.sendall(bytes([byte]))
    assert wire.channel.recv(f(0), WAIT_S)[0].tolist() == list(range(8))  # type: ignore[union-attr]


def test_send_never_waits_for_a_peer_that_does_not_read_and_abort_ends_it(wire: Wire) -> None:
    x = torch.ones(1 << 18)
    for m in range(20):
        start_s = time.monotonic()
        wire.channel.send(f(m), (x,))
        assert time.monotonic() - start_s < WAKE_S
    wait = Failing(lambda: wire.channel.recv(b(0), WAIT_S))
    start_s = time.monotonic()
    wire.channel.abort("enough")
    wait.result()
    wire.channel.close()
    assert time.monotonic() - start_s < WAKE_S


def test_an_abort_does_not_queue_behind_data(wire: Wire) -> None:
    """The reason takes the way back of the other connection, which is empty."""
    wire.channel.send(f(0), (torch.ones(1 << 20),))
    wire.channel.abort("stage 7 died")
    assert wire.incoming.recv(1000) == b"stage 7 died"


def test_an_abort_of_the_peer_overtakes_data_that_was_not_read(wire: Wire) -> None:
    wait = Failing(lambda: wire.channel.recv(f(1), WAIT_S))
    wire.write(0, 1.0)
    wire.outgoing.sendall(b"stage 7 died")
    for sock in (wire.incoming, wire.outgoing):  # as abort() does
        sock.shutdown(socket.SHUT_RDWR)
    assert "aborted by the peer: stage 7 died" in str(wait.result())
    with pytest.raises(LinkError, match="stage 7 died"):
        wire.channel.recv(f(0), WAIT_S)


def test_more_buffers_than_one_call_takes(wire: Wire) -> None:
    """512 go into one sendmsg; a backlog of small messages has more."""
    wire.channel.send(f(0), (torch.ones(1 << 21),))
    for m in range(1, 600):
        wire.channel.send(f(m), (torch.ones(1), torch.ones(1)))
    small_bytes = frame.header_bytes(2) + 64 + 4
    left_bytes = frame.header_bytes(2) + (4 << 21) + 599 * small_bytes
    while left_bytes:
        tail = wire.outgoing.recv(min(left_bytes, 1 << 20))
        left_bytes -= len(tail)
    assert struct.unpack("<f", tail[-4:]) == (1.0,)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_and_descriptors_are_bounded_and_gone_after_close(kind: str) -> None:
    descriptors = Path("/proc/self/fd")
    threads, files = threading.active_count(), len(list(descriptors.iterdir()))
    links = [open_link(kind=kind) for _ in range(4)]
    each = {"unix": 2, "tcp": 3}[kind]
    assert threading.active_count() <= threads + each * 8, "one per link and direction at each end, and one for notes"
    use_and_close(links)
    wait_until(lambda: threading.active_count() <= threads)
    wait_until(lambda: len(list(descriptors.iterdir())) <= files)


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_over_the_limit_ends_the_link_on_both_sides(kind: str) -> None:
    """Up to 1 GiB, the contract sends."""
    a, z = open_link(kind=kind)
    a.send(f(1), (torch.zeros(1).expand(frame.PAYLOAD_LIMIT_BYTES // 4 + 1),))
    for end, action in ((z, f(1)), (a, b(0))):
        with pytest.raises(LinkError, match=f"cannot be sent.*{frame.PAYLOAD_LIMIT_BYTES} bytes"):
            end.recv(action, WAIT_S)
        end.close()
