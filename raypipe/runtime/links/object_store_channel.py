"""ObjectStoreChannel: one worker's end of a link whose messages are Ray's calls. See object_store.py.

A message is a call whose arguments are bytes that ride in the call itself, or one numpy array, which Ray puts into the
store. Ray pickles every argument but bytes. Processor time per message over all processes: 64 KiB as bytes 2.2 ms,
256 KiB 2.4; as an array in the store 5 ms; at 1 MiB 7.8 against 10.2, at 2 MiB 15.6 against 9.6. Ray hands arrays over
read-only. The receiver copies, because a stage may write to its inputs in place, and because a view would pin the
object. Nobody keeps a reference after that, so a link holds at most ``WINDOW_BYTES`` of the store in each direction,
and what Ray's batches of deletions (one per second) have not yet reached.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError

from raypipe.engine import frame
from raypipe.engine.codec.host import one_core
from raypipe.errors import LinkError
from raypipe.runtime.links.queued_channel import CLOSE_TIMEOUT_S, QueuedChannel

__all__ = ["Letter", "Link", "ObjectStoreChannel", "first_line"]

WINDOW_BYTES = 64 << 20
WINDOW_MESSAGES = 8
ASKED_EVERY = 4
"""Of so many messages that ride, one asks for an answer, for all: an answer costs 0.4 ms of processor time."""
PIECE_BYTES = 96 << 10
"""Ray puts an argument of more than 100 KiB into the store."""
RIDING_BYTES = 1 << 20
"""A call with more than 10 MiB of small arguments would not keep them either."""
_LINK = struct.Struct("<16sQIII")


class Link(NamedTuple):
    """Which link, seen from its sender."""

    run: bytes
    generation: int
    sender: int
    receiver: int
    max_tensors: int

    def pack(self) -> bytes:
        """As a message says it, which goes without pickle."""
        return _LINK.pack(*self)

    @classmethod
    def unpack(cls, packed: object) -> Link | None:
        """None for anything that ``pack`` does not make."""
        return cls(*_LINK.unpack(packed)) if isinstance(packed, bytes) and len(packed) == _LINK.size else None


class Letter(NamedTuple):
    """What one actor says to another about a link, messages apart.

    ``kind`` is hello, goodbye or abort. ``number`` is that of messages before a goodbye, which calls may overtake.
    """

    kind: str
    link: Link
    reason: str | None = None
    number: int = 0


class _Window:
    """Messages and bytes under way in one direction that an answer is to come for: a sender waits for room."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages = self._bytes = 0
        self._open = True

    @property
    def open(self) -> bool:
        return self._open

    def enter(self, messages: int, nbytes: int) -> bool:
        """Wait for room; False when the window was closed. What is larger than the window goes alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open or self._room(messages, nbytes))
            self._messages, self._bytes = self._messages + messages, self._bytes + nbytes
            return self._open

    def leave(self, messages: int, nbytes: int) -> None:
        with self._changed:
            self._messages, self._bytes = self._messages - messages, self._bytes - nbytes
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> None:
        """Wait until nothing is under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open or self._messages == 0, timeout_s)

    def close(self) -> None:
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def _room(self, messages: int, nbytes: int) -> bool:
        many = self._messages + messages > WINDOW_MESSAGES or self._bytes + nbytes > WINDOW_BYTES
        return self._messages == 0 or not many


