"""Channels between two workers: the contract of every kind, and the in-memory channel between workers of one process.

A message is named by the sender's action: stage 1 receives as ``0SEND_F5`` what stage 0 sent as ``0SEND_F5``, the
output of its forward of micro-batch 5. A run counts the generations of its links: opening them anew begins the next
generation. Messages of an older generation are dropped.

InMemoryChannel passes the contract tests of the sockets, and copies through the same headers, so that a local run has
the same layouts, flags, limits and codecs. The sender both encodes and decodes, in the calling thread. From the first
message whose tensors are still being copied to the host, it does so in a separate thread of the link.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from queue import Empty
from typing import Any, NamedTuple, Protocol

import torch

from raypipe.engine.codec import Codec, Codecs
from raypipe.engine.codec.codec import CodedTensor
from raypipe.engine.codec.host import one_core
from raypipe.engine.device.thread_pool import ThreadPool
from raypipe.engine.messages import frame
from raypipe.engine.messages.frame import FrameFormat, Head, PendingCopy
from raypipe.errors import LinkAbortedError, LinkError
from raypipe.ir.schedule import Action

Payload = Sequence[torch.Tensor | CodedTensor | None]
"""Tensors of a message, such as a stage's outputs or their gradients; None for a tensor that is not sent, such as a
gradient that is not needed.
"""


class Stamp(NamedTuple):
    """Times and size of a message.

    Attributes:
        sent_at_s: time of sending on the sender's wall clock, after encoding, in seconds since 1970.
        arrived_at_s: time of arrival of the last byte on the receiver's wall clock, before decoding.
        wire_bytes: size of the encoded payload, without the header.
    """

    sent_at_s: float = 0.0
    arrived_at_s: float = 0.0
    wire_bytes: int = 0


class Message(tuple[torch.Tensor | None, ...]):
    """Tensors of a message that arrived, and the fields of its header.

    Attributes:
        weight_version: weight version of the micro-batch; 0 if the sender gave none.
        stamp: times of sending and arrival, and size.
    """

    weight_version: int = 0
    stamp: Stamp = Stamp()

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor | None], weight_version: int, stamp: Stamp) -> Message:
        message = cls(tensors)
        message.weight_version, message.stamp = weight_version, stamp
        return message


class Channel(Protocol):
    """One worker's end of a link. Every implementation passes tests/contract/channel.py."""

    name: str
    """Name of the link in error messages, such as ``stage 0 <-> stage 1``."""

    on_device: bool
    """True if the link sends from and receives into memory of the computing device, and encodes and decodes there."""

    @property
    def busy(self) -> bool:
        """True while a message that was passed to ``send`` is not yet sent, so that other traffic would delay it."""

    def send(self, action: Action, tensors: Payload, weight_version: int = 0) -> None:
        """Begin to send tensors, and return at once; the caller must not change them until they are sent.

        Args:
            weight_version: value that ``Message.weight_version`` of the received message gets.

        Raises:
            LinkError: the link failed or was aborted, now or before.
        """

    def recv(self, action: Action, timeout_s: float) -> Message:
        """Wait for the message that the peer sends under the name ``action``, and return it.

        A tensor that requires a gradient at the sender becomes a leaf that requires a gradient here. Dtype, shape and
        strides are equal to the sender's, whatever the codec.

        Raises:
            LinkError: no message within ``timeout_s``, a wrong header, or a link that was closed or aborted; names
                link, action and micro-batch.
        """

    def use(self, codec_forward: Codec, codec_backward: Codec) -> None:
        """Set the codecs of the messages that this end sends from now on; the other end needs no call.

        Args:
            codec_forward: codec of activations that require a gradient (SEND_F); the default is no codec.
            codec_backward: codec of gradients (SEND_B); the default is no codec. Other tensors are never encoded.
        """

    def leave_coded(self) -> None:
        """Let ``recv`` return encoded tensors as CodedTensor from now on, for a device that decodes them itself."""

    def abort(self, reason: str) -> None:
        """End every wait on both sides now; the channel is unusable afterwards. Callable from any thread."""

    def leave(self, reason: str) -> None:
        """Send all messages of earlier ``send`` calls, then abort the link with ``reason``; callable from any thread.

        A worker that fails calls this, so that others get the messages of its finished steps before the abort.
        """

    def close(self) -> None:
        """Send all messages of earlier ``send`` calls, within CLOSE_TIMEOUT_S; then release threads and sockets.

        Safe to call twice.
        """


