"""Opening links: in any order, past resets, over the right socket, on the right port. Needs no Ray."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from raypipe.errors import LinkError
from raypipe.runtime.transport import tcp
from raypipe.runtime.transport.listener import Address, SocketListener
from raypipe.runtime.transport.socket_channel import SocketChannel
from tests.contract.channel import WAIT_S, WAKE_S, Failing, b, f
from tests.runtime.transport.ends import HOST, close, open_channels, together

ROOT = Path(__file__).parents[3]


def test_three_workers_open_all_links_and_names_are_kept() -> None:
    listeners = [SocketListener(HOST) for _ in range(3)]

    def enter(me: int) -> dict[int, SocketChannel]:
        peers = {p: listeners[p].address for p in range(3) if p != me}
        names = {p: f"{me}-{p}" for p in peers}
        limits = {p: 1 + p + me for p in peers}
        return open_channels(listeners[me], me, peers, 0, "run", limits, WAIT_S, names)

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


# Which socket.


def test_a_peer_elsewhere_is_reached_over_tcp_and_so_is_one_without_its_unix_socket() -> None:
    """One direction finds nobody at the name it was given, the other was told of another machine."""
    with SocketListener(HOST) as first, SocketListener(HOST) as second:
        assert first.address.unix != second.address.unix
        gone = first.address._replace(unix="@raypipe-nobody")
        elsewhere = second.address._replace(machine="")
        ends = together(
            lambda: open_channels(first, 0, {1: elsewhere}, 0, "run", 1, WAIT_S),
            lambda: open_channels(second, 1, {0: gone}, 0, "run", 1, WAIT_S),
        )
    assert ends[0][1].kinds == ends[1][0].kinds == ("tcp", "tcp")  # type: ignore[index]
    ends[0][1].send(f(0), (torch.ones(1),))  # type: ignore[index]
    assert len(ends[1][0].recv(f(0), WAIT_S)) == 1  # type: ignore[index]
    close(*ends)


# Which port.


def test_ports_of_a_range_are_taken_until_none_is_left() -> None:
    with SocketListener(HOST) as probe:
        low = probe.address.port
    made: list[SocketListener] = []

    def take_all() -> None:
        for _ in range(4):  # somebody else may hold one of them
            made.append(SocketListener(HOST, ports=(low, low + 2)))

    try:
        with pytest.raises(LinkError) as caught:
            take_all()
        taken = [each.address.port for each in made]
        assert set(taken) <= {low, low + 1, low + 2}
        assert taken
        assert f"{low} to {low + 2}" in str(caught.value)
        assert "link_ports" in str(caught.value)
        made.pop().close()
        made.append(SocketListener(HOST, ports=(low, low + 2)))
        assert made[-1].address.port == taken[-1]
    finally:
        for each in made:
            each.close()


CHALLENGE_BYTES = 16


class Cut:
    """Passes connections on, and resets both halves of as many as asked when their welcome comes."""

    def __init__(self, target: tuple[str, int], resets: int) -> None:
        self._target, self._resets = target, resets
        self.reset = threading.Event()
        self._door = socket.create_server((HOST, 0))
        self.address = Address(HOST, self._door.getsockname()[1])
        self._open = [self._door]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._door.accept()
                far = socket.create_connection(self._target)
                self._open += [near, far]
                threading.Thread(target=self._pass, args=(near, far), daemon=True).start()
                threading.Thread(target=self._answer, args=(far, near), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 16):
                sink.sendall(part)

    def _answer(self, far: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            near.sendall(far.recv(CHALLENGE_BYTES, socket.MSG_WAITALL))
            welcome = far.recv(1 << 16)
            if welcome and self._resets > 0:
                self._resets -= 1
                for half in (far, near):
                    half.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    half.shutdown(socket.SHUT_RD)  # wakes the thread that reads it, which holds it open
                    half.close()
                self.reset.set()
                return
            near.sendall(welcome)
            self._pass(far, near)

    def close(self) -> None:
        """End all that is passed on."""
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@pytest.fixture
def listeners() -> Iterator[list[SocketListener]]:
    """Three that take TCP alone."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(SocketListener(HOST, unix=False)) for _ in range(3)]


def entered(listeners: list[SocketListener], me: int, peers: dict[int, Address]) -> dict[int, SocketChannel]:
    return open_channels(listeners[me], me, peers, 0, "run", 1, WAIT_S, secret=b"secret")


def test_a_peer_that_has_left_is_not_waited_for_until_the_deadline(
    listeners: list[SocketListener], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 said its welcome and has all its links; worker 0, which never heard it, says so long before WAIT_S."""
    monkeypatch.setattr(tcp, "DOUBT_S", 0.3)
    places = [listener.address for listener in listeners]
    cut = Cut((places[1].host, places[1].port), resets=1_000_000)
    try:
        caller = Failing(lambda: entered(listeners, 0, {1: cut.address}))
        (left,) = together(lambda: entered(listeners, 1, {0: places[0]}))
        assert "from worker 0 to worker 1 was reset" in str(caller.result())
        with pytest.raises(LinkError):  # and who took the link for open hears of it
            left[0].recv(f(0), WAIT_S)  # type: ignore[index]
        close(left)
    finally:
        cut.close()


def test_a_peer_that_is_still_opening_its_links_proves_itself_again(listeners: list[SocketListener]) -> None:
    """Worker 1 waits for worker 2, which comes after the reset: it takes worker 0's second connection for the first."""
    places = [listener.address for listener in listeners]
    cut = Cut((places[1].host, places[1].port), resets=1)

    def late() -> dict[int, SocketChannel]:
        assert cut.reset.wait(WAIT_S)
        return entered(listeners, 2, {1: places[1]})

    try:
        zero, one, two = together(
            lambda: entered(listeners, 0, {1: cut.address}),
            lambda: entered(listeners, 1, {0: places[0], 2: places[2]}),
            late,
        )
        zero[1].send(f(0), (torch.ones(3),))  # type: ignore[index]
        assert one[0].recv(f(0), WAIT_S)[0].tolist() == [1.0, 1.0, 1.0]  # type: ignore[index]
        close(zero, one, two)
    finally:
        cut.close()
