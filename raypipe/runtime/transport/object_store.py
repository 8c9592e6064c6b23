"""Links through Ray's object store: without ports or connections of our own, so that they work wherever Ray does.

    stage 0                                                   stage 1
    sending thread: header + payload = bytes, or an array
        | link_message(link, *pieces) ----------------------> group "links": copy out, inbox
        | link_message_acked(link, *pieces), every few messages ----> the same
        | <-------------------------------- "taken": the window has room, and the store can delete the objects
    link_notify(hello | goodbye | abort) -------------------> group "notices", which messages do not block
    link_watch(link), not answered while the link is open --> it fails if the other process dies

The actors call each other, without the driver. Ray controls access to actors: a run is as private as its cluster. Each
message costs some milliseconds.

A message is a call whose arguments are bytes within the call itself, or one numpy array, which Ray puts into the
store. Ray pickles every argument but bytes. Processor time per message over all processes: 64 KiB as bytes 2.2 ms,
256 KiB 2.4 ms; as an array in the store 5 ms; at 1 MiB 7.8 and 10.2 ms, at 2 MiB 15.6 and 9.6 ms. Arrays arrive
read-only. The receiver copies them, because a stage may write to its inputs in place, and because a view would pin the
object. No reference is kept after that, so a link holds at most ``WINDOW_BYTES`` of the store in each direction, plus
objects that Ray's deletion batches (one per second) have not removed yet.
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
import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from raypipe.engine.codec.host import one_core
from raypipe.engine.messages import checked_frame, frame
from raypipe.errors import LinkAbortedError, LinkError
from raypipe.runtime.transport.endpoint import LinkSetup, is_checked
from raypipe.runtime.transport.handshake import LinkIdentity, run_digest
from raypipe.runtime.transport.listener import machine
from raypipe.runtime.transport.queued_channel import CLOSE_TIMEOUT_S, QueuedChannel

WINDOW_BYTES = 64 << 20
WINDOW_MESSAGES = 8


class SendWindow:
    """Limit of the messages and bytes sent in one direction and not acknowledged yet; the sender waits for room."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages = self._bytes = 0
        self._open = True

    @property
    def open(self) -> bool:
        return self._open

    def enter(self, messages: int, nbytes: int) -> bool:
        """Wait for room for these messages, and count them; return False if the window is closed.

        Messages that are together larger than the window enter once it is empty.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._open or self._room(messages, nbytes))
            self._messages, self._bytes = self._messages + messages, self._bytes + nbytes
            return self._open

    def leave(self, messages: int, nbytes: int) -> None:
        with self._changed:
            self._messages, self._bytes = self._messages - messages, self._bytes - nbytes
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> None:
        """Wait until all messages are acknowledged, or the window is closed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open or self._messages == 0, timeout_s)

    def close(self) -> None:
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def _room(self, messages: int, nbytes: int) -> bool:
        many = self._messages + messages > WINDOW_MESSAGES or self._bytes + nbytes > WINDOW_BYTES
        return self._messages == 0 or not many


ACK_EVERY = 4
"""Number of messages sent as bytes for one acknowledgement, which costs 0.4 ms of processor time."""
PIECE_BYTES = 96 << 10
"""Size of one bytes argument: Ray puts arguments of more than 100 KiB into the store."""
RIDING_BYTES = 1 << 20
"""Largest message that is sent as bytes; Ray also stores small arguments of more than 10 MiB in total."""
_LINK = struct.Struct("<16sQIII?")


def packed_link(link: LinkIdentity, *, checked: bool = False) -> bytes:
    """Pack a link's identity, and a flag that is True for a message with checksums, into bytes, without pickle."""
    return _LINK.pack(*link, checked)


def unpacked_link(packed: object) -> tuple[LinkIdentity, bool] | None:
    """Unpack the result of ``packed_link`` to (identity, flag); return None if the argument is not of that form."""
    if not isinstance(packed, bytes) or len(packed) != _LINK.size:
        return None
    *link, checked = _LINK.unpack(packed)
    return LinkIdentity(*link), checked


