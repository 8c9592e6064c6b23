"""Asking again for a damaged message, on one direction of a checked link over sockets.

    sender                                              receiver
      | message 4, 5, 6 ==============================> |   4 is well, 5 is damaged
      | <---------------------------- note: taken, to 5 |
      | <--------------------- note: again, from 5, mark |  what comes before the mark is dropped
      | mark, message 5, 6, 7 ========================> |

Notes take the way back of the connection, where the reason of an abort may follow them. The sender keeps the buffers
of a message until the receiver has taken it, which is one trip later; the kernel's buffers bound what is under way.
Where a damaged header hides its payload's size, the mark is where the receiver finds the beginning of a message again:
16 random bytes that it chose itself.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import xxhash

from raypipe.engine.messages import checked_frame
from raypipe.engine.messages.frame import Frame
from raypipe.errors import LinkError

__all__ = ["MARK_BYTES", "Kept", "Note", "Taken", "WayBack"]

MARK_BYTES = 16
TAKEN, AGAIN = 1, 2
"""Kinds of notes; no reason begins with one of these bytes."""

_NOTE = struct.Struct(f"<BQ{MARK_BYTES}s")
_SUM = struct.Struct("<Q")
_NOTE_BYTES = _NOTE.size + _SUM.size
_READ_BYTES = 4096


class Note(NamedTuple):
    """What the receiver says of the messages below ``number``: TAKEN, or AGAIN for those from there on."""

    kind: int
    number: int
    mark: bytes = bytes(MARK_BYTES)

    def pack(self) -> bytes:
        packed = _NOTE.pack(*self)
        return packed + _SUM.pack(xxhash.xxh3_64_intdigest(packed))

    @classmethod
    def unpack(cls, packed: bytes) -> Note:
        """Raises: LinkError where it is damaged; it is not asked for again."""
        if xxhash.xxh3_64_intdigest(packed[: _NOTE.size]) != _SUM.unpack_from(packed, _NOTE.size)[0]:
            raise LinkError("a note of the peer came damaged: its checksum differs.")
        return cls(*_NOTE.unpack_from(packed))


class WayBack:
    """The sender's end of a connection's way back: notes, and behind them the reason of an abort. From any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._unread = b""
        self.ended = False

    def read(self) -> list[Note]:
        """The notes that have come whole; waits for nothing.

        Raises:
            LinkError: one of them is damaged.
        """
        with self._lock:
            self._read_all()
            notes = []
            while self._unread[:1] in (b"\1", b"\2") and len(self._unread) >= _NOTE_BYTES:
                notes.append(Note.unpack(self._unread[:_NOTE_BYTES]))
                self._unread = self._unread[_NOTE_BYTES:]
            return notes

    def reason(self) -> str | None:
        """The reason of an abort, once it has come."""
        with self._lock:
            self._read_all()
            rest = self._unread
            while rest[:1] in (b"\1", b"\2"):
                rest = rest[_NOTE_BYTES:]
            return rest.decode(errors="replace") or None

    def _read_all(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while not self.ended:
                try:
                    part = self._sock.recv(_READ_BYTES, socket.MSG_DONTWAIT)
                except ConnectionError:
                    part = b""
                self.ended = not part
                self._unread += part


class Kept:
    """Messages that were sent and that the receiver has not yet taken; the sending thread adds, another one hears."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: deque[tuple[int, bytes, list[memoryview]]] = deque()
        self._sent = 0
        self._asked: Note | None = None
        self._ended = False

    def add(self, message: Frame) -> bytes:
        """Keep a message; its header with its seal."""
        header = checked_frame.sealed(message, self._sent)
        with self._changed:
            self._messages.append((self._sent, header, message.buffers))
            self._sent += 1
        return header

    def hear(self, notes: Iterable[Note]) -> bool:
        """Note what the receiver says; whether it asks for messages again.

        Raises:
            LinkError: for one that it has taken, or that was never sent.
        """
        with self._changed:
            for note in notes:
                while self._messages and self._messages[0][0] < note.number:
                    self._messages.popleft()
                if note.kind == AGAIN:
                    if not self._messages or self._messages[0][0] != note.number:
                        raise LinkError(f"the peer asks again for message {note.number}, which is not under way.")
                    self._asked = note
            self._changed.notify_all()
            return self._asked is not None

    def take_asked(self) -> Note | None:
        """The newest note AGAIN that nobody has answered yet."""
        with self._changed:
            asked, self._asked = self._asked, None
            return asked

    def since(self, number: int) -> list[tuple[bytes, list[memoryview]]]:
        """Headers and buffers of the messages from ``number`` on."""
        with self._changed:
            return [(header, buffers) for at, header, buffers in self._messages if at >= number]

    def settle(self) -> bool:
        """Wait until all is taken or nothing more can be heard; False where messages are asked for again before."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._asked is not None or not self._messages)
            return self._asked is None or self._ended

    def end(self) -> None:
        """Nothing more will be heard."""
        with self._changed:
            self._ended = True
            self._messages.clear()
            self._changed.notify_all()


class Taken:
    """The receiver's count of one direction, and its notes."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._asked = -1
        self.number = 0
        """Of the message that comes next."""

    def take(self) -> None:
        """One more message came well."""
        self.number += 1
        self._say(Note(TAKEN, self.number))

    def ask_again(self, said: str) -> bytes:
        """Ask for the message that came damaged and all behind it; the mark that will stand before it.

        Args:
            said: what it is called, for messages to people.

        Raises:
            LinkError: it was asked for before.
        """
        if self._asked == self.number:
            raise LinkError(
                f"{said} came damaged twice: its checksum differs from its sender's. Something between the two hosts "
                "changes bits; look at their network cards and memory."
            )
        self._asked = self.number
        mark = secrets.token_bytes(MARK_BYTES)
        self._say(Note(AGAIN, self.number, mark))
        return mark

    def _say(self, note: Note) -> None:
        packed = note.pack()
        try:
            said = self._sock.send(packed, socket.MSG_DONTWAIT)
        except BlockingIOError:
            said = 0
        if said != len(packed):
            raise LinkError("the peer does not read what is said of its messages.")
