"""SocketChannel: one worker's end of a link over TCP or a Unix socket, with one connection per direction.

    send() --> [queue] --> sending thread ==out==>              peer's receiving thread --> inbox --> recv()
                                    ^-------out-------  abort notice
    recv() <-- inbox <-- receiving thread  <==in===             peer's sending thread
                                    -------in-------->  abort notice

A connection carries frames (messages) in one direction. Its other direction, *the way back*, carries only the reason of
an abort: there the reason does not queue after megabytes of activations. An end that finds the link broken reads the
reason there. On a checked link frames carry checksums (engine/messages/checked_frame.py); a mismatch ends the link.

Sockets stay blocking and are woken by shutdown(2), which works from any thread.

Messages are received into memory of a BufferPool, which reuses large blocks:

    take() --> block, lease --> tensors of the stage, autograd's saved views, ...
      ^                                | the last of them is freed, and the lease with it
      +--------- free blocks <---------+

The C library itself reuses memory of up to 32 MiB. It returns larger memory to the system, and the next message needs
new pages, which took 60 % of the time to receive 64 MiB.

A *lease* is a ctypes array over a block in use. ``torch.frombuffer`` makes a storage of it, which holds a reference to
the lease until the last tensor, view or graph that uses the storage is freed. Then the finalizer of the lease returns
the block to the free ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from raypipe.engine.codec.host import one_core
from raypipe.engine.messages import checked_frame, frame
from raypipe.engine.messages.record import raw_bytes
from raypipe.errors import LinkAbortedError, LinkError
from raypipe.runtime.transport.endpoint import is_checked
from raypipe.runtime.transport.queued_channel import END_TIMEOUT_S, QueuedChannel

REUSE_BYTES = (32 << 20) + 1
"""Smallest payload whose memory is reused: glibc's largest threshold for returning memory is 32 MiB."""

KEPT_BLOCKS = 2
"""Free blocks that one direction of a link keeps; in a steady pipeline one is filled while another is released."""


class BufferPool:
    """Memory for the payloads of one direction of a link.

    Args:
        reuse_bytes: size in bytes from which a payload gets reused memory, if available.
        kept_blocks: maximum number of free blocks.
    """

    def __init__(self, reuse_bytes: int = REUSE_BYTES, kept_blocks: int = KEPT_BLOCKS) -> None:
        self._reuse_bytes = reuse_bytes
        # Finalizers put blocks here, from any thread and at any time, also inside take(): so there is no lock,
        # only atomic steps. The oldest free block is dropped when there are too many.
        self._free: deque[torch.Tensor] = deque(maxlen=kept_blocks)

    def take(self, nbytes: int) -> torch.Tensor:
        """Return an unused uint8 tensor of ``nbytes``, aligned to 64 bytes; reused memory cannot be resized."""
        if nbytes < self._reuse_bytes:
            return torch.empty(nbytes, dtype=torch.uint8)
        block = self._pop(nbytes)
        if block is None:
            block = torch.empty(nbytes, dtype=torch.uint8)
        lease = (ctypes.c_ubyte * nbytes).from_address(block.data_ptr())
        weakref.finalize(lease, self._free.append, block).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8)

    def _pop(self, nbytes: int) -> torch.Tensor | None:
        """Return a free block of ``nbytes`` to twice that size, or None; drop blocks that do not fit until one does."""
        while self._free:
            try:
                block = self._free.pop()
            except IndexError:
                break
            if nbytes <= block.numel() <= 2 * nbytes:
                return block
        return None