class ControlMessage(NamedTuple):
    """Control message between two ends of a link: hello, goodbye or abort.

    Attributes:
        kind: "hello", "goodbye" or "abort".
        link: the link, seen from the sender of this message.
        reason: reason of a goodbye or an abort; None without one.
        number: number of messages sent before a goodbye, since calls of Ray may overtake each other.
    """

    kind: str
    link: LinkIdentity
    reason: str | None = None
    number: int = 0


class ObjectStoreChannel(QueuedChannel):
    """Channel through Ray's object store, made by ``ObjectStoreEndpoint.open``; see the Channel protocol.

    Args:
        link: identity of the link, seen from this end.
        peer: handle of the other end's actor.
        checked: True if messages of this end carry checksums; each message has this flag.
    """

    def __init__(self, name: str, link: LinkIdentity, peer: Any, *, checked: bool = False) -> None:
        super().__init__(name, frame.FrameFormat(link.generation, link.max_tensors))
        self.link = link
        self._checked = checked
        self._packed_link = packed_link(link, checked=checked)
        self.ended = threading.Event()
        self._peer = peer
        self._window = SendWindow()
        self._sent = self._received = 0
        self._unacked, self._unacked_bytes = 0, 0
        self._goodbye: ControlMessage | None = None
        self._counting = threading.Lock()
        self.start()

    def watch(self) -> None:
        """Make a call to the peer that fails when the peer dies, so that an idle link ends too."""
        self._peer.link_watch.remote(self.link).future().add_done_callback(self._watch_ended)

    # The sending thread.

    def transmit(self, message: frame.Frame) -> None:
        header = checked_frame.sealed(message) if self._checked else message.header
        data = b"".join((header, *message.buffers))
        self._unacked, self._unacked_bytes = self._unacked + 1, self._unacked_bytes + len(data)
        if len(data) > RIDING_BYTES or self._unacked == ACK_EVERY:
            sent = self._call_acked(self._peer.link_message_acked, self._packed_link, *_pieces(data))
        elif sent := self._window.open:
            self._call(self._peer.link_message, self._packed_link, *_pieces(data))
        self._sent += sent

    def goodbye(self, reason: str | None) -> None:
        self._unacked += 1
        if self._call_acked(self._peer.link_notify, ControlMessage("goodbye", self.link, reason, self._sent)):
            self._window.drain(CLOSE_TIMEOUT_S)

    def _call_acked(self, method: Any, *arguments: object) -> bool:
        """Make a call whose answer acknowledges all messages since the last such call; False if the link has ended.

        Waits for room in the window. ``method`` is a method of the peer's actor.
        """
        counted = (self._unacked, self._unacked_bytes)
        self._unacked = self._unacked_bytes = 0
        if not self._window.enter(*counted):
            return False
        self._call(method, *arguments).future().add_done_callback(partial(self._taken, *counted))
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
                self._peer.link_notify.remote(ControlMessage("abort", self.link, reason))

    def release(self) -> None:
        """Do nothing: the thread has ended, and references were released with their messages."""

    # Ray's thread for answers.

    def _taken(self, messages: int, nbytes: int, answer: Future[str]) -> None:
        error = answer.exception()
        self._window.leave(messages, nbytes)
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
        """End the link; messages that arrived completely may still be taken."""
        died = "died" if isinstance(error, RayActorError) else "cannot be reached"
        self.fail(LinkError(f"{self.name}: the peer {died}: {first_line(error)}"), keep=True)

    # The actor's threads.

    def receive(self, pieces: Sequence[object], *, checked: bool = False) -> str:
        """Put a message, given in one or several pieces, into the inbox, and return "taken".

        An invalid message ends the link. ``checked`` is True for a message with checksums.
        """
        try:
            self._take(pieces, checked=checked)
        except LinkError as error:
            self.fail(LinkError(f"{self.name}: {error}"), peer_reason=str(error))
        except Exception as error:  # noqa: BLE001  (out of memory, say; most messages return nothing to the caller)
            self.fail(LinkError(f"{self.name}: receiving failed: {error!r}"), peer_reason=repr(error))
        self._count(1)
        return "taken"

    def receive_goodbye(self, letter: ControlMessage) -> None:
        """End the link once all messages that were sent before the goodbye have arrived."""
        self._count(0, letter)

    def _count(self, messages: int, goodbye: ControlMessage | None = None) -> None:
        with self._counting:
            self._received += messages
            self._goodbye = self._goodbye or goodbye
            complete = self._goodbye is not None and self._goodbye.number == self._received
        if complete and self._goodbye is not None:
            self.peer_ended(self._goodbye.reason)

    def _take(self, pieces: Sequence[object], *, checked: bool) -> None:
        arrived_at_s = time.time()
        body = frame.header_bytes(self.form.max_tensors) + checked_frame.SEAL_BYTES * checked
        arrays = [_array(piece) for piece in pieces]
        if not arrays or arrays[0].size < body:
            raise LinkError("a call of the peer carried something that is not a message.")
        header = arrays[0][:body].tobytes()
        arrays[0] = arrays[0][body:]
        head, payload_checksum = checked_frame.parse(header, self.form, checked=checked)
        came_bytes = sum(array.size for array in arrays)
        if came_bytes != head.payload_bytes:
            raise LinkError(f"{head.action.words} announced {head.payload_bytes} bytes, {came_bytes} came.")
        checked_frame.check_payload(head, [array.data for array in arrays], payload_checksum)
        if head.generation < self.form.generation:
            return
        one_core()
        payload = torch.empty(head.payload_bytes, dtype=torch.uint8)
        np.concatenate(arrays, out=payload.numpy())
        self.inbox.deliver(head, frame.decode(head, payload, coded=self.coded), arrived_at_s)


