"""SocketChannel: one worker's end of a link over TCP or a Unix socket, with one connection per direction.

    send() --> [orders] --> sending thread ==out==>             peer's receiving thread --> inbox --> recv()
                                    ^-------out-------  abort notice
    recv() <-- inbox <-- receiving thread  <==in===             peer's sending thread
                                    -------in-------->  abort notice

A connection carries frames one way. The way back is empty but for one thing: the reason of an
abort, which there does not queue behind megabytes of activations. Whoever finds the link broken looks there.

``send`` only queues: describing and copying a message is the sending thread's work, which goes on while
the caller computes. Measured on emulated accelerators, a send from the calling thread cost it 0.3 ms of
every 10 ms; the later arrival is hidden by slack. Sockets stay blocking and are woken by shutdown(2),
which works from any thread.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue

import torch

from raypipe.engine import frame
from raypipe.engine.inbox import Inbox
from raypipe.errors import LinkAbortedError, LinkError
from raypipe.ir.schedule import Action
from raypipe.runtime.landing import Landing, Memory

__all__ = ["SocketChannel"]

LANDING_BYTES = 1 << 20
"""Largest message that is given memory ahead of its arrival."""

_Order = tuple[Action, Sequence[torch.Tensor | None]]

CLOSE_TIMEOUT_S = 5.0
REASON_BYTES = 1024
_LEFT = "\0"  # marks the reason of a peer that left in good order: what it sent before may still be taken
_BUFFERS_PER_CALL = 512  # IOV_MAX is 1024 on Linux and macOS


class SocketChannel:
    """See the Channel protocol. ``open_channels`` makes both connections and hands them over.

    Args:
        name: for messages to people.
        generation: of the plan; older messages are dropped, a newer one is an error.
        max_tensors: most tensors that a message of this channel has; equal on both ends.
        outgoing, incoming: connected blocking sockets, which the channel owns from now on.

    Attributes:
        kinds: "tcp" or "unix", of the way out and the way in.
    """

    def __init__(
        self,
        name: str,
        generation: int,
        max_tensors: int,
        outgoing: socket.socket,
        incoming: socket.socket,
    ) -> None:
        self.name = name
        self.generation = generation
        self.max_tensors = max_tensors
        self._out, self._in = outgoing, incoming
        self.kinds = (_kind(outgoing), _kind(incoming))
        self._inbox = Inbox(name)
        self._lock = threading.Lock()  # guards the first failure
        # A queue of C code: putting something in wakes the sending thread without giving it the interpreter
        # lock, as a system call would. It describes and copies once the caller computes or waits.
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._send_error: LinkError | None = None
        self._landing: Landing | None = None  # these two are the receiving thread's
        self._memory = Memory()
        self._shut = False
        self._close_once = threading.Lock()
        self._sender = threading.Thread(target=self._send_loop, name=f"raypipe-send {name}", daemon=True)
        self._receiver = threading.Thread(target=self._receive_loop, name=f"raypipe-recv {name}", daemon=True)
        self._sender.start()
        self._receiver.start()

    def send(self, action: Action, tensors: Sequence[torch.Tensor | None]) -> None:
        frame.check_count(action, tensors, self.max_tensors)
        if self._send_error is not None:
            raise type(self._send_error)(f"{self._send_error} (sending {action}, micro-batch {action.microbatch})")
        self._orders.put((action, tensors))

    def recv(self, action: Action, timeout_s: float) -> tuple[torch.Tensor | None, ...]:
        return self._inbox.take(action, timeout_s)

    def abort(self, reason: str) -> None:
        self._fail(LinkAbortedError(f"{self.name}: aborted: {reason}"), tell_peer=reason)

    def leave(self, reason: str) -> None:
        error = LinkAbortedError(f"{self.name}: aborted: {reason}")
        with self._lock:
            if self._shut or self._send_error is not None:
                return
            self._send_error = error
            self._notify(_LEFT + reason)
        self._inbox.fail(error)
        self._orders.put(None)  # after the messages in the queue, the connection ends and the peer reads the notice

    def close(self) -> None:
        with self._close_once:
            self._send_error = self._send_error or LinkError(f"{self.name}: closed.")
            self._orders.put(None)
            self._sender.join(CLOSE_TIMEOUT_S)
            self._fail(LinkError(f"{self.name}: closed."))
            self._sender.join()
            self._receiver.join()
            for sock in (self._out, self._in):
                sock.close()

    def _fail(self, error: LinkError, *, keep: bool = False, tell_peer: str | None = None) -> None:
        """End both directions now; the first error is the one told."""
        with self._lock:
            self._send_error = self._send_error or error
            first, self._shut = not self._shut, True
        self._inbox.fail(error, keep=keep)
        if not first:
            return
        if tell_peer is not None:
            self._notify(tell_peer)
        for sock in (self._out, self._in):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._orders.put(None)

    def _notify(self, reason: str) -> None:
        """Leave the reason on the way back, where the peer looks when its connection ends."""
        with contextlib.suppress(OSError):
            self._in.send(reason.encode()[:REASON_BYTES] or b" ", socket.MSG_DONTWAIT)

    # The sending thread.

    def _send_loop(self) -> None:
        try:
            while (order := self._orders.get()) is not None and not self._shut:
                message = frame.encode(*order, generation=self.generation, max_tensors=self.max_tensors)
                _send_all(self._out, deque((memoryview(message.header), *message.buffers)))
                del order, message  # the tensors' memory may go
            self._out.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._peer_left(error)
        except LinkError as error:  # a message that cannot be described
            self._fail(LinkError(f"{self.name}: {error}"), tell_peer=str(error))
        except Exception as error:  # noqa: BLE001  (a thread that ends in silence would leave both ends waiting)
            self._fail(LinkError(f"{self.name}: sending failed: {error!r}"), tell_peer=repr(error))
        self._orders = SimpleQueue()

    def _peer_left(self, cause: OSError | None = None) -> None:
        """The peer aborted, or takes no more messages: what it still sends belongs to the receiving thread."""
        reason = self._abort_notice()
        if reason is not None:
            self._fail(LinkAbortedError(f"{self.name}: aborted by the peer: {reason.removeprefix(_LEFT)}"))
            return
        with self._lock:
            why = f" ({cause})" if cause is not None else ""
            self._send_error = self._send_error or LinkError(f"{self.name}: the peer closed the link or died{why}.")

    def _abort_notice(self) -> str | None:
        try:
            notice = self._out.recv(REASON_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return None
        return notice.decode(errors="replace") if notice else None

    # The receiving thread.

    def _receive_loop(self) -> None:
        header = bytearray(frame.header_bytes(self.max_tensors))
        try:
            while self._receive(header):
                pass
        except LinkError as error:
            self._fail(LinkError(f"{self.name}: {error}"), tell_peer=str(error))
            return
        except (RuntimeError, MemoryError) as error:  # no memory for what was announced
            self._fail(LinkError(f"{self.name}: receiving failed: {error!r}"), tell_peer=repr(error))
            return
        except OSError as error:
            ending = f"the link broke: {error}."
        else:
            ending = "the peer closed the link or died."
        reason = self._abort_notice()
        if reason is not None:
            told = LinkAbortedError(f"{self.name}: aborted by the peer: {reason.removeprefix(_LEFT)}")
            self._fail(told, keep=reason.startswith(_LEFT))
        else:
            gone = LinkError(f"{self.name}: {ending}")
            self._inbox.fail(gone, keep=True)
            with self._lock:
                self._send_error = self._send_error or gone

    def _receive(self, header: bytearray) -> bool:
        """Take one message off the connection; False at its end."""
        if not _receive_exactly(self._in, memoryview(header)):
            return False
        head = frame.parse(header, generation=self.generation, max_tensors=self.max_tensors)
        landing, self._landing = self._landing, None
        if landing is None or landing.records != head.records:
            landing = Landing.prepare(head, self._memory)
        if head.payload_bytes and not _receive_exactly(self._in, landing.memory):
            raise ConnectionError(f"it ended inside {head.action}")
        if head.generation == self.generation:
            self._inbox.deliver(head.action, landing.tensors)
        if head.payload_bytes <= LANDING_BYTES:
            # The next message is likely of the same shape: make room for it now, while nobody waits.
            self._landing = Landing.prepare(head, self._memory)
        return True


def _kind(sock: socket.socket) -> str:
    return "unix" if sock.family == getattr(socket, "AF_UNIX", None) else "tcp"


def _send_all(sock: socket.socket, buffers: deque[memoryview]) -> None:
    """Write all of ``buffers``; shutdown(2) from another thread ends it with an OSError."""
    while buffers:
        sent_bytes = sock.sendmsg(itertools.islice(buffers, _BUFFERS_PER_CALL))
        while buffers and sent_bytes >= buffers[0].nbytes:
            sent_bytes -= buffers.popleft().nbytes
        if sent_bytes:
            buffers[0] = buffers[0][sent_bytes:]


def _receive_exactly(sock: socket.socket, target: memoryview) -> bool:
    """Fill ``target``; False if the connection ended before its first byte.

    Raises:
        ConnectionError: it ended later.
    """
    start = 0
    while start < target.nbytes:
        # One call, and so one wait for the interpreter lock, for a whole message.
        got_bytes = sock.recv_into(target[start:], 0, socket.MSG_WAITALL)
        if got_bytes == 0:
            if start == 0:
                return False
            raise ConnectionError(f"it ended after {start} of {target.nbytes} bytes")
        start += got_bytes
    return True
