"""Damaged messages over sockets: each is noticed, none is accepted, and the link ends by name. Needs no Ray."""

from __future__ import annotations

import random
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import torch

from raypipe.engine.codec import NONE, Codec
from raypipe.engine.messages import checked_frame, frame
from raypipe.errors import LinkAbortedError, LinkError
from raypipe.runtime.transport.socket_channel import Connections, SocketChannel
from tests.contract.channel import WAIT_S, b, f
from tests.runtime.transport.ends import HOST

HEADER_BYTES = frame.header_bytes(2) + checked_frame.SEAL_BYTES
FORM = frame.FrameFormat(3, 2)
Bits = tuple[int, int]
Choose = Callable[[bytes], Bits | None]


class DamagingSocket(socket.socket):
    """Takes over a connected socket. SocketChannel gives every message to one ``sendmsg``.

    Attributes:
        choose: (first bit, end) of where a bit of a message is turned over, None for no damage; asked for every message
            before it leaves.
        flipped: bits that were turned over, by message.
    """

    choose: Callable[[bytes], tuple[int, int] | None]
    rng: random.Random
    flipped: list[int]

    @classmethod
    def over(cls, sock: socket.socket, seed: int, choose: Callable[[bytes], tuple[int, int] | None]) -> DamagingSocket:
        made = cls(fileno=sock.detach())
        made.choose, made.rng, made.flipped = choose, random.Random(seed), []
        return made

    def sendmsg(self, buffers: Iterable[Any], *more: Any) -> int:
        sent = bytearray().join(buffers)
        if (where := self.choose(bytes(sent))) is not None:
            bit = self.rng.randrange(*where)
            sent[bit // 8] ^= 1 << bit % 8
            self.flipped.append(bit)
        self.sendall(sent)
        return len(sent)


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
    a = SocketChannel(Connections("a <-> b", FORM, wire, back_in), checksum)
    z = SocketChannel(Connections("b <-> a", FORM, back_out, in_), checksum)
    with ExitStack() as closing:
        closing.callback(z.close)
        closing.callback(a.close)
        yield a, z, wire


def in_payload(message: bytes) -> Bits:
    return 8 * HEADER_BYTES, 8 * len(message)


def in_header(_message: bytes) -> Bits:
    return 0, 8 * HEADER_BYTES


def at_message(number: int, where: Choose) -> Choose:
    """Damage to the message with this number."""
    numbers = iter(range(1 << 20))
    return lambda message: where(message) if next(numbers) == number else None


def values(microbatch: int) -> torch.Tensor:
    return torch.rand(50 + 13 * (microbatch % 40), generator=torch.Generator().manual_seed(microbatch))


@pytest.mark.parametrize(("where", "part", "name"), [
    (in_payload, "payload", r"0SEND_F6 \(micro-batch 6\)"),
    # A bit of the time of sending, so that the rest of the header can still be read.
    (lambda _: (8 * 35, 8 * 43), "header", r"a message, by its damaged header 0SEND_F6 \(micro-batch 6\),"),
    (lambda _: (0, 8), "header", r"a message with an unreadable header \(Not a raypipe frame"),
])  # fmt: skip
def test_a_damaged_message_ends_the_link_with_its_name_both_checksums_and_the_cure(
    where: Choose, part: str, name: str
) -> None:
    with damaged_link(at_message(1, where)) as (a, z, _):
        a.send(f(5), (values(5),))
        a.send(f(6), (values(6),))
        with suppress(LinkAbortedError):  # the peer may have seen the damage by now
            a.send(f(7), (values(7),))
        with pytest.raises(LinkError, match=rf"b <-> a: {name}.* arrived damaged: its {part}") as caught:
            z.recv(f(7), WAIT_S)
        print(caught.value)
        found = re.search(r"checksum ([0-9a-f]{16}), its sender computed ([0-9a-f]{16})\.", str(caught.value))
        assert found is not None
        assert found[1] != found[2]
        assert "set FailureConfig(max_failures=...)" in str(caught.value)
        with pytest.raises(LinkAbortedError, match=r"a <-> b: aborted by the peer: .*arrived damaged"):
            a.recv(b(0), WAIT_S)


def test_what_came_before_a_damaged_message_is_as_sent_and_nothing_after_it_is_accepted() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    for number in (3, 10, 31):
        with damaged_link(at_message(number, in_header if number % 2 else in_payload), seed) as (a, z, _):
            a.use(Codec("int8"), NONE)
            for m in range(number):
                a.send(f(m), (torch.full((1 << 14,), float(m)),))
                got = z.recv(f(m), WAIT_S)[0]
                assert torch.equal(got, torch.full((1 << 14,), float(m)))  # type: ignore[arg-type]
            a.send(f(number), (torch.full((1 << 14,), 0.0),))
            for m in (number, number + 1):
                with pytest.raises(LinkError, match="arrived damaged"):
                    z.recv(f(m), WAIT_S)


def test_without_checksums_the_same_bits_pass_unseen() -> None:
    payload: Choose = lambda message: (8 * frame.header_bytes(2), 8 * len(message))  # noqa: E731
    with damaged_link(payload, seed=1, checksum="off") as (a, z, wire):
        for m in range(20):
            a.send(f(m), (values(m),))
            assert not torch.equal(z.recv(f(m), WAIT_S)[0], values(m))  # type: ignore[arg-type]
        assert len(wire.flipped) == 20