def _pieces(data: bytes) -> Sequence[bytes | np.ndarray]:
    """Split a message into the arguments of its call: bytes of at most PIECE_BYTES each, or one array."""
    if len(data) > RIDING_BYTES:
        return [np.frombuffer(data, np.uint8)]
    return [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]


def _array(piece: object) -> np.ndarray:
    """View one argument of a message as a uint8 array; raise LinkError if it is neither bytes nor such an array."""
    if isinstance(piece, bytes) and piece:
        return np.frombuffer(piece, np.uint8)
    if isinstance(piece, np.ndarray) and piece.dtype == np.uint8 and piece.ndim == 1:
        return piece
    raise LinkError("a call of the peer carried something that is not a message.")


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [repr(error)])[0]


RETRY_S = 0.02


class _Address(NamedTuple):
    """Handle of an actor, and its machine."""

    actor: Any
    machine: str


class ObjectStoreEndpoint:
    """Endpoint of one StageActor, called by the actor's methods ``link_...``; ``configure`` opens new links with it."""

    def __init__(self) -> None:
        self._channels: dict[int, ObjectStoreChannel] = {}
        self._conflict = ""

    @property
    def address(self) -> _Address:
        """Handle of this actor, and its machine.

        The handle is made anew at each access, because Ray would never end an actor that stores its own handle.
        """
        return _Address(ray.get_runtime_context().current_actor, machine())

    def open(self, opening: LinkSetup) -> dict[int, ObjectStoreChannel]:
        """Open the links as Endpoint.open; ``opening.secret`` is not used."""
        peers, timeout_s = {peer: _Address(*address) for peer, address in opening.addresses.items()}, opening.timeout_s
        run, deadline_s = run_digest(opening.run_id), time.monotonic() + timeout_s
        links = {
            peer: LinkIdentity(run, opening.generation, opening.me, peer, opening.capacity[peer]) for peer in peers
        }
        self._conflict = ""
        # All ends exist before the first hello, because a welcomed peer may send at once.
        channels = {
            peer: ObjectStoreChannel(
                opening.names[peer],
                links[peer],
                at.actor,
                checked=is_checked(opening.checksum, same_host=at.machine == machine()),
            )
            for peer, at in peers.items()
        }
        self._channels = dict(channels)
        try:
            for peer, at in peers.items():
                self._greet(links[peer], at.actor, deadline_s, timeout_s)
                channels[peer].watch()
        except BaseException:
            self._channels = {}
            for channel in channels.values():
                channel.fail(LinkError(f"{channel.name}: was never opened."))
                channel.close()
            raise
        return channels

    def message(self, packed: object, *pieces: object) -> str:
        """Receive a message; return "taken" when it is copied and its objects may be freed, "gone" without such a link.

        Args:
            packed: result of ``packed_link``.
            pieces: bytes of the message, in order.
        """
        unpacked = unpacked_link(packed)
        channel = None if unpacked is None else self._channel(unpacked[0])
        if unpacked is None or channel is None or channel.shut:
            return "gone"
        return channel.receive(pieces, checked=unpacked[1])

    def notify(self, letter: ControlMessage) -> str:
        """Receive a control message.

        Returns:
            answer to a goodbye: "taken", or "gone" if there is no such link; to a hello: "welcome", "wait" (try again)
            or the reason of a refusal; to an abort: "".
        """
        channel = self._channel(letter.link)
        if letter.kind == "goodbye":
            if channel is None or channel.shut:
                return "gone"
            channel.receive_goodbye(letter)
            return "taken"
        if letter.kind == "abort":
            if channel is not None:
                channel.fail(LinkAbortedError(f"{channel.name}: aborted by the peer: {letter.reason}"))
            return ""
        mine, theirs = self._channels.get(letter.link.sender), letter.link
        if mine is None or mine.link.run != theirs.run or mine.link.sender != theirs.receiver:
            return "wait"
        if mine.link.generation != theirs.generation:
            obsolete = f"worker {theirs.sender} opens generation {theirs.generation} while worker {theirs.receiver} "
            obsolete += f"has generation {mine.link.generation}, which makes the older obsolete."
            return obsolete if mine.link.generation > theirs.generation else "wait"
        if channel is None:
            self._conflict = (
                f"worker {theirs.sender} sends up to {theirs.max_tensors} tensors per message, worker "
                f"{theirs.receiver} expects up to {mine.link.max_tensors}: they do not run the same plan."
            )
            return self._conflict
        return "welcome"

    def watch(self, link: LinkIdentity) -> None:
        """Return when this end of the link ends; if the call fails before that, this process has died."""
        channel = self._channel(link)
        if channel is not None:
            channel.ended.wait()

    def close(self) -> None:
        """Forget the links without closing them; the owners of the channels close them."""
        self._channels = {}

    def _channel(self, link: LinkIdentity) -> ObjectStoreChannel | None:
        """Return this end's channel of ``link``, the link as the peer sees it; None if there is no such link."""
        channel = self._channels.get(link.sender)
        same = channel is not None and channel.link == link._replace(sender=link.receiver, receiver=link.sender)
        return channel if same else None

    def _greet(self, link: LinkIdentity, peer: Any, deadline_s: float, timeout_s: float) -> None:
        while True:
            if self._conflict:
                raise LinkError(self._conflict)
            try:
                answer = ray.get(
                    peer.link_notify.remote(ControlMessage("hello", link)),
                    timeout=max(deadline_s - time.monotonic(), 0.001),
                )
            except GetTimeoutError:
                answer = "wait"
            except RayError as error:
                raise LinkError(
                    f"worker {link.sender} cannot reach worker {link.receiver}: {first_line(error)}"
                ) from error
            if answer == "welcome":
                return
            if answer != "wait":
                raise LinkError(answer)
            if time.monotonic() > deadline_s:
                raise LinkError(
                    f"links not open after {timeout_s:g} s: no welcome from worker {link.receiver}. It hangs, is cut "
                    "off, or belongs to another run or generation."
                )
            time.sleep(RETRY_S)
