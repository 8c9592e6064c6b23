"""QueuedChannel: what channels have in common whose messages leave through one sending thread.

    send() --> [orders] --> sending thread --> transmit(message) ... goodbye(reason)   the medium,
    recv() <-- inbox    <-- whoever receives, in the medium's own way                  a subclass
    abort() --> first failure --> inbox, interrupt(reason)

``send`` only queues: describing, encoding, copying and waiting for the medium is the thread's work, and the caller
computes on. Whoever receives decodes, so that no codec ever runs in a thread that computes.
Measured on emulated accelerators, a send from the calling thread cost it 0.3 ms of every 10 ms; the later arrival is
hidden by slack.
A subclass says how a message leaves, how the last word is said, and how every wait in the medium is ended from
another thread. What it receives goes into ``inbox``, and what it learns of the peer's end into ``peer_ended``.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import torch

from raypipe.engine.codec import Codec, Codecs
from raypipe.engine.codec.host import one_core
from raypipe.engine.message_log import KeepSent
from raypipe.engine.messages import frame
from raypipe.engine.messages.channel import Message, Payload
from raypipe.engine.messages.inbox import Inbox
from raypipe.errors import LinkAbortedError, LinkError
from raypipe.ir.schedule import Action

__all__ = ["CLOSE_TIMEOUT_S", "QueuedChannel"]

CLOSE_TIMEOUT_S = 5.0
"""How long ``close`` waits for the peer to take what was handed over."""
_Order = tuple[Action, Payload, int, Codec]
_ATTEND: tuple[()] = ()
END_TIMEOUT_S = 1.0
"""How long ``close`` waits for a thread whose waits were interrupted: a medium may have lost one of them."""


class QueuedChannel(ABC):
    """See the Channel protocol.

    Args:
        name: for messages to people.
        generation: of the plan; older messages are dropped, a newer one is an error.
        max_tensors: most tensors that a message of this channel has; equal on both ends.

    Attributes:
        damaged: messages that came damaged and were asked for again.
    """

    on_device = False
    linger_s = 0.0
    """How long ``close`` waits for the peer's goodbye, for a medium that does not bear an end on one side only."""

    def __init__(self, name: str, generation: int, max_tensors: int) -> None:
        self.name = name
        self.generation = generation
        self.max_tensors = max_tensors
        self.inbox = Inbox(name)
        self.damaged = self._told = 0
        self.shut = False
        """Nothing more goes out or is waited for."""
        self.peer_gone = threading.Event()
        """The peer takes no more messages, and no goodbye."""
        self._lock = threading.Lock()  # guards the first failure; nobody calls the medium while holding it
        self._send_error: LinkError | None = None
        self._leaving: str | None = None
        self._codecs = Codecs()
        self._keep: KeepSent | None = None
        self.coded = False
        """Whoever receives leaves tensors in their codec."""
        # A queue of C code: putting something in wakes the sending thread without giving it the interpreter lock, as a
        # system call would. It describes and copies once the caller computes or waits.
        self._orders: SimpleQueue[_Order | tuple[()] | None] = SimpleQueue()
        self._leaves = False  # whether a message is being encoded or sent
        self._close_once = threading.Lock()
        self._sender = threading.Thread(target=self._send_loop, name=f"raypipe-send {name}", daemon=True)

    # What a medium does.

    def framed(self, action: Action, tensors: Payload, weight_version: int, codec: Codec) -> Any:
        """What ``transmit`` takes."""
        return frame.encode(
            action,
            tensors,
            generation=self.generation,
            max_tensors=self.max_tensors,
            weight_version=weight_version,
            codec=codec,
        )

    @abstractmethod
    def transmit(self, message: Any) -> None:
        """Send one message, as ``framed`` makes it; returns when its memory is no longer needed.

        Raises:
            ConnectionError: the medium broke.
        """

    @abstractmethod
    def goodbye(self, reason: str | None) -> None:
        """Tell the peer, after all messages, that no more will come, and why where there is a reason."""

    @abstractmethod
    def interrupt(self, reason: str | None) -> None:
        """End every wait in the medium now, from any thread; the peer is told the reason where there is one."""

    @abstractmethod
    def release(self) -> None:
        """Give back threads and sockets after the sending thread's end."""

    def attend(self) -> None:
        """What ``wake`` called the sending thread for; nothing, unless a medium sends messages again."""
        return

    def broke(self, cause: ConnectionError) -> None:
        """The medium broke under the sending thread. What the peer still sent belongs to whoever receives."""
        self.refuse(LinkError(f"{self.name}: the peer closed the link or died ({cause})."))

    # What a worker calls.

    @property
    def busy(self) -> bool:
        return self._leaves or not self._orders.empty()

    def start(self) -> None:
        self._sender.start()

    def send(self, action: Action, tensors: Payload, weight_version: int = 0) -> None:
        frame.check_count(action, tensors, self.max_tensors)
        if self._send_error is not None:
            raise type(self._send_error)(f"{self._send_error} (sending {action.words})")
        self._orders.put((action, tensors, weight_version, self._codecs.of(action.op)))

    def recv(self, action: Action, timeout_s: float) -> Message:
        return self.inbox.take(action, timeout_s)

    def use(self, codec_forward: Codec, codec_backward: Codec) -> None:
        self._codecs = Codecs(codec_forward, codec_backward)

    def keep_sent(self, keep: KeepSent) -> None:
        assert not self.on_device, "what crosses a link between devices is not in host memory"
        self._keep = keep

    def leave_coded(self) -> None:
        self.coded = True

    def abort(self, reason: str) -> None:
        self.fail(LinkAbortedError(f"{self.name}: aborted: {reason}"), tell_peer=reason)

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

    # What a medium reports.

    def deliver(self, head: frame.Head, tensors: Sequence[torch.Tensor | None], arrived_at_s: float) -> None:
        """A message came; it also tells how many came damaged before it."""
        told, self._told = self._told, self.damaged
        self.inbox.deliver(head, tensors, arrived_at_s, self._told - told)

    def wake(self) -> None:
        """Have the sending thread attend, even where it has nothing to send."""
        self._orders.put(_ATTEND)

    def refuse(self, error: LinkError) -> None:
        """Take no more messages; what was received may still be taken."""
        with self._lock:
            self._send_error = self._send_error or error

    def fail(self, error: LinkError, *, keep: bool = False, tell_peer: str | None = None) -> None:
        """End both directions now; the first error is the one told."""
        with self._lock:
            self._send_error = self._send_error or error
            first, self.shut = not self.shut, True
        self.peer_gone.set()
        self.inbox.fail(error, keep=keep)
        if first:
            self.interrupt(tell_peer)
            self._orders.put(None)

    def peer_ended(self, reason: str | None) -> None:
        """The peer's goodbye came, and every message before it is in the inbox."""
        if reason is not None:
            self.fail(LinkAbortedError(f"{self.name}: aborted by the peer: {reason}"), keep=True)
            return
        self.lost(LinkError(f"{self.name}: the peer closed the link."))

    def lost(self, error: LinkError) -> None:
        """Nothing more comes or goes, and nobody is there to be told; what came may still be taken."""
        self.peer_gone.set()
        self.inbox.fail(error, keep=True)
        self.refuse(error)

    def _send_loop(self) -> None:
        one_core()
        try:
            while (order := self._orders.get()) is not None and not self.shut:
                if not order:
                    self.attend()
                    continue
                self._leaves = True
                message = self.framed(*order)
                if self._keep is not None:
                    self._keep(order[0], message)
                self.transmit(message)
                del order, message  # the tensors' memory may go
                self._leaves = False
            if not self.peer_gone.is_set():
                self.goodbye(self._leaving)
        except ConnectionError as error:
            self.broke(error)
        except LinkError as error:  # a message that cannot be described
            self.fail(LinkError(f"{self.name}: {error}"), tell_peer=str(error))
        except Exception as error:  # noqa: BLE001  (a thread that ends in silence would leave both ends waiting)
            self.fail(LinkError(f"{self.name}: sending failed: {error!r}"), tell_peer=repr(error))
        self._orders = SimpleQueue()
