"""TCP channels: the contract, and what only a network can do to them. Needs no Ray."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from raypipe.engine import frame
from raypipe.errors import LinkError
from raypipe.runtime.sockets import SocketChannel, SocketListener, open_channels
from tests.contract.channel import WAIT_S, WAKE_S, ChannelContract, Failing, Pair, b, f, wait_until

HOST = "127.0.0.1"
ROOT = Path(__file__).parents[2]


def together(*calls: Callable[[], object]) -> list[object]:
    """Run calls that wait for each other; the first error is raised when all have ended."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(WAIT_S) for future in [pool.submit(call) for call in calls]]


def open_link(max_tensors: int = 4, generation: int = 3) -> tuple[SocketChannel, SocketChannel]:
    with SocketListener(HOST) as first, SocketListener(HOST) as second:
        a, z = together(
            lambda: open_channels(first, 0, {1: second.address}, generation, "run", max_tensors, WAIT_S),
            lambda: open_channels(second, 1, {0: first.address}, generation, "run", max_tensors, WAIT_S),
        )
    return a[1], z[0]  # type: ignore[index]


class TestSocketChannel(ChannelContract):
    def open_pair(self, max_tensors: int = 4) -> Pair:
        return open_link(max_tensors)


class Wire:
    """A channel whose peer is this test, byte by byte."""

    def __init__(self) -> None:
        outgoing, self.outgoing = socket.socketpair()
        incoming, self.incoming = socket.socketpair()
        self.outgoing.settimeout(WAIT_S)
        self.incoming.settimeout(WAIT_S)
        self.channel = SocketChannel("a <-> b", 3, 2, outgoing, incoming)

    def write(self, microbatch: int, value: float, generation: int = 3) -> None:
        message = frame.encode(f(microbatch), [torch.full((100,), value)], generation=generation, max_tensors=2)
        self.incoming.sendall(b"".join([message.header, *message.buffers]))


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.channel.close()
    made.outgoing.close()
    made.incoming.close()


def test_messages_of_an_older_generation_are_dropped(wire: Wire) -> None:
    wire.write(0, 1.0, generation=2)
    wire.write(1, 2.0)
    wire.write(0, 3.0)
    assert wire.channel.recv(f(1), WAIT_S)[0].tolist() == [2.0] * 100  # type: ignore[union-attr]
    assert wire.channel.recv(f(0), WAIT_S)[0].tolist() == [3.0] * 100  # type: ignore[union-attr]


def test_a_newer_generation_is_an_error_on_both_sides(wire: Wire) -> None:
    wire.write(0, 1.0, generation=4)
    with pytest.raises(LinkError, match=r"a <-> b.*generation 4.*generation 3"):
        wire.channel.recv(f(0), WAIT_S)
    assert b"generation 4" in wire.incoming.recv(1000)


def test_a_damaged_header_is_an_error(wire: Wire) -> None:
    wire.incoming.sendall(bytes(frame.header_bytes(2)))
    with pytest.raises(LinkError, match=r"a <-> b.*Not a raypipe frame"):
        wire.channel.recv(f(0), WAIT_S)
    with pytest.raises(LinkError):
        wire.channel.send(b(0), ())


def test_a_connection_that_ends_inside_a_message_is_an_error(wire: Wire) -> None:
    message = frame.encode(f(0), [torch.ones(100)], generation=3, max_tensors=2)
    wire.incoming.sendall(message.header + bytes(message.buffers[0])[:50])
    wire.incoming.shutdown(socket.SHUT_WR)
    with pytest.raises(LinkError, match="ended after 50 of 400 bytes"):
        wire.channel.recv(f(0), WAIT_S)


def test_messages_of_one_shape_do_not_share_memory(wire: Wire) -> None:
    """Memory is prepared ahead for a message like the last one; each message has its own."""
    for m in range(4):
        wire.write(m, float(m), generation=2 if m == 2 else 3)
    got = [wire.channel.recv(f(m), WAIT_S)[0] for m in (0, 1, 3)]
    assert [t[50].item() for t in got if t is not None] == [0.0, 1.0, 3.0]
    got[0].zero_()  # type: ignore[union-attr]
    message = frame.encode(f(4), [torch.arange(100, dtype=torch.int32)], generation=3, max_tensors=2)
    wire.incoming.sendall(b"".join([message.header, *message.buffers]))
    assert wire.channel.recv(f(4), WAIT_S)[0].tolist() == list(range(100))  # type: ignore[union-attr]


