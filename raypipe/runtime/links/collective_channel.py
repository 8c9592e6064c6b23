"""CollectiveChannel: one worker's end of a link over two gloo groups of two, one per direction. See collective.py.

    sending thread ==out==>                            peer's receiving thread --> inbox
               <--out--  notice, rarely
    inbox <-- receiving thread <==in===                peer's sending thread
                       --in--> notice, rarely

    message on the wire:  +-------------------------+----------+  then, where the payload is larger than the slot,
                          | slot: payload, padding  | envelope |  it alone
                          +-------------------------+----------+

The envelope (kind, header or reason) has a fixed size. The slot is as large as both ends expect the payload to be, up
to SLOT_LIMIT_BYTES; a wrong guess costs padding, or a second transfer, which takes a quarter of a message's processor
time.

What gloo cannot do is contained here:

    a message of another size than its receive    it ends the process: a receive is posted for a size already known
    an expired wait closes the pair for good      waits are very long; deadlines are the inbox's
    abort() does nothing to a wait                shutdown(2) on the groups' own sockets ends it at once
    it may lose a send while the peer closes      a closing end waits a moment for the other's goodbye; and see SEND_END
    is_completed() is not told of arrivals        the notice is read where it arrives: in memory that lies ready

A notice is the reason of an abort. It takes the way back of the other direction, which is empty, into a receive that
was posted when the link was opened.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from raypipe.engine.codec.host import one_core
from raypipe.engine.messages import checked_frame, frame, layout
from raypipe.errors import LinkAbortedError, LinkError
from raypipe.runtime.links.forecast import Forecast
from raypipe.runtime.links.queued_channel import END_TIMEOUT_S, QueuedChannel

__all__ = ["NO_END", "CollectiveChannel", "Group", "Groups"]

NO_END = timedelta(days=365)
SEND_END = timedelta(minutes=10)
"""For one message to leave. It must end: of sends that met the peer's end, gloo never ended 1 in 300 to 1 in 25."""
GOODBYE_END = timedelta(seconds=1)
"""For a goodbye to be taken, when all before it was. The peer's close is likely to meet it."""
NOTICE_WAIT = timedelta(milliseconds=100)
"""After a link broke, how long its reason may take: it was sent before the end, on another connection."""
REASON_BYTES = 512
SLOT_LIMIT_BYTES = 1 << 20
"""Above it a wrong guess costs more padding than right ones save."""
DATA, NOTICE = 1, 2

_MESSAGE, _CLOSED, _LEFT = 1, 2, 3
_KIND_BYTES = 8


class Group:
    """A gloo group of two in which ``sender`` is rank 0; the peer is the other rank."""

    def __init__(self, group: Any, rank: int) -> None:
        self._group, self._peer = group, 1 - rank

    def post_send(self, tensor: torch.Tensor, tag: int = DATA) -> Any:
        return self._call(self._group.send, tensor, tag)

    def post_recv(self, tensor: torch.Tensor, tag: int = DATA) -> Any:
        return self._call(self._group.recv, tensor, tag)

    def send(self, tensor: torch.Tensor, timeout: timedelta = SEND_END) -> None:
        """Send and wait until the memory may be changed; ConnectionError where the link broke."""
        _wait(self.post_send(tensor), timeout)

    def recv(self, tensor: torch.Tensor, timeout: timedelta = NO_END) -> None:
        """Fill ``tensor``, whose size is exactly what the peer sends; ConnectionError where the link broke."""
        _wait(self.post_recv(tensor), timeout)

    def _call(self, method: Any, tensor: torch.Tensor, tag: int) -> Any:
        try:
            return method([tensor], self._peer, tag)
        except RuntimeError as error:
            raise ConnectionError(_told(error)) from error


