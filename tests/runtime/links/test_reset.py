"""Links that a TCP reset hits in the middle of their handshake: opened again, or said to be lost. Needs no Ray."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
import torch

from raypipe.errors import LinkError
from raypipe.runtime.links import tcp
from raypipe.runtime.links.addresses import Address
from raypipe.runtime.links.tcp import SocketChannel, SocketListener
from tests.contract.channel import WAIT_S, Failing, f
from tests.runtime.links.ends import HOST, close, open_channels, together

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
