"""SocketChannel: one worker's end of a link over TCP or a Unix socket, with one connection per direction.

    send() --> [orders] --> sending thread ==out==>             peer's receiving thread --> inbox --> recv()
                                    ^-------out-------  abort notice
    recv() <-- inbox <-- receiving thread  <==in===             peer's sending thread
                                    -------in-------->  abort notice

A connection carries frames one way. The way back is empty but for the reason of an abort, which there does not queue
behind megabytes of activations; whoever finds the link broken looks there. On a checked link it also carries notes of
what was taken and what is asked for again (again.py), and a third thread waits for those.

Sockets stay blocking and are woken by shutdown(2), which works from any thread.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator

from raypipe.engine.codec.host import one_core
from raypipe.engine.messages import checked_frame, frame
from raypipe.errors import LinkAbortedError, LinkError
from raypipe.runtime.links.again import MARK_BYTES, Kept, Taken, WayBack
from raypipe.runtime.links.endpoint import is_checked
from raypipe.runtime.links.landing import Landing, Memory
from raypipe.runtime.links.queued_channel import QueuedChannel

__all__ = ["SocketChannel", "receive_exactly"]

LANDING_BYTES = 1 << 20
"""Largest message that is given memory ahead of its arrival."""

AGAIN_TIMEOUT_S = 30.0
"""Longest silence after a message was asked for again."""

REASON_BYTES = 1024
_LEFT = "\0"  # marks the reason of a peer that left in good order: what it sent before may still be taken
_LOOK_BYTES = 1 << 16
_BUFFERS_PER_CALL = 512  # IOV_MAX is 1024 on Linux and macOS


class SocketChannel(QueuedChannel):
    """See the Channel protocol. ``open_links`` makes both connections and hands them over.

    Args:
        name: for messages to people.
        generation: of the plan; older messages are dropped, a newer one is an error.
        max_tensors: most tensors that a message of this channel has; equal on both ends.
        outgoing, incoming: connected blocking sockets, which the channel owns from now on.
        checksum: see PipelineConfig.link_checksum; "auto" checks TCP, for a Unix socket does not leave its host.

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
        checksum: str = "auto",
    ) -> None:
        super().__init__(name, generation, max_tensors)
        self._out, self._in = outgoing, incoming
        self.kinds = (_kind(outgoing), _kind(incoming))
        self._back = WayBack(outgoing)
        checks = [is_checked(checksum, same_host=kind == "unix") for kind in self.kinds]
        self._kept = Kept() if checks[0] else None
        self._taken = Taken(incoming) if checks[1] else None
        self._landing: Landing | None = None  # these two are the receiving thread's
        self._memory = Memory()
        self._threads = [threading.Thread(target=self._receive_loop, name=f"raypipe-recv {name}", daemon=True)]
        if self._kept is not None:
            hearing = threading.Thread(
                target=self._hear_loop, args=(self._kept,), name=f"raypipe-hear {name}", daemon=True
            )
            self._threads.append(hearing)
        self.start()
        for thread in self._threads:
            thread.start()

    # The sending thread.

    def transmit(self, message: frame.Frame) -> None:
        self.attend()
        header = message.header if self._kept is None else self._kept.add(message)
        with _as_broken():
            _send_all(self._out, deque((memoryview(header), *message.buffers)))

    def write(self, header: bytes) -> None:
        """Send these bytes alone."""
        with _as_broken():
            _send_all(self._out, deque([memoryview(header)]))

    def attend(self) -> None:
        """Send again what came damaged, and all behind it."""
        while self._kept is not None and (asked := self._kept.take_asked()) is not None:
            with _as_broken():
                _send_all(self._out, deque([memoryview(asked.mark)]))
                for header, buffers in self._kept.since(asked.number):
                    _send_all(self._out, deque((memoryview(header), *buffers)))

    def goodbye(self, reason: str | None) -> None:
        """The connection ends after the messages, and the peer that finds its end looks for a notice."""
        while self._kept is not None and not self._kept.settle():
            self.attend()
        if reason is not None:
            self._notify(_LEFT + reason)
        with _as_broken():
            self._out.shutdown(socket.SHUT_WR)

    def broke(self, cause: ConnectionError) -> None:
        """The peer aborted, or takes no more messages: what it still sends belongs to the receiving thread."""
        reason = self._back.reason()
        if reason is not None:
            self.fail(LinkAbortedError(f"{self.name}: aborted by the peer: {reason.removeprefix(_LEFT)}"))
        else:
            super().broke(cause)

    # Any thread.

    def interrupt(self, reason: str | None) -> None:
        if reason is not None:
            self._notify(reason)
        for sock in (self._out, self._in):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        for thread in self._threads:
            thread.join()
        for sock in (self._out, self._in):
            sock.close()

    def _notify(self, reason: str) -> None:
        """Leave the reason on the way back, where the peer looks when its connection ends."""
        with contextlib.suppress(OSError):
            self._in.send(reason.encode()[:REASON_BYTES] or b" ", socket.MSG_DONTWAIT)

    # The thread that hears what the peer took.

    def _hear_loop(self, kept: Kept) -> None:
        waiting = select.poll()
        waiting.register(self._out, select.POLLIN)
        try:
            while not self._back.ended:
                waiting.poll()
                if kept.hear(self._back.read()):
                    self.wake()
        except LinkError as error:
            self.fail(LinkError(f"{self.name}: {error}"), tell_peer=str(error))
        finally:
            kept.end()

    # The receiving thread.

    def _receive_loop(self) -> None:
        one_core()
        header = bytearray(frame.header_bytes(self.max_tensors) + (checked_frame.SEAL_BYTES if self._taken else 0))
        try:
            while self._receive(header):
                pass
        except LinkError as error:
            self.fail(LinkError(f"{self.name}: {error}"), tell_peer=str(error))
            return
        except (RuntimeError, MemoryError) as error:  # no memory for what was announced
            self.fail(LinkError(f"{self.name}: receiving failed: {error!r}"), tell_peer=repr(error))
            return
        except OSError as error:
            ending = f"the link broke: {error}."
        else:
            ending = "the peer closed the link or died."
        reason = self._back.reason()
        if reason is not None:
            told = LinkAbortedError(f"{self.name}: aborted by the peer: {reason.removeprefix(_LEFT)}")
            self.fail(told, keep=reason.startswith(_LEFT))
        else:
            self.lost(LinkError(f"{self.name}: {ending}"))

    def _receive(self, header: bytearray) -> bool:
        """Take one message off the connection; False at its end."""
        if not receive_exactly(self._in, memoryview(header)):
            return False
        taken, sealed = self._taken, None
        plain = memoryview(header)
        if taken is not None:
            sealed, plain = checked_frame.opened(header), plain[: -checked_frame.SEAL_BYTES]
            if sealed is None:
                known = {"generation": self.generation, "max_tensors": self.max_tensors}
                self._ask_again(taken, checked_frame.guessed_name(taken.number, plain, **known))
                return True
            if sealed.number != taken.number:
                raise LinkError(f"message {sealed.number} came where number {taken.number} was expected.")
        head = frame.parse(plain, generation=self.generation, max_tensors=self.max_tensors)
        landing, self._landing = self._landing, None
        if landing is None or landing.records != head.records:
            landing = Landing.prepare(head, self._memory)
        if head.payload_bytes and not receive_exactly(self._in, landing.memory):
            raise ConnectionError(f"it ended inside {head.action.words}")
        arrived_at_s = time.time()
        if taken is not None and sealed is not None:
            if checked_frame.checksum([landing.memory]) != sealed.payload_checksum:
                self._ask_again(taken, head.action.words)
                return True
            taken.take()
        if head.generation == self.generation:
            self.deliver(head, landing.landed(head, self._memory, coded=self.coded), arrived_at_s)
        if head.payload_bytes <= LANDING_BYTES:
            # The next message is likely of the same shape: make room for it now, while nobody waits.
            self._landing = Landing.prepare(head, self._memory)
        return True

    def _ask_again(self, taken: Taken, said: str) -> None:
        """Ask for a message once more, and drop what comes before it."""
        mark = taken.ask_again(said)
        self.damaged += 1
        waiting = select.poll()
        waiting.register(self._in, select.POLLIN)
        tail = b""  # of what was dropped: the beginning of the mark may lie in it
        while True:
            if not waiting.poll(AGAIN_TIMEOUT_S * 1000):
                raise LinkError(f"{said} came damaged and was not sent again within {AGAIN_TIMEOUT_S:g} s.")
            seen = self._in.recv(_LOOK_BYTES, socket.MSG_PEEK)
            if not seen:
                raise ConnectionError(f"it ended after {said} came damaged")
            at = (tail + seen).find(mark)
            dropped = len(seen) if at < 0 else at + MARK_BYTES - len(tail)
            receive_exactly(self._in, memoryview(bytearray(dropped)))
            if at >= 0:
                return
            tail = (tail + seen)[1 - MARK_BYTES :]


def _kind(sock: socket.socket) -> str:
    return "unix" if sock.family == getattr(socket, "AF_UNIX", None) else "tcp"


@contextlib.contextmanager
def _as_broken() -> Iterator[None]:
    """Whatever the system says of a socket, the link broke."""
    try:
        yield
    except ConnectionError:
        raise
    except OSError as error:
        raise ConnectionError(str(error)) from error


def _send_all(sock: socket.socket, buffers: deque[memoryview]) -> None:
    """Write all of ``buffers``; shutdown(2) from another thread ends it with an OSError."""
    while buffers:
        sent_bytes = sock.sendmsg(itertools.islice(buffers, _BUFFERS_PER_CALL))
        while buffers and sent_bytes >= buffers[0].nbytes:
            sent_bytes -= buffers.popleft().nbytes
        if sent_bytes:
            buffers[0] = buffers[0][sent_bytes:]


def receive_exactly(sock: socket.socket, target: memoryview) -> bool:
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
