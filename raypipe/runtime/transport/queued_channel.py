"""QueuedChannel: common base of channels that send all messages in one thread of their own.

    send() --> [queue]  --> sending thread --> transmit(message) ... goodbye(reason)   the medium,
    recv() <-- inbox    <-- receiving thread of the medium                             a subclass
    abort() --> first failure --> inbox, interrupt(reason)

The *medium* is what carries the bytes: sockets, process groups or Ray's object store. ``send`` only queues a message.
The sending thread encodes and copies it, makes its header and waits for the medium, while the caller computes. The
receiving thread decodes, so that no codec ever runs in a thread that computes. Measured on emulated accelerators, a
send in the calling thread cost that thread 0.3 ms of every 10 ms.

A subclass defines how to send a message and a goodbye, and how to end every wait in the medium from another thread. It
puts received messages into ``inbox``, and calls ``peer_ended`` at the peer's goodbye.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from queue import SimpleQueue
from typing import Any

from raypipe.engine.codec import Codec, Codecs
from raypipe.engine.codec.host import one_core
from raypipe.engine.messages import frame
from raypipe.engine.messages.channel import Inbox, Message, Payload
from raypipe.engine.messages.frame import FrameFormat
from raypipe.errors import LinkAbortedError, LinkError
from raypipe.ir.schedule import Action

CLOSE_TIMEOUT_S = 5.0
"""Maximum seconds for which ``close`` waits until the peer has taken all messages that were sent."""
_Order = tuple[Action, Payload, int, Codec]
END_TIMEOUT_S = 1.0
"""Maximum seconds for which ``close`` waits for a thread to end after ``interrupt``, which a medium may have missed."""


class QueuedChannel(ABC):
    """Base of channels that send in a thread of their own; see the Channel protocol.

    Args:
        name: name of the channel, for errors.
        form: format of the messages' headers. Messages of older generations are dropped; a message of a newer
            generation is an error.
    """

    on_device = False
    linger_s = 0.0
    """Seconds for which ``close`` waits for the peer's goodbye; above 0 if the medium loses messages on a close."""

    def __init__(self, name: str, form: FrameFormat) -> None:
        self.name, self.form = name, form
        self.inbox = Inbox(name)
        self.shut = False
        """True once nothing more is sent or waited for."""
        self.peer_gone = threading.Event()
        """Set once the peer takes neither messages nor a goodbye."""
        self._lock = threading.Lock()  # guards the first failure; the medium is never called under it
        self._send_error: LinkError | None = None
        self._leaving: str | None = None
        self._codecs = Codecs()
        self.coded = False
        """True if received tensors stay in their codec."""
        # A queue in C: a put wakes the sending thread without releasing the interpreter lock, as a system call would.
        # The thread describes and copies once the caller computes or waits.
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._leaves = False  # True while a message is encoded or sent
        self._close_once = threading.Lock()
        self._sender = threading.Thread(target=self._send_loop, name=f"raypipe-send {name}", daemon=True)

    # Methods of a medium.

    def framed(self, action: Action, tensors: Payload, weight_version: int, codec: Codec) -> Any:
        """Encode a message; return it as the argument of ``transmit``."""
        return frame.encode(action, tensors, self.form, weight_version, codec)

    @abstractmethod
    def transmit(self, message: Any) -> None:
        """Send one message; return when its memory is no longer needed.

        Args:
            message: result of ``framed``.

        Raises:
            ConnectionError: the medium broke.
        """

    @abstractmethod
    def goodbye(self, reason: str | None) -> None:
        """Send the peer a goodbye after all messages; ``reason`` is why this end leaves, None for an ordinary end."""

    @abstractmethod
    def interrupt(self, reason: str | None) -> None:
        """End every wait in the medium now, from any thread; send the peer the reason of an abort unless it is None."""

    @abstractmethod
    def release(self) -> None:
        """Release threads and sockets; called after the sending thread has ended."""

    def broke(self, cause: ConnectionError) -> None:
        """Refuse to send further messages after the sending thread lost the medium; messages are still received."""
        self.refuse(LinkError(f"{self.name}: the peer closed the link or died ({cause})."))

    # Methods for the worker.

    @property
    def busy(self) -> bool:
        return self._leaves or not self._orders.empty()

    def start(self) -> None:
        self._sender.start()

    def send(self, action: Action, tensors: Payload, weight_version: int = 0) -> None:
        frame.check_count(action, tensors, self.form.max_tensors)
        if self._send_error is not None:
            raise type(self._send_error)(f"{self._send_error} (sending {action.words})")
        self._orders.put((action, tensors, weight_version, self._codecs.of(action.op)))

    def recv(self, action: Action, timeout_s: float) -> Message:
        return self.inbox.take(action, timeout_s)

    def use(self, codec_forward: Codec, codec_backward: Codec) -> None:
        self._codecs = Codecs(codec_forward, codec_backward)

    def leave_coded(self) -> None:
        self.coded = True

    def abort(self, reason: str) -> None:
        self.fail(LinkAbortedError(f"{self.name}: aborted: {reason}"), peer_reason=reason)

    def leave(self, reason: str) -> None:
        error = LinkAbortedError(f"{self.name}: aborted: {reason}")
        with self._lock:
            if self._send_error is not None:
                return
            self._send_error, self._leaving = error, reason
        self.inbox.fail(error)
        self._orders.put(None)

    def close(self) -> None:
        with self._close_once:
            self.refuse(LinkError(f"{self.name}: closed."))
            self._orders.put(None)
            if not self.peer_gone.is_set():
                self._sender.join(CLOSE_TIMEOUT_S)
                self.peer_gone.wait(self.linger_s)
            self.fail(LinkError(f"{self.name}: closed."))
            self._sender.join(END_TIMEOUT_S)
            self.release()

    # Callbacks of a medium.

    def refuse(self, error: LinkError) -> None:
        """Refuse to send further messages; received messages may still be taken."""
        with self._lock:
            self._send_error = self._send_error or error

    def fail(self, error: LinkError, *, keep: bool = False, peer_reason: str | None = None) -> None:
        """End both directions now; only the first error is reported.

        Args:
            keep: True if messages that have been received may still be taken.
            peer_reason: reason that is sent to the peer; None sends nothing.
        """
        with self._lock:
            self._send_error = self._send_error or error
            first, self.shut = not self.shut, True
        self.peer_gone.set()
        self.inbox.fail(error, keep=keep)
        if first:
            self.interrupt(peer_reason)
            self._orders.put(None)

    def peer_ended(self, reason: str | None) -> None:
        """End the link after the peer's goodbye; earlier messages may still be taken from the inbox.

        ``reason`` is why the peer leaves; None for an ordinary end.
        """
        if reason is not None:
            self.fail(LinkAbortedError(f"{self.name}: aborted by the peer: {reason}"), keep=True)
            return
        self.lost(LinkError(f"{self.name}: the peer closed the link."))

    def lost(self, error: LinkError) -> None:
        """End both directions without notice to the peer, which is gone; received messages may still be taken."""
        self.peer_gone.set()
        self.inbox.fail(error, keep=True)
        self.refuse(error)

    def _send_loop(self) -> None:
        one_core()
        try:
            while (order := self._orders.get()) is not None and not self.shut:
                self._leaves = True
                message = self.framed(*order)
                self.transmit(message)
                del order, message  # release the tensors' memory
                self._leaves = False
            if not self.peer_gone.is_set():
                self.goodbye(self._leaving)
        except ConnectionError as error:
            self.broke(error)
        except LinkError as error:  # a message that cannot be described
            self.fail(LinkError(f"{self.name}: {error}"), peer_reason=str(error))
        except Exception as error:  # noqa: BLE001  (a thread that ends without a report would leave both ends waiting)
            self.fail(LinkError(f"{self.name}: sending failed: {error!r}"), peer_reason=repr(error))
        self._orders = SimpleQueue()
