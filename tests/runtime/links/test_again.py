"""Damaged messages over sockets: found, asked for again once, and refused by name. Needs no Ray."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from raypipe.engine.codec import NONE, Codec
from raypipe.engine.messages import checked_frame, frame
from raypipe.errors import LinkError
from raypipe.runtime.links.again import AGAIN, MARK_BYTES, TAKEN, Kept, Note, WayBack
from raypipe.runtime.links.socket_channel import SocketChannel
from tests.contract.channel import WAIT_S, b, f, wait_until
from tests.runtime.links.damage import DamagingSocket
from tests.runtime.links.ends import HOST

HEADER_BYTES = frame.header_bytes(2) + checked_frame.SEAL_BYTES
Bits = tuple[int, int]
Choose = Callable[[bytes], Bits | None]


def connected() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection."""
    with socket.create_server((HOST, 0)) as server:
        caller = socket.create_connection(server.getsockname(), timeout=WAIT_S)
        answerer, _ = server.accept()
    caller.settimeout(None)
    return caller, answerer


@contextmanager
def damaged_link(
    choose: Choose, seed: int = 0, checksum: str = "auto"
) -> Iterator[tuple[SocketChannel, SocketChannel, DamagingSocket]]:
    """Both ends of a link, of which the first one's messages are damaged."""
    out, in_ = connected()
    back_out, back_in = connected()
    wire = DamagingSocket.over(out, seed, choose)
    a = SocketChannel("a <-> b", 3, 2, wire, back_in, checksum)
    z = SocketChannel("b <-> a", 3, 2, back_out, in_, checksum)
    with ExitStack() as closing:
        closing.callback(z.close)
        closing.callback(a.close)
        yield a, z, wire


def in_payload(message: bytes) -> Bits:
    return 8 * HEADER_BYTES, 8 * len(message)


def in_header(_message: bytes) -> Bits:
    return 0, 8 * HEADER_BYTES


def once(chosen: dict[int, Choose], times: int = 1) -> Choose:
    """Damage to messages by their numbers, so often."""
    left = dict.fromkeys(chosen, times)

    def choose(message: bytes) -> Bits | None:
        number = int.from_bytes(message[HEADER_BYTES - checked_frame.SEAL_BYTES :][:8], "little")
        if not left.get(number):
            return None
        left[number] -= 1
        return chosen[number](message)

    return choose


def values(microbatch: int) -> torch.Tensor:
    return torch.rand(50 + 13 * (microbatch % 40), generator=torch.Generator().manual_seed(microbatch))


@pytest.mark.parametrize("where", [in_header, in_payload])
def test_each_of_100_flipped_bits_is_found_and_what_is_taken_is_as_sent(where: Choose) -> None:
    """Every other message is damaged."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    with damaged_link(once({2 * m: where for m in range(100)}), seed) as (a, z, wire):
        for m in range(200):
            a.send(f(m), (values(m), None))
            got, none = z.recv(f(m), WAIT_S)
            assert none is None
            assert torch.equal(got, values(m)), f"micro-batch {m}, seed {seed}"  # type: ignore[arg-type]
        assert len(wire.flipped) == z.damaged == 100


def test_without_checksums_the_same_bits_pass_unseen() -> None:
    payload: Choose = lambda message: (8 * frame.header_bytes(2), 8 * len(message))  # noqa: E731
    with damaged_link(payload, seed=1, checksum="off") as (a, z, wire):
        for m in range(20):
            a.send(f(m), (values(m),))
            assert not torch.equal(z.recv(f(m), WAIT_S)[0], values(m))  # type: ignore[arg-type]
        assert len(wire.flipped) == 20
        assert z.damaged == 0


def test_what_was_under_way_behind_a_damaged_message_comes_once_and_in_order() -> None:
    """Also where other messages are damaged while the first is sent again, and where the link is closed meanwhile."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chosen: dict[int, Choose] = {m: in_header if m % 2 else in_payload for m in (3, 4, 9, 20, 31, 47, 59)}
    with damaged_link(once(chosen), seed) as (a, z, wire):
        a.use(Codec("int8"), NONE)
        for m in range(60):
            a.send(f(m), (torch.full((1 << 14,), float(m)),))
        a.close()
        for m in range(60):
            assert torch.equal(z.recv(f(m), WAIT_S)[0], torch.full((1 << 14,), float(m)))  # type: ignore[arg-type]
        with pytest.raises(LinkError, match="closed the link"):
            z.recv(f(60), WAIT_S)
        assert 1 <= z.damaged <= len(wire.flipped)