class Inbox:
    """Inbox of a channel: messages that have arrived and were not taken yet, by the action that names each of them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._messages: dict[Action, Message] = {}
        self._error: LinkError | None = None
        self._lock = threading.Lock()
        # A bare lock per waiting thread: half the time to wake of a Condition, and only the one concerned wakes.
        self._waiting: list[tuple[Action, threading.Lock]] = []

    def deliver(self, head: Head, tensors: Sequence[torch.Tensor | None], arrived_at_s: float) -> None:
        """Store a message for ``take``; drop it if the channel has failed.

        A second message of an action, while the first is stored, makes the channel fail.
        """
        action = head.action
        stamp = Stamp(head.sent_at_s, arrived_at_s, head.payload_bytes)
        message = Message.of(tensors, head.weight_version, stamp)
        with self._lock:
            twice = action in self._messages
            if self._error is None and not twice:
                self._messages[action] = message
                self._wake(action)
        if twice:
            self.fail(LinkError(f"{self.name}: {action.words} came twice."))

    def take(self, action: Action, timeout_s: float) -> Message:
        """Wait for the message of ``action``, remove it from the inbox, and return it.

        Raises:
            LinkError: the message did not come within ``timeout_s``, or the channel failed.
        """
        deadline_s = time.monotonic() + timeout_s
        woken = threading.Lock()
        woken.acquire()
        while True:
            with self._lock:
                if action in self._messages:
                    return self._messages.pop(action)
                if self._error is not None:
                    message = f"{self._error} (waiting for {action.words})"
                    raise type(self._error)(message) from self._error
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise LinkError(
                        f"{self.name}: {action.words} did not come within {timeout_s:g} s. "
                        "The peer is slower than the deadline, hangs, or its network is cut."
                    )
                self._waiting.append((action, woken))
            if not woken.acquire(timeout=min(left_s, threading.TIMEOUT_MAX)):
                self._give_up((action, woken))

    def fail(self, error: LinkError, *, keep: bool = False) -> None:
        """Make all waits, those in progress and later ones, raise the error of the first call of this method.

        Args:
            error: the error, ignored after the first call.
            keep: False drops the stored messages. True, if the peer ended in good order, lets ``take`` return them.
        """
        with self._lock:
            if self._error is None:
                self._error = error
            if not keep:
                self._messages.clear()
            self._wake(None)

    def _wake(self, action: Action | None) -> None:
        """Wake the threads that wait for ``action``; None wakes all. The caller must hold the lock."""
        still = []
        for wanted, woken in self._waiting:
            if action is None or wanted == action:
                woken.release()
            else:
                still.append((wanted, woken))
        self._waiting = still

    def _give_up(self, waiter: tuple[Action, threading.Lock]) -> None:
        """Remove a thread from the list of waiting threads after its timeout; reset its lock if it was woken meanwhile.

        ``waiter`` is the entry of the list: the action that the thread waits for, and the lock that wakes the thread.
        """
        with self._lock:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:
                waiter[1].acquire()


CLOSE_TIMEOUT_S = 5.0
"""Maximum seconds for which ``close`` and ``leave`` wait until all messages are sent."""


class _End:
    """One end of an in-memory link: messages that have arrived, and the error that ended the link.

    A channel refers to both ends, but not to the other channel: without such a cycle both are freed at once.
    """

    def __init__(self, name: str, generation: int) -> None:
        self.generation = generation
        self.inbox = Inbox(name)
        self.coded = False
        self._lock = threading.Lock()
        self._error: LinkError | None = None

    def fail(self, error: LinkError, *, keep: bool = False) -> None:
        with self._lock:
            self._error = self._error or error
        self.inbox.fail(error, keep=keep)

    def raise_if_failed(self) -> None:
        with self._lock:
            if self._error is not None:
                raise type(self._error)(str(self._error)) from self._error


class InMemoryChannel:
    """End of an in-memory link; see the Channel protocol. ``pair`` creates both ends."""

    on_device = False

    def __init__(self, name: str, max_tensors: int, own: _End, other: _End) -> None:
        self.name = name
        self.form = FrameFormat(own.generation, max_tensors)
        self._own, self._other = own, other
        self._codecs = Codecs()
        self._pool: ThreadPool[None] | None = None

    @property
    def busy(self) -> bool:
        return False

    @classmethod
    def pair(cls, name: str, generation: int, max_tensors: int) -> tuple[InMemoryChannel, InMemoryChannel]:
        """Create both ends of a link whose messages have at most ``max_tensors`` tensors."""
        ends = _End(name, generation), _End(name, generation)
        return cls(name, max_tensors, *ends), cls(name, max_tensors, *reversed(ends))

    def send(self, action: Action, tensors: Payload, weight_version: int = 0) -> None:
        self._own.raise_if_failed()
        frame.check_count(action, tensors, self.form.max_tensors)
        order = action, tensors, weight_version, self._codecs.of(action.op)
        if self._pool is None and isinstance(tensors, PendingCopy):
            self._pool = ThreadPool(f"raypipe-send {self.name}", 1)
        if self._pool is None:
            self._carry(*order)
        else:
            self._pool.submit([partial(self._carry_in_thread, *order)])

    def _carry_in_thread(self, *order: Any) -> None:
        """Call ``_carry`` with the arguments ``order`` in the link's thread; a failure aborts the link."""
        one_core()
        try:
            self._carry(*order)
        except Exception as error:  # noqa: BLE001  (a thread that ends in silence would leave both ends waiting)
            self.abort(str(error) if isinstance(error, LinkError) else f"sending failed: {error!r}")

    def _carry(self, action: Action, tensors: Payload, weight_version: int, codec: Codec) -> None:
        message = frame.encode(action, tensors, self.form, weight_version, codec)
        try:
            head = frame.parse(message.header, self.form._replace(generation=self._other.generation))
        except LinkError as error:  # what the receiving end of a network would find
            self.abort(str(error))
            return
        if head.generation == self._other.generation:
            payload = frame.gather(message)
            arrived_at_s = time.time()
            received = frame.decode(head, payload, coded=self._other.coded)
            self._other.inbox.deliver(head, received, arrived_at_s)

    def _sent(self) -> None:
        """Wait until the link's thread has sent all messages, for at most CLOSE_TIMEOUT_S seconds."""
        if self._pool is not None:
            with suppress(Empty):
                self._pool.submit([_nothing]).get(timeout=CLOSE_TIMEOUT_S)

    def recv(self, action: Action, timeout_s: float) -> Message:
        return self._own.inbox.take(action, timeout_s)

    def use(self, codec_forward: Codec, codec_backward: Codec) -> None:
        self._codecs = Codecs(codec_forward, codec_backward)

    def leave_coded(self) -> None:
        self._own.coded = True

    def abort(self, reason: str) -> None:
        error = LinkAbortedError(f"{self.name}: aborted: {reason}")
        for end in (self._own, self._other):
            end.fail(error)

    def leave(self, reason: str) -> None:
        self._sent()
        self._own.fail(LinkAbortedError(f"{self.name}: aborted: {reason}"))
        self._other.fail(LinkAbortedError(f"{self.name}: aborted by the peer: {reason}"), keep=True)

    def close(self) -> None:
        self._sent()
        if self._pool is not None:
            self._pool.close()
        error = LinkError(f"{self.name}: closed.")
        self._own.fail(error)
        self._other.fail(error, keep=True)


def _nothing() -> None:
    """Do nothing. The end of this task in a thread shows that all earlier tasks of the thread have ended."""
