"""Strangers at the ports where workers listen for each other: garbage, silence, wrong secrets, replayed handshakes.

They know more than strangers do: the run's name and the greetings of its workers, as if they had listened on the
network. A replay is what a worker once said: a greeting with the proof of its own connection's challenge, under the
right secret.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
from collections import Counter, deque
from collections.abc import Sequence

from raypipe.runtime.links.handshake import Hello, call

__all__ = ["KINDS", "Strangers"]

KINDS = ("garbage", "silence", "wrong secret", "replay")


class Strangers:
    """A crowd of them, from one thread.

    Args:
        ports: (host, port) of the listeners.
        hellos: greetings of the run's workers.
        secret: of the run, which the replayed handshakes were made with.
        seed: of their choices.
        open_at_once: connections that they hold; the oldest is closed for a new one.
    """

    def __init__(
        self,
        ports: Sequence[tuple[str, int]],
        hellos: Sequence[Hello],
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
        """Of those, the ones that the other end's system accepted at once; others wait in vain for its full queue."""

    def visit(self, count: int) -> None:
        """So many connections more."""
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
        greeting = next(conversation).say
        return greeting + conversation.send(secrets.token_bytes(16)).say