def test_bytes_may_come_one_by_one(wire: Wire) -> None:
    message = frame.encode(f(0), [torch.arange(8.0)], generation=3, max_tensors=2)
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


def test_send_notices_that_the_peer_left(wire: Wire) -> None:
    wire.outgoing.close()

    def refused() -> bool:
        try:
            wire.channel.send(f(0), (torch.ones(1 << 16),))
        except LinkError as error:
            return "0SEND_F0" in str(error) and "closed the link or died" in str(error)
        return False

    wait_until(refused)


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


def test_close_sends_what_is_left() -> None:
    a, z = open_link()
    x = torch.arange(1 << 20, dtype=torch.float32)
    for m in range(6):
        a.send(f(m), (x,))
    a.close()
    for m in range(6):
        assert torch.equal(z.recv(f(m), WAIT_S)[0], x)  # type: ignore[arg-type]
    z.close()


def test_threads_and_descriptors_are_bounded_and_gone_after_close() -> None:
    descriptors = Path("/proc/self/fd")
    threads, files = threading.active_count(), len(list(descriptors.iterdir()))
    links = [open_link() for _ in range(4)]
    assert threading.active_count() <= threads + 2 * 8, "one per link and direction at each end"
    for i, (a, z) in enumerate(links):
        a.send(f(0), (torch.ones(3),))
        if i % 2:
            a.abort("test")
        z.close()
        a.close()
    assert threading.active_count() == threads
    assert len(list(descriptors.iterdir())) == files


# Opening.


def test_three_workers_open_all_links_and_names_are_kept() -> None:
    listeners = [SocketListener(HOST) for _ in range(3)]

    def enter(me: int) -> dict[int, SocketChannel]:
        peers = {p: listeners[p].address for p in range(3) if p != me}
        names = {p: f"{me}-{p}" for p in peers}
        limits = {p: 1 + p + me for p in peers}
        return open_channels(listeners[me], me, peers, 0, b"run", limits, WAIT_S, names)

    channels = together(*(partial(enter, me) for me in range(3)))
    for me in range(3):
        for peer in set(range(3)) - {me}:
            assert channels[me][peer].name == f"{me}-{peer}"  # type: ignore[index]
            channels[me][peer].send(f(me), (torch.tensor(float(me)),))  # type: ignore[index]
    for me in range(3):
        for peer in set(range(3)) - {me}:
            assert channels[me][peer].recv(f(peer), WAIT_S)[0].item() == peer  # type: ignore[index]
    for me in range(3):
        for channel in channels[me].values():  # type: ignore[attr-defined]
            channel.close()
        listeners[me].close()


