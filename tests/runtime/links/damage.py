"""A network that changes bits: a socket whose messages leave with one bit turned over, where its plan says so."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterable
from typing import Any

from raypipe.runtime.links.again import MARK_BYTES

__all__ = ["DamagingSocket"]


class DamagingSocket(socket.socket):
    """Takes over a connected socket. SocketChannel gives every message to one ``sendmsg``.

    Attributes:
        choose: (first bit, end) of where a bit of a message is turned over, None for no damage; asked for every message
            before it leaves, and again where it is sent again.
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
        if len(sent) > MARK_BYTES and (where := self.choose(bytes(sent))) is not None:
            bit = self.rng.randrange(*where)
            sent[bit // 8] ^= 1 << bit % 8
            self.flipped.append(bit)
        self.sendall(sent)
        return len(sent)