class RecvBuffer(NamedTuple):
    """Memory for one message, and tensors that are views of the memory, created before the payload arrives.

    An encoded message is received into separate memory, and is decoded once it is complete.

    Attributes:
        records: shapes and types of the message's tensors.
        memory, payload: the memory, as a memoryview and as a uint8 tensor.
        tensors: tensors of the message, as views of the memory; None for an encoded message.
    """

    records: tuple[frame.TensorRecord | None, ...]
    memory: memoryview
    payload: torch.Tensor
    tensors: tuple[torch.Tensor | None, ...] | None

    @classmethod
    def prepare(cls, head: frame.Head, memory: BufferPool) -> RecvBuffer:
        """Allocate memory and tensors for a message whose header has the shapes and types of ``head``."""
        coded = frame.is_coded(head)
        return cls.over(
            head, torch.empty(head.payload_bytes, dtype=torch.uint8) if coded else memory.take(head.payload_bytes)
        )

    @classmethod
    def over(cls, head: frame.Head, payload: torch.Tensor) -> RecvBuffer:
        """Make a buffer of the memory of ``payload``: uint8, shape (head.payload_bytes,), without other users."""
        tensors = None if frame.is_coded(head) else frame.decode(head, payload)
        return cls(head.records, raw_bytes(payload, head.payload_bytes), payload, tensors)

    def finish(self, head: frame.Head, memory: BufferPool, *, coded: bool = False) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors of a message whose bytes have all arrived; ``coded`` leaves them encoded.

        ``memory`` allocates the decoded tensors, see ``frame.decode``.
        """
        if self.tensors is not None:
            return self.tensors
        return frame.decode(head, self.payload, memory.take, coded=coded)


AHEAD_BYTES = 1 << 20
"""Largest message for which memory is allocated before it arrives."""

REASON_BYTES = 1024
_LEFT = "\0"  # marks the reason of a peer that left in good order: its earlier messages may still be taken
_BUFFERS_PER_CALL = 512  # IOV_MAX is 1024 on Linux and macOS


class Connections(NamedTuple):
    """Connections of a link after successful handshakes: blocking sockets, which the link's channel owns from then on.

    Attributes:
        name: name of the channel, for errors.
        form: see FrameFormat.
        outgoing, incoming: connections on which this end sends and receives messages.
    """

    name: str
    form: frame.FrameFormat
    outgoing: socket.socket
    incoming: socket.socket


class SocketChannel(QueuedChannel):
    """Channel over TCP or a Unix socket, with one connection per direction; see the Channel protocol.

    Args:
        connections: results of ``open_links``.
        checksum: see PipelineConfig.link_checksum; "auto" checks TCP only, since Unix sockets do not leave the host.

    Attributes:
        kinds: "tcp" or "unix", for outgoing and incoming.
        ahead_bytes: largest message for which memory is allocated before it arrives.
    """

    ahead_bytes = AHEAD_BYTES

    def __init__(self, connections: Connections, checksum: str = "auto") -> None:
        name, form, self._out, self._in = connections
        super().__init__(name, form)
        self.kinds = (_kind(self._out), _kind(self._in))
        self._checked = [is_checked(checksum, same_host=kind == "unix") for kind in self.kinds]  # out, in
        self._buffer: RecvBuffer | None = None  # these two are the receiving thread's
        self._pool = BufferPool()
        self._receiver = threading.Thread(target=self._receive_loop, name=f"raypipe-recv {name}", daemon=True)
        self.start()
        self._receiver.start()

    # The sending thread.

    def transmit(self, message: frame.Frame) -> None:
        self.write(self.sealed(message), *self.placed(message))

    def placed(self, message: frame.Frame) -> Sequence[memoryview]:
        """Return the bytes that follow the header of a message: its payload."""
        return message.buffers

    def sealed(self, message: frame.Frame) -> bytes:
        """Return the header of a message, with checksums if the outgoing connection is checked."""
        return checked_frame.sealed(message) if self._checked[0] else message.header

    def write(self, header: bytes, *buffers: memoryview) -> None:
        """Send these bytes; raise ConnectionError if the connection broke."""
        with _as_broken():
            _send_all(self._out, deque((memoryview(header), *buffers)))

    def goodbye(self, reason: str | None) -> None:
        """End the outgoing connection after all messages; first write the reason, if any, to the other connection."""
        if reason is not None:
            self._notify(_LEFT + reason)
        with _as_broken():
            self._out.shutdown(socket.SHUT_WR)

    def broke(self, cause: ConnectionError) -> None:
        """Report the peer's abort if the peer left a reason; otherwise refuse further messages."""
        reason = self._reason()
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
        self._receiver.join(END_TIMEOUT_S)
        for sock in (self._out, self._in):
            sock.close()

    def _notify(self, reason: str) -> None:
        """Write the reason to the way back of the incoming connection; the peer reads it when that connection ends."""
        with contextlib.suppress(OSError):
            self._in.send(reason.encode()[:REASON_BYTES] or b" ", socket.MSG_DONTWAIT)

    def _reason(self) -> str | None:
        """Return the reason of the peer's abort, or None; other threads can still read the reason afterwards."""
        with contextlib.suppress(OSError):
            reason = self._out.recv(REASON_BYTES, socket.MSG_DONTWAIT | socket.MSG_PEEK)
            return reason.decode(errors="replace") or None
        return None

    # The receiving thread.

    def _receive_loop(self) -> None:
        one_core()
        header = bytearray(frame.header_bytes(self.form.max_tensors) + checked_frame.SEAL_BYTES * self._checked[1])
        try:
            while self._receive(header):
                pass
        except LinkError as error:
            self.fail(LinkError(f"{self.name}: {error}"), peer_reason=str(error))
            return
        except (RuntimeError, MemoryError) as error:  # no memory for the announced payload
            self.fail(LinkError(f"{self.name}: receiving failed: {error!r}"), peer_reason=repr(error))
            return
        except OSError as error:
            ending = f"the link broke: {error}."
        else:
            ending = "the peer closed the link or died."
        reason = self._reason()
        if reason is not None:
            aborted = LinkAbortedError(f"{self.name}: aborted by the peer: {reason.removeprefix(_LEFT)}")
            self.fail(aborted, keep=reason.startswith(_LEFT))
        else:
            self.lost(LinkError(f"{self.name}: {ending}"))

    def _receive(self, header: bytearray) -> bool:
        """Receive one message into the inbox; return False if the connection ended. ``header`` is reused memory."""
        if not receive_exactly(self._in, memoryview(header)):
            return False
        head, payload_checksum = checked_frame.parse(memoryview(header), self.form, checked=self._checked[1])
        buffer = self.receive_payload(head)
        arrived_at_s = time.time()
        checked_frame.check_payload(head, [buffer.memory], payload_checksum)
        if head.generation == self.form.generation:
            self.inbox.deliver(head, buffer.finish(head, self._pool, coded=self.coded), arrived_at_s)
        if head.payload_bytes <= self.ahead_bytes:
            # The next message is likely of the same shape: allocate for it now, while no thread waits.
            self._buffer = RecvBuffer.prepare(head, self._pool)
        return True

    def receive_payload(self, head: frame.Head) -> RecvBuffer:
        """Receive the payload of a message, after its header; return the memory that holds it."""
        buffer, self._buffer = self._buffer, None
        if buffer is None or buffer.records != head.records:
            buffer = RecvBuffer.prepare(head, self._pool)
        if head.payload_bytes:
            self.fill(head, buffer)
        return buffer

    def fill(self, head: frame.Head, buffer: RecvBuffer) -> None:
        """Receive a payload that is not empty into ``buffer``."""
        if not receive_exactly(self._in, buffer.memory):
            raise ConnectionError(f"it ended inside {head.action.words}")


def _kind(sock: socket.socket) -> str:
    return "unix" if sock.family == getattr(socket, "AF_UNIX", None) else "tcp"


@contextlib.contextmanager
def _as_broken() -> Iterator[None]:
    """Turn any OSError of a socket into a ConnectionError."""
    try:
        yield
    except ConnectionError:
        raise
    except OSError as error:
        raise ConnectionError(str(error)) from error


def _send_all(sock: socket.socket, buffers: deque[memoryview]) -> None:
    """Write all of ``buffers``; a shutdown(2) from another thread ends this call with an OSError."""
    while buffers:
        sent_bytes = sock.sendmsg(itertools.islice(buffers, _BUFFERS_PER_CALL))
        while buffers and sent_bytes >= buffers[0].nbytes:
            sent_bytes -= buffers.popleft().nbytes
        if sent_bytes:
            buffers[0] = buffers[0][sent_bytes:]


def receive_exactly(sock: socket.socket, target: memoryview) -> bool:
    """Fill ``target`` from a socket; return False if the connection ended before the first byte.

    Raises:
        ConnectionError: the connection ended after the first byte.
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
