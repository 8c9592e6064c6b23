"""ObjectStoreChannel: one worker's end of a link whose messages are Ray's calls. See object_store.py.

A message is a call whose arguments are bytes that ride in the call itself, or one numpy array, which Ray puts into the
store. Ray pickles every argument but bytes. Processor time per message over all processes: 64 KiB as bytes 2.2 ms,
256 KiB 2.4; as an array in the store 5 ms; at 1 MiB 7.8 against 10.2, at 2 MiB 15.6 against 9.6. Ray hands arrays over
read-only. The receiver copies, because a stage may write to its inputs in place, and because a view would pin the
object. Nobody keeps a reference after that, so a link holds at most ``WINDOW_BYTES`` of the store in each direction,
and what Ray's batches of deletions (one per second) have not yet reached.

On a checked link every message asks for its answer, and its bytes are kept until it comes: "taken", or "again" where it
came damaged. Messages may come in any order, so one that is sent again holds up no other.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError

from raypipe.engine.codec.host import one_core
from raypipe.engine.messages import checked_frame, frame
from raypipe.errors import LinkError
from raypipe.runtime.links.queued_channel import CLOSE_TIMEOUT_S, QueuedChannel
from raypipe.runtime.links.window import Window

__all__ = ["Letter", "Link", "ObjectStoreChannel", "first_line"]

ASKED_EVERY = 4
"""Of so many messages that ride, one asks for an answer, for all: an answer costs 0.4 ms of processor time."""
PIECE_BYTES = 96 << 10
"""Ray puts an argument of more than 100 KiB into the store."""
RIDING_BYTES = 1 << 20
"""A call with more than 10 MiB of small arguments would not keep them either."""
_LINK = struct.Struct("<16sQIII?")


class Link(NamedTuple):
    """Which link, seen from its sender."""

    run: bytes
    generation: int
    sender: int
    receiver: int
    max_tensors: int

    def pack(self, *, checked: bool = False) -> bytes:
        """As a message says it, which goes without pickle; and whether the message has a seal."""
        return _LINK.pack(*self, checked)

    @classmethod
    def unpack(cls, packed: object) -> tuple[Link, bool] | None:
        """None for anything that ``pack`` does not make."""
        if not isinstance(packed, bytes) or len(packed) != _LINK.size:
            return None
        *link, checked = _LINK.unpack(packed)
        return cls(*link), checked


class Letter(NamedTuple):
    """What one actor says to another about a link, messages apart.

    ``kind`` is hello, goodbye or abort. ``number`` is that of messages before a goodbye, which calls may overtake.
    """

    kind: str
    link: Link
    reason: str | None = None
    number: int = 0


class _Sent(NamedTuple):
    """A message on a checked link until its answer comes."""

    name: str
    data: bytes
    again: bool = False


class ObjectStoreChannel(QueuedChannel):
    """See the Channel protocol. ``ObjectStoreEndpoint.open`` makes it.

    Args:
        name: for messages to people.
        link: of this end.
        peer: handle of the other end's actor.
        checked: what this end sends carries checksums; the other end need not be told.
    """

    def __init__(self, name: str, link: Link, peer: Any, *, checked: bool = False) -> None:
        super().__init__(name, link.generation, link.max_tensors)
        self.link = link
        self._checked = checked
        self._packed_link = link.pack(checked=checked)
        self._again: deque[_Sent] = deque()
        self.ended = threading.Event()
        self._peer = peer
        self._window = Window()
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
        if self._checked:
            head = frame.parse(message.header, generation=self.generation, max_tensors=self.max_tensors)
            data = b"".join((checked_frame.sealed(message, self._sent), *message.buffers))
            self._sent += self._send_checked(_Sent(head.action.words, data))
            return
        data = b"".join((message.header, *message.buffers))
        self._unasked, self._unasked_bytes = self._unasked + 1, self._unasked_bytes + len(data)
        if len(data) > RIDING_BYTES or self._unasked == ASKED_EVERY:
            sent = self._ask(self._peer.link_asked, self._packed_link, *_pieces(data))
        elif sent := self._window.open:
            self._call(self._peer.link_message, self._packed_link, *_pieces(data))
        self._sent += sent

    def _send_checked(self, sent: _Sent) -> bool:
        """Send a message whose answer says whether it came undamaged; False when the link has ended."""
        self._unasked, self._unasked_bytes = 1, len(sent.data)
        return self._ask(self._peer.link_asked, self._packed_link, *_pieces(sent.data), kept=sent)

    def attend(self) -> None:
        """Send again what came damaged."""
        while self._again:
            self._send_checked(self._again.popleft()._replace(again=True))

    def goodbye(self, reason: str | None) -> None:
        self._unasked += 1
        if self._ask(self._peer.link_goodbye, Letter("goodbye", self.link, reason, self._sent)):
            self._window.drain(CLOSE_TIMEOUT_S)
            while self._again:
                self.attend()
                self._window.drain(CLOSE_TIMEOUT_S)

    def _ask(self, method: Any, *arguments: object, kept: _Sent | None = None) -> bool:
        """Make a call whose answer is for everything since the last such call; False when the link has ended."""
        asked = (self._unasked, self._unasked_bytes)
        self._unasked = self._unasked_bytes = 0
        if not self._window.enter(*asked):
            return False
        self._call(method, *arguments).future().add_done_callback(partial(self._taken, *asked, kept))
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

    def _taken(self, messages: int, nbytes: int, kept: _Sent | None, answer: Future[str]) -> None:
        error = answer.exception()
        if error is None and answer.result() == "again" and kept is not None:
            self._ask_heard(kept)
        self._window.leave(messages, nbytes)
        if isinstance(error, RayTaskError):
            self.fail(LinkError(f"{self.name}: the peer could not take a message: {first_line(error.cause)}."))
        elif error is not None:
            self._peer_died(error)
        elif answer.result() == "gone":
            self.lost(LinkError(f"{self.name}: the peer closed the link."))

    def _ask_heard(self, kept: _Sent) -> None:
        """The peer asks for a message again, which it may once."""
        if kept.again:
            told = f"{kept.name} came damaged twice: its checksum differs from its sender's. Something between the two "
            told += "hosts changes bits; look at their network cards and memory."
            self.fail(LinkError(f"{self.name}: {told}"), tell_peer=told)
            return
        self._again.append(kept)
        self.wake()

    def _watch_ended(self, answer: Future[None]) -> None:
        error = answer.exception()
        if error is not None and not self.shut:
            self._peer_died(error)

    def _peer_died(self, error: BaseException) -> None:
        """What came whole may still be taken."""
        died = "died" if isinstance(error, RayActorError) else "cannot be reached"
        self.fail(LinkError(f"{self.name}: the peer {died}: {first_line(error)}"), keep=True)

    # The actor's threads.

    def receive(self, pieces: Sequence[object], *, checked: bool = False) -> str:
        """Take a message: "taken", or "again" where its seal tells damage; all else that is wrong ends the link."""
        try:
            if not self._take(pieces, checked=checked):
                self.damaged += 1
                return "again"
        except LinkError as error:
            self.fail(LinkError(f"{self.name}: {error}"), tell_peer=str(error))
        except Exception as error:  # noqa: BLE001  (no memory for it, say; the caller of most messages hears nothing)
            self.fail(LinkError(f"{self.name}: receiving failed: {error!r}"), tell_peer=repr(error))
        self._count(1)
        return "taken"

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

    def _take(self, pieces: Sequence[object], *, checked: bool) -> bool:
        """False where it came damaged."""
        arrived_at_s = time.time()
        start = frame.header_bytes(self.max_tensors)
        body = start + checked_frame.SEAL_BYTES * checked
        arrays = [_array(piece) for piece in pieces]
        if not arrays or arrays[0].size < body:
            raise LinkError("something came that is not a message.")
        header = arrays[0][:body].tobytes()
        arrays[0] = arrays[0][body:]
        if checked and not _undamaged(header, arrays):
            return False
        head = frame.parse(header[:start], generation=self.generation, max_tensors=self.max_tensors)
        came_bytes = sum(array.size for array in arrays)
        if came_bytes != head.payload_bytes:
            raise LinkError(f"{head.action.words} announced {head.payload_bytes} bytes, {came_bytes} came.")
        if head.generation < self.generation:
            return True
        one_core()
        payload = torch.empty(head.payload_bytes, dtype=torch.uint8)
        np.concatenate(arrays, out=payload.numpy())
        self.deliver(head, frame.decode(head, payload, coded=self.coded), arrived_at_s)
        return True


def _undamaged(header: bytes, payload: Sequence[np.ndarray]) -> bool:
    sealed = checked_frame.opened(header)
    return sealed is not None and checked_frame.checksum([array.data for array in payload]) == sealed.payload_checksum


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