@pytest.mark.parametrize("where", [in_header, in_payload])
def test_a_message_that_comes_damaged_twice_ends_the_link_by_name(where: Choose) -> None:
    # In the header a bit of the time of sending, so that the rest of it can still be read.
    damage: Choose = lambda message: (8 * 35, 8 * 43) if where is in_header else in_payload(message)  # noqa: E731
    with damaged_link(once({1: damage}, times=2)) as (a, z, _):
        for m in (5, 6, 7):
            a.send(f(m), (values(m),))
        assert torch.equal(z.recv(f(5), WAIT_S)[0], values(5))  # type: ignore[arg-type]
        with pytest.raises(LinkError, match=r"b <-> a: .*0SEND_F6 \(micro-batch 6\).* came damaged twice") as caught:
            z.recv(f(7), WAIT_S)
        print(caught.value)
        with pytest.raises(LinkError, match="damaged twice"):
            a.recv(b(0), WAIT_S)


def test_messages_are_let_go_once_they_are_taken() -> None:
    with damaged_link(lambda _: None) as (a, z, _):
        for m in range(10):
            a.send(f(m), (values(m),))
            z.recv(f(m), WAIT_S)
        assert a._kept is not None
        wait_until(lambda: not a._kept._messages)  # type: ignore[union-attr]


def test_nobody_waits_for_notes_of_a_peer_that_died() -> None:
    out, mute = connected()
    back_out, back_in = connected()
    a = SocketChannel("a <-> b", 3, 2, out, back_in)
    a.send(f(0), (torch.ones(4),))
    closing = threading.Thread(target=a.close, daemon=True)
    closing.start()
    mute.close()
    back_out.close()
    closing.join(WAIT_S)
    assert not closing.is_alive()


# Notes.


def test_a_damaged_note_ends_the_link() -> None:
    out, answering = connected()
    back_out, back_in = connected()
    a = SocketChannel("a <-> b", 3, 2, out, back_in)
    note = bytearray(Note(TAKEN, 1).pack())
    note[4] ^= 1
    answering.sendall(note)
    with pytest.raises(LinkError, match=r"a <-> b: a note of the peer came damaged"):
        a.recv(b(0), WAIT_S)
    a.close()
    answering.close()
    back_out.close()


def test_notes_come_in_pieces_and_a_reason_behind_them() -> None:
    mine, theirs = connected()
    back = WayBack(mine)
    mark = bytes(range(MARK_BYTES))
    sent = Note(TAKEN, 5).pack() + Note(AGAIN, 6, mark).pack() + b"stage 7 died"
    assert back.read() == []
    found = []
    for byte in sent:
        theirs.sendall(bytes([byte]))
        found += back.read()
    wait_until(lambda: bool(found.extend(back.read())) or back.reason() == "stage 7 died")
    assert found == [Note(TAKEN, 5), Note(AGAIN, 6, mark)]
    assert not back.ended
    theirs.close()
    wait_until(lambda: not back.read() and back.ended)
    assert back.reason() == "stage 7 died"
    mine.close()


def test_only_what_is_under_way_can_be_asked_for_again() -> None:
    kept = Kept()
    message = frame.encode(f(0), [torch.ones(3)], generation=0, max_tensors=1)
    headers = [kept.add(message) for _ in range(4)]
    assert [checked_frame.opened(header).number for header in headers] == [0, 1, 2, 3]  # type: ignore[union-attr]
    assert not kept.hear([Note(TAKEN, 2)])
    assert [header for header, _ in kept.since(2)] == headers[2:]
    assert kept.hear([Note(AGAIN, 2), Note(TAKEN, 3), Note(AGAIN, 3)])
    assert kept.take_asked() == Note(AGAIN, 3)
    for number in (2, 4):
        with pytest.raises(LinkError, match=f"asks again for message {number}"):
            kept.hear([Note(AGAIN, number)])
    assert not kept.hear([Note(TAKEN, 4)])
    assert kept.settle()