class ObjectStoreChannel(QueuedChannel):
    """See the Channel protocol. ``ObjectStoreEndpoint.open`` makes it.

    Args:
        name: for messages to people.
        link: of this end.
        peer: handle of the other end's actor.
    """

    def __init__(self, name: str, link: Link, peer: Any) -> None:
        super().__init__(name, link.generation, link.max_tensors)
        self.link = link
        self._packed_link = link.pack()
        self.ended = threading.Event()
        self._peer = peer
        self._window = _Window()
        self._sent = self._received = 0
        self._unasked, self._unasked_bytes = 0, 0
        self._goodbye: Letter | None = None
        self._counting = threading.Lock()
        self.start()

    def watch(self) -> None:
        """Hear of the peer's death, however idle the link is."""
        self._peer.link_watch.remote(self.link).future().add_done_callback(self._watch_ended)

    # The sending thread.

    def transmit(self, message: frame.Frame) -> None:
        data = b"".join((message.header, *message.buffers))
        self._unasked, self._unasked_bytes = self._unasked + 1, self._unasked_bytes + len(data)
        if len(data) > RIDING_BYTES or self._unasked == ASKED_EVERY:
            sent = self._ask(self._peer.link_asked, self._packed_link, *_pieces(data))
        elif sent := self._window.open:
            self._call(self._peer.link_message, self._packed_link, *_pieces(data))
        self._sent += sent

    def goodbye(self, reason: str | None) -> None:
        self._unasked += 1
        if self._ask(self._peer.link_goodbye, Letter("goodbye", self.link, reason, self._sent)):
            self._window.drain(CLOSE_TIMEOUT_S)

    def _ask(self, method: Any, *arguments: object) -> bool:
        """Make a call whose answer is for everything since the last such call; False when the link has ended."""
        asked = (self._unasked, self._unasked_bytes)
        self._unasked = self._unasked_bytes = 0
        if not self._window.enter(*asked):
            return False
        self._call(method, *arguments).future().add_done_callback(partial(self._taken, *asked))
        return True

    def _call(self, method: Any, *arguments: object) -> Any:
        try:
            return method.remote(*arguments)
        except RayError as error:
            raise ConnectionError(first_line(error)) from error

    # Any thread.

    def interrupt(self, reason: str | None) -> None:
        self._window.close()
        self.ended.set()
        if reason is not None:
            with contextlib.suppress(RayError):
                self._peer.link_notify.remote(Letter("abort", self.link, reason))

    def release(self) -> None:
        """Nothing is left to give back: the thread has ended, references went with their messages."""

    # Ray's thread for answers.

    def _taken(self, messages: int, nbytes: int, answer: Future[str]) -> None:
        self._window.leave(messages, nbytes)
        error = answer.exception()
        if isinstance(error, RayTaskError):
            self.fail(LinkError(f"{self.name}: the peer could not take a message: {first_line(error.cause)}."))
        elif error is not None:
            self._peer_died(error)
        elif answer.result() == "gone":
            self.lost(LinkError(f"{self.name}: the peer closed the link."))

    def _watch_ended(self, answer: Future[None]) -> None:
        error = answer.exception()
        if error is not None and not self.shut:
            self._peer_died(error)

    def _peer_died(self, error: BaseException) -> None:
        """What came whole may still be taken."""
        died = "died" if isinstance(error, RayActorError) else "cannot be reached"
        self.fail(LinkError(f"{self.name}: the peer {died}: {first_line(error)}"), keep=True)

    # The actor's threads.

    def receive(self, pieces: Sequence[object]) -> None:
        """Take a message; whatever is wrong with it ends the link on both sides."""
        try:
            self._take(pieces)
        except LinkError as error:
            self.fail(LinkError(f"{self.name}: {error}"), tell_peer=str(error))
        except Exception as error:  # noqa: BLE001  (no memory for it, say; the caller of most messages hears nothing)
            self.fail(LinkError(f"{self.name}: receiving failed: {error!r}"), tell_peer=repr(error))
        self._count(1)

    def receive_goodbye(self, letter: Letter) -> None:
        """The peer sends no more, once everything before it is here."""
        self._count(0, letter)

    def _count(self, messages: int, goodbye: Letter | None = None) -> None:
        with self._counting:
            self._received += messages
            self._goodbye = self._goodbye or goodbye
            complete = self._goodbye is not None and self._goodbye.number == self._received
        if complete and self._goodbye is not None:
            self.peer_ended(self._goodbye.reason)

    def _take(self, pieces: Sequence[object]) -> None:
        arrived_at_s = time.time()
        start = frame.header_bytes(self.max_tensors)
        arrays = [_array(piece) for piece in pieces]
        if not arrays or arrays[0].size < start:
            raise LinkError("something came that is not a message.")
        head = frame.parse(arrays[0][:start].tobytes(), generation=self.generation, max_tensors=self.max_tensors)
        arrays[0] = arrays[0][start:]
        came_bytes = sum(array.size for array in arrays)
        if came_bytes != head.payload_bytes:
            raise LinkError(f"{head.action} announced {head.payload_bytes} bytes, {came_bytes} came.")
        if head.generation < self.generation:
            return
        one_core()
        payload = torch.empty(head.payload_bytes, dtype=torch.uint8)
        np.concatenate(arrays, out=payload.numpy())
        self.inbox.deliver(head, frame.decode(head, payload), arrived_at_s)


def _pieces(data: bytes) -> Sequence[bytes | np.ndarray]:
    """What the call that carries this message gets as arguments."""
    if len(data) > RIDING_BYTES:
        return [np.frombuffer(data, np.uint8)]
    return [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]


def _array(piece: object) -> np.ndarray:
    """One argument of a message, as it came."""
    if isinstance(piece, bytes) and piece:
        return np.frombuffer(piece, np.uint8)
    if isinstance(piece, np.ndarray) and piece.dtype == np.uint8 and piece.ndim == 1:
        return piece
    raise LinkError("something came that is not a message.")


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [repr(error)])[0]