def test_strangers_do_not_disturb() -> None:
    """Somebody silent, somebody who talks, another run, and this run's past."""
    with SocketListener(HOST) as first, SocketListener(HOST) as second:
        silent = socket.create_connection(first.address, timeout=WAIT_S)
        talker = socket.create_connection(first.address, timeout=WAIT_S)
        talker.sendall(b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: text/html\r\n\r\n")
        with pytest.raises(LinkError, match="no welcome"):
            open_channels(second, 1, {0: first.address}, 3, "other run", 4, 0.05)
        with pytest.raises(LinkError, match="no welcome"):
            open_channels(second, 1, {0: first.address}, 2, "run", 4, 0.05)
        ends = together(
            lambda: open_channels(first, 0, {1: second.address}, 3, "run", 4, WAIT_S),
            lambda: open_channels(second, 1, {0: first.address}, 3, "run", 4, WAIT_S),
        )
        ends[0][1].send(f(0), (torch.ones(1),))  # type: ignore[index]
        assert len(ends[1][0].recv(f(0), WAIT_S)) == 1  # type: ignore[index]
        with contextlib.suppress(ConnectionResetError):  # if it was closed while words of it were unread
            assert talker.recv(1) == b""
        for sock in (silent, talker):
            sock.close()
        ends[0][1].close()  # type: ignore[index]
        ends[1][0].close()  # type: ignore[index]


def test_workers_may_enter_a_generation_in_any_order() -> None:
    """Worker 0 is still in generation 3 when worker 1 opens 4: told so, it follows at once."""
    with SocketListener(HOST) as first, SocketListener(HOST) as second:

        def enter_late() -> dict[int, SocketChannel]:
            with pytest.raises(LinkError, match=r"opens generation 4 .* generation 3, which is obsolete"):
                open_channels(first, 0, {1: second.address}, 3, "run", 4, WAIT_S)
            return open_channels(first, 0, {1: second.address}, 4, "run", 4, WAIT_S)

        a, z = together(enter_late, lambda: open_channels(second, 1, {0: first.address}, 4, "run", 4, WAIT_S))
        z[0].send(b(0), (torch.ones(1),))  # type: ignore[index]
        assert len(a[1].recv(b(0), WAIT_S)) == 1  # type: ignore[index]
        a[1].close()  # type: ignore[index]
        z[0].close()  # type: ignore[index]


def test_another_plan_of_the_same_generation_is_an_error() -> None:
    with SocketListener(HOST) as first, SocketListener(HOST) as second:
        other = Failing(lambda: open_channels(second, 1, {0: first.address}, 3, "run", 5, 0.2))
        with pytest.raises(LinkError, match=r"up to 5 tensors.*up to 4"):
            open_channels(first, 0, {1: second.address}, 3, "run", 4, WAIT_S)
        other.result()


def test_an_absent_peer_is_named_at_the_deadline() -> None:
    with SocketListener(HOST) as first, SocketListener(HOST) as mute, pytest.raises(LinkError) as caught:
        open_channels(first, 0, {6: mute.address}, 0, "run", 1, 0.05)
    assert "0.05 s: no connection from workers [6], no welcome from workers [6]" in str(caught.value)


def test_a_dead_peer_is_named_at_once() -> None:
    gone = SocketListener(HOST)
    address = gone.address
    gone.close()
    start_s = time.monotonic()
    with SocketListener(HOST) as first, pytest.raises(LinkError, match="cannot connect to worker 1"):
        open_channels(first, 0, {1: address}, 0, "run", 1, WAIT_S)
    assert time.monotonic() - start_s < WAKE_S


PEER = """
import sys, time
from raypipe.runtime.sockets import SocketListener, open_channels
from tests.contract.channel import b, f
import torch
listener = SocketListener("127.0.0.1")
print(listener.address[1], flush=True)
channel = open_channels(listener, 1, {0: ("127.0.0.1", int(sys.argv[1]))}, 0, "run", 2, 30.0)[0]
channel.recv(f(0), 30.0)
channel.send(b(0), (torch.ones(1 << 20),))
time.sleep(30)
"""


@pytest.mark.slow
def test_a_killed_peer_is_noticed() -> None:
    with SocketListener(HOST) as listener:
        command = [sys.executable, "-c", PEER, str(listener.address[1])]
        peer = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
        try:
            assert peer.stdout is not None
            address = (HOST, int(peer.stdout.readline()))
            channel = open_channels(listener, 0, {1: address}, 0, "run", 2, 30.0)[1]
            channel.send(f(0), (torch.ones(1 << 20),))
            assert len(channel.recv(b(0), 30.0)) == 1
            wait = Failing(lambda: channel.recv(b(1), WAIT_S))
            time.sleep(0.05)
            start_s = time.monotonic()
            peer.send_signal(signal.SIGKILL)
            error = wait.result()
            print(f"SIGKILL noticed after {(wait.ended_s - start_s) * 1e3:.2f} ms: {error}")
            assert wait.ended_s - start_s < WAKE_S
            assert "closed the link or died" in str(error) or "broke" in str(error)
            assert "1SEND_B1" in str(error)
            channel.close()
        finally:
            peer.kill()
            peer.wait(WAIT_S)
            if peer.stdout is not None:
                peer.stdout.close()
