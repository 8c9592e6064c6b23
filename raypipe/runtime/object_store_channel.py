"""ObjectStoreChannel: one worker's end of a link whose messages are objects in Ray's store. See object_store.py.

A message is a call whose arguments are numpy arrays: one, which Ray puts into the store, or a few small ones, which
ride in the call itself. Up to ``RIDING_BYTES`` the store would cost more than the way: at 256 KiB 5.5 ms of processor
time over all processes, against 3.7; at 4 KiB 5.6 against 2.6; at 1 MiB 6.7 against 9.6. Ray hands arrays over
read-only. The receiver copies, because a stage may write to its inputs in place, and because a view would pin the
object. Nobody keeps a reference after that, so a link holds at most ``WINDOW_BYTES`` of the store in each direction,
and what Ray's batches of deletions (one per second) have not yet reached.
"""

from __future__ import annotations

import contextlib
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
from raypipe.runtime.queued_channel import CLOSE_TIMEOUT_S, QueuedChannel

__all__ = ["Letter", "Link", "ObjectStoreChannel", "first_line"]

WINDOW_BYTES = 64 << 20
WINDOW_MESSAGES = 8
PIECE_BYTES = 96 << 10
"""Ray puts an argument of more than 100 KiB into the store."""
RIDING_BYTES = 512 << 10
"""A call with more than 10 MiB of small arguments would not keep them either."""


class Link(NamedTuple):
    """Which link, seen from its sender."""

    run: bytes
    generation: int
    sender: int
    receiver: int
    max_tensors: int


class Letter(NamedTuple):
    """What one actor says to another about a link.

    ``kind`` is hello, message, goodbye or abort. ``number`` is that of messages before a goodbye, which calls may
    overtake.
    """

    kind: str
    link: Link
    reason: str | None = None
    number: int = 0


class _Window:
    """Messages and bytes under way in one direction: a sender waits for room."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages = self._bytes = 0
        self._open = True

    def enter(self, nbytes: int) -> bool:
        """Wait for room; False when the window was closed. A message larger than the window goes alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open or self._room(nbytes))
            self._messages, self._bytes = self._messages + 1, self._bytes + nbytes
            return self._open

    def leave(self, nbytes: int) -> None:
        with self._changed:
            self._messages, self._bytes = self._messages - 1, self._bytes - nbytes
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> None:
        """Wait until nothing is under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open or self._messages == 0, timeout_s)

    def close(self) -> None:
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def _room(self, nbytes: int) -> bool:
        return self._messages == 0 or (self._messages < WINDOW_MESSAGES and self._bytes + nbytes <= WINDOW_BYTES)


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
        self.ended = threading.Event()
        self._peer = peer
        self._window = _Window()
        self._sent = self._received = 0
        self._goodbye: Letter | None = None
        self._counting = threading.Lock()
        self.start()

    def watch(self) -> None:
        """Hear of the peer's death, however idle the link is."""
        self._peer.link_watch.remote(self.link).future().add_done_callback(self._watch_ended)

    # The sending thread.

    def transmit(self, message: frame.Frame) -> None:
        array = _pack(message)
        if self._window.enter(array.nbytes):
            self._post(Letter("message", self.link), array.nbytes, _pieces(array))
            self._sent += 1

    def goodbye(self, reason: str | None) -> None:
        if self._window.enter(0):
            self._post(Letter("goodbye", self.link, reason, self._sent), 0)
            self._window.drain(CLOSE_TIMEOUT_S)

    def _post(self, letter: Letter, nbytes: int, pieces: Sequence[np.ndarray] = ()) -> None:
        try:
            reply = self._peer.link_deliver.remote(letter, *pieces)
        except RayError as error:
            raise ConnectionError(first_line(error)) from error
        reply.future().add_done_callback(partial(self._taken, nbytes))

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

    def _taken(self, nbytes: int, answer: Future[str]) -> None:
        self._window.leave(nbytes)
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

    def receive(self, letter: Letter, pieces: Sequence[object]) -> None:
        """Take a message or the goodbye; whatever is wrong with it ends the link on both sides."""
        if letter.kind == "message":
            try:
                self._take(pieces)
            except LinkError as error:
                self.fail(LinkError(f"{self.name}: {error}"), tell_peer=str(error))
            except (RuntimeError, MemoryError) as error:  # no memory for it
                self.fail(LinkError(f"{self.name}: receiving failed: {error!r}"), tell_peer=repr(error))
        with self._counting:
            if letter.kind == "message":
                self._received += 1
            else:
                self._goodbye = letter
            complete = self._goodbye is not None and self._goodbye.number == self._received
        if complete and self._goodbye is not None:
            self.peer_ended(self._goodbye.reason)

    def _take(self, pieces: Sequence[object]) -> None:
        arrived_at_s = time.time()
        start = frame.header_bytes(self.max_tensors)
        arrays = [piece for piece in pieces if isinstance(piece, np.ndarray) and piece.dtype == np.uint8]
        if len(arrays) < max(1, len(pieces)) or arrays[0].size < start or any(array.ndim != 1 for array in arrays):
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


def _pack(message: frame.Frame) -> np.ndarray:
    """Header and payload as one array."""
    array = np.empty(len(message.header) + message.payload_bytes, np.uint8)
    start = 0
    for buffer in (memoryview(message.header), *message.buffers):
        part = np.frombuffer(buffer, np.uint8)
        array[start : start + part.size] = part
        start += part.size
    return array


def _pieces(array: np.ndarray) -> list[np.ndarray]:
    """What the call that carries this message gets as arguments."""
    if array.nbytes > RIDING_BYTES:
        return [array]
    return [array[start : start + PIECE_BYTES] for start in range(0, array.nbytes, PIECE_BYTES)]


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [repr(error)])[0]