class Groups(NamedTuple):
    """Both groups of a link, proven, and what its channel needs of them.

    Attributes:
        outgoing, incoming: in which this end sends, and receives.
        sockets: duplicates of their sockets, for shutdown(2).
        notice, notice_work: where the peer's notice arrives, and its receive, posted on ``outgoing``.
    """

    outgoing: Group
    incoming: Group
    sockets: Sequence[socket.socket]
    notice: torch.Tensor
    notice_work: Any


class CollectiveChannel(QueuedChannel):
    """See the Channel protocol. ``CollectiveEndpoint.open`` makes it.

    Args:
        name: for messages to people.
        generation: of the plan.
        max_tensors: most tensors that a message has; equal on both ends.
        groups: of the link; the channel owns them.
        checked: messages carry checksums; equal on both ends. A damaged one ends the link: where a receive has to
            know the size of what comes, nothing can be asked for again.
    """

    linger_s = 0.05

    def __init__(self, name: str, generation: int, max_tensors: int, groups: Groups, *, checked: bool) -> None:
        super().__init__(name, generation, max_tensors)
        self._out: Any = groups.outgoing  # a Group until release
        self._in: Any = groups.incoming
        self._sockets = groups.sockets
        self._notice, self._notice_work = groups.notice, groups.notice_work
        self._notice_lock = threading.Lock()
        self._expected = Forecast()  # by the peer, of what this end sends
        self._checked, self._sent, self._taken = checked, 0, 0  # messages, each counted by one thread
        self._header_bytes = frame.header_bytes(max_tensors) + checked_frame.SEAL_BYTES * checked
        self._envelope_bytes = _KIND_BYTES + max(self._header_bytes, REASON_BYTES)
        self._receiver = threading.Thread(target=self._receive_loop, name=f"raypipe-recv {name}", daemon=True)
        self.start()
        self._receiver.start()

    # The sending thread.

    def transmit(self, message: frame.Frame) -> None:
        first = self._first(_MESSAGE, checked_frame.sealed(message, self._sent) if self._checked else message.header)
        self._sent += 1
        fits = message.payload_bytes <= _slot(self._expected)
        if fits:
            frame.gather(message, first)
        self._out.send(first)
        self._expected.saw(message.payload_bytes)
        if not fits:
            whole = len(message.buffers) == 1
            payload = torch.frombuffer(message.buffers[0], dtype=torch.uint8) if whole else frame.gather(message)
            self._out.send(payload)

    def goodbye(self, reason: str | None) -> None:
        text = b"" if reason is None else reason.encode()[: REASON_BYTES - 1]
        self._out.send(self._first(_CLOSED if reason is None else _LEFT, text), GOODBYE_END)

    def broke(self, cause: ConnectionError) -> None:
        reason = self._reason()
        if reason is not None:
            self.fail(LinkAbortedError(f"{self.name}: aborted by the peer: {reason}"))
        else:
            super().broke(cause)

    def _first(self, kind: int, content: bytes) -> torch.Tensor:
        """What the peer is waiting for: an empty slot, and an envelope."""
        slot = _slot(self._expected)
        first = bytearray(slot + self._envelope_bytes)
        first[slot] = kind
        start = slot + _KIND_BYTES
        first[start : start + len(content)] = content
        return torch.frombuffer(first, dtype=torch.uint8)

    # Any thread.

    def interrupt(self, reason: str | None) -> None:
        incoming = self._in
        if reason is not None and incoming is not None:
            with contextlib.suppress(ConnectionError):
                incoming.post_send(notice_of(reason), NOTICE)
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        self._receiver.join(END_TIMEOUT_S)
        for sock in self._sockets:
            sock.close()
        # The groups' sockets and threads end with the last reference to them.
        self._notice_work = self._out = self._in = None

    # The receiving thread.

    def _receive_loop(self) -> None:
        one_core()
        expected = Forecast()
        try:
            while self._receive(expected):
                pass
        except LinkError as error:
            self.fail(LinkError(f"{self.name}: {error}"), tell_peer=str(error))
        except ConnectionError as error:
            reason = self._reason()
            if reason is not None:
                self.fail(LinkAbortedError(f"{self.name}: aborted by the peer: {reason}"))
                return
            self.lost(LinkError(f"{self.name}: the peer died or the link broke: {error}"))
        except (RuntimeError, MemoryError) as error:  # no memory for what was announced
            self.fail(LinkError(f"{self.name}: receiving failed: {error!r}"), tell_peer=repr(error))

    def _receive(self, expected: Forecast) -> bool:
        """Take one message off the link; False after the peer's goodbye."""
        slot = _slot(expected)
        first = torch.empty(slot + self._envelope_bytes, dtype=torch.uint8)
        self._in.recv(first)
        kind, content = int(first[slot]), first[slot + _KIND_BYTES :].numpy()
        if kind in (_CLOSED, _LEFT):
            self.peer_ended(_text(content.tobytes()) if kind == _LEFT else None)
            return False
        if kind != _MESSAGE:
            raise LinkError(f"An envelope of kind {kind} came: do both ends run one version?")
        header = content[: self._header_bytes].tobytes()
        head, sealed = self._open(header)
        payload = first[: head.payload_bytes]
        if head.payload_bytes > slot:
            payload = torch.empty(head.payload_bytes, dtype=torch.uint8)
            self._in.recv(payload)
        body = layout.raw_bytes(payload, head.payload_bytes)
        if sealed is not None and checked_frame.checksum([body]) != sealed.payload_checksum:
            raise _damaged(head.action.words)
        if head.generation == self.generation:
            arrived_at_s = time.time()
            self.inbox.deliver(head, frame.decode(head, payload, coded=self.coded), arrived_at_s)
        expected.saw(head.payload_bytes)
        return True

    def _open(self, header: bytes) -> tuple[frame.Head, checked_frame.Seal | None]:
        """A message's header, and its seal on a checked link."""
        known = {"generation": self.generation, "max_tensors": self.max_tensors}
        if not self._checked:
            return frame.parse(header, **known), None
        plain, sealed = header[: -checked_frame.SEAL_BYTES], checked_frame.opened(header)
        if sealed is None:
            raise _damaged(checked_frame.guessed_name(self._taken, plain, **known))
        if sealed.number != self._taken:
            raise LinkError(f"message {sealed.number} came where number {self._taken} was expected.")
        self._taken += 1
        return frame.parse(plain, **known), sealed

    def _reason(self) -> str | None:
        """The peer's reason, None where it sent none: its end is the end of the wait."""
        with self._notice_lock:
            if int(self._notice[0]) == 0 and self._notice_work is not None:
                with contextlib.suppress(ConnectionError):
                    _wait(self._notice_work, NOTICE_WAIT)
                self._notice_work = None
            content = self._notice.numpy().tobytes()
        return _text(content[1:]) if content[0] else None


def _damaged(said: str) -> LinkError:
    return LinkError(
        f"{said} came damaged: its checksum differs from its sender's, and the collective transport cannot ask for it "
        "again. Something between the two hosts changes bits; transport='tcp' asks again."
    )


def _slot(expected: Forecast) -> int:
    """Bytes for the payload in the next transfer."""
    return expected.next_bytes if expected.next_bytes <= SLOT_LIMIT_BYTES else 0


def notice_of(reason: str = "") -> torch.Tensor:
    """A notice to send, or with no reason the memory for one to come."""
    notice = bytearray(REASON_BYTES)
    if reason:
        text = reason.encode()[: REASON_BYTES - 1]
        notice[: len(text) + 1] = b"\1" + text
    return torch.frombuffer(notice, dtype=torch.uint8)


def _text(content: bytes) -> str:
    return content.rstrip(b"\0").decode(errors="replace")


def _wait(work: Any, timeout: timedelta) -> None:
    try:
        work.wait(timeout)
    except RuntimeError as error:
        raise ConnectionError(_told(error)) from error


def _told(error: RuntimeError) -> str:
    """What gloo says, without its file names and its advice."""
    return str(error).partition("] ")[2].partition(". ")[0] or str(error)
