"""Unwanted connections to the ports of workers: garbage, silence, wrong secrets and replayed handshakes.

They use the run's name and the greetings of its workers, as an attacker who reads the network could. A replay is a
greeting under the right secret, whose proof answers the challenge of an earlier connection.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
from collections import Counter, deque
from collections.abc import Sequence

from raypipe.runtime.transport.handshake import LinkIdentity, call

__all__ = ["KINDS", "Strangers"]

KINDS = ("garbage", "silence", "wrong secret", "replay")


class Strangers:
    """Source of unwanted connections, which one thread makes.

    Args:
        ports: (host, port) of the workers' listeners.
        hellos: greetings of the run's workers.
        secret: secret of the run, for replayed handshakes.
        seed: seed of the random choices.
        open_at_once: number of connections that are held open; the oldest is closed for a new one.
    """

    def __init__(
        self,
        ports: Sequence[tuple[str, int]],
        hellos: Sequence[LinkIdentity],
        secret: bytes,
        seed: int,
        open_at_once: int = 200,
    ) -> None:
        self._ports, self._hellos, self._secret = ports, hellos, secret
        self._dice = random.Random(seed)
        self._open: deque[socket.socket] = deque()
        self._open_at_once = open_at_once
        self.tried: Counter[str] = Counter()
        """Connections that were tried, by kind."""
        self.connected = 0
        """Number of connections that were accepted at once; the others found the listener's queue full."""

    def visit(self, count: int) -> None:
        """Make ``count`` further connections."""
        for _ in range(count):
            kind = self._dice.choice(KINDS)
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(self._dice.choice(self._ports))
            with contextlib.suppress(OSError):  # not connected yet
                sock.getpeername()
                self.connected += 1
                sock.send(self._words(kind))
            self.tried[kind] += 1
            self._open.append(sock)
            if len(self._open) > self._open_at_once:
                self._open.popleft().close()

    def leave(self) -> None:
        while self._open:
            self._open.popleft().close()

    def _words(self, kind: str) -> bytes:
        if kind == "silence":
            return b""
        if kind == "garbage":
            return self._dice.randbytes(self._dice.randrange(1, 200))
        secret = self._secret if kind == "replay" else b"a guess"
        conversation = call(self._dice.choice(self._hellos), secret)
        greeting = next(conversation).message
        return greeting + conversation.send(secrets.token_bytes(16)).message
