"""SharedMemoryChannel: a link between processes of one host whose large payloads go through shared memory.

    sender                                          receiver
    payload --copy--> free slot                     tensors are views of the slot, and hold a lease of it
    header, number of the slot ===Unix socket===>   ...
    the slot is free again <---- its byte, 0 <----  the last tensor, view or graph that uses the slot is freed

Each direction that has a Unix socket has a *segment* of its own: a memfd, which has no name and ends with the last
process that maps it, however that process ends. The sender creates it and passes its descriptor over the socket:

    | page: byte 0: 1 once the receiver has mapped it; byte k: 1 while slot k is in use | slot 1 | ... | slot SLOTS |

Nothing waits for shared memory: if the receiver has not mapped the segment, or no slot is free, the payload follows its
header over the socket. So all waits, aborts and ends are those of SocketChannel. Slots take no memory before their
first use; the lowest free one is used first.

A segment's bytes need no fence: both ends pass the interpreter lock between the payload and the byte of its slot.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import weakref

import torch

from raypipe.engine.messages import frame
from raypipe.errors import LinkError
from raypipe.runtime.transport.socket_channel import (
    KEPT_BLOCKS,
    REUSE_BYTES,
    Connections,
    RecvBuffer,
    SocketChannel,
    receive_exactly,
)

SHARED_BYTES = 512 << 10
"""Smallest payload that goes through a segment; smaller ones take less processor time over the socket."""

SLOTS = 16
"""Payloads of a direction that are in a segment at a time: those on their way, and those that the receiver uses."""

SLOT_BYTES = 1 << 30
"""Address space of a slot; larger payloads go over the socket."""

_PAGE_BYTES = mmap.PAGESIZE
_SEGMENT_BYTES = _PAGE_BYTES + SLOTS * SLOT_BYTES
_SOCKET = b"\0"  # in place of the number of a slot: the payload follows on the socket


def _begin(slot: int) -> int:
    """Return the offset in bytes of a slot in its segment; ``slot`` counts from 1."""
    return _PAGE_BYTES + (slot - 1) * SLOT_BYTES


class SendSegment:
    """Sender's end of a segment."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        places = [(_begin(slot), SLOT_BYTES) for slot in range(1, SLOTS + 1)]
        self._slots = [torch.frombuffer(memory, dtype=torch.uint8, offset=at, count=n) for at, n in places]

    @classmethod
    def offer(cls, sock: socket.socket) -> SendSegment | None:
        """Create a segment and send its descriptor; return None if this system permits no segment.

        The receiver gets one byte in either case.
        """
        with contextlib.suppress(OSError, AttributeError):  # no memfd, too little address space, no such descriptor
            descriptor = os.memfd_create("raypipe-link", os.MFD_CLOEXEC)
            try:
                os.ftruncate(descriptor, _SEGMENT_BYTES)
                made = cls(mmap.mmap(descriptor, _SEGMENT_BYTES))
                socket.send_fds(sock, [_SOCKET], [descriptor])
                return made
            finally:
                os.close(descriptor)
        with contextlib.suppress(OSError):  # a broken connection is the sending thread's to report
            sock.send(_SOCKET)
        return None

    def put(self, message: frame.Frame) -> int:
        """Copy the payload of a message into a free slot; return the slot's number, or 0 if no slot is free."""
        memory = self._memory
        slot = memory.find(b"\0", 1, SLOTS + 1) if memory[0] else -1
        if slot < 0 or message.payload_bytes > SLOT_BYTES:
            return 0
        memory[slot] = 1
        frame.gather(message, self._slots[slot - 1])
        return slot


class RecvSegment:
    """Receiver's end of a segment."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    @classmethod
    def accept(cls, sock: socket.socket) -> RecvSegment | None:
        """Receive the descriptor of a segment and map it; return None without one, or if it cannot be mapped.

        The sender uses the segment only after it has been mapped here.
        """
        with contextlib.suppress(OSError, ValueError, AttributeError):
            _, descriptors, _, _ = socket.recv_fds(sock, len(_SOCKET), 1, socket.MSG_CMSG_CLOEXEC)
            for descriptor in descriptors:
                try:
                    memory = mmap.mmap(descriptor, _SEGMENT_BYTES)
                finally:
                    os.close(descriptor)
                memory[0] = 1
                return cls(memory)
        return None

    def lease(self, slot: int, nbytes: int) -> torch.Tensor:
        """Return the first ``nbytes`` of a slot as a uint8 tensor; the slot is free once their storage is freed."""
        lease = (ctypes.c_ubyte * nbytes).from_buffer(self._memory, _begin(slot))
        weakref.finalize(lease, _release, self._memory, slot, nbytes, os.getpid()).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8)


def _release(memory: mmap.mmap, slot: int, nbytes: int, holder: int) -> None:
    """Mark a slot as free; all but the first slots return large memory to the system, as BufferPool does.

    Args:
        holder: number of the process that leased the slot. A fork of it, such as a worker of a DataLoader, has a copy
            of the lease, whose end is not the end of the lease.
    """
    if os.getpid() != holder:
        return
    if slot > KEPT_BLOCKS and nbytes >= REUSE_BYTES:
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_REMOVE, _begin(slot), nbytes)
    memory[slot] = 0


class SharedMemoryChannel(SocketChannel):
    """Channel over sockets; large payloads of a direction that has a Unix socket go through shared memory.

    Args:
        connections, checksum: see SocketChannel; both ends must be of this class.
    """

    def __init__(self, connections: Connections, checksum: str = "auto") -> None:
        unix = connections.outgoing.family == socket.AF_UNIX
        self._slots_out = SendSegment.offer(connections.outgoing) if unix else None
        self._slots_in: RecvSegment | None = None
        super().__init__(connections, checksum)

    # The sending thread.

    def placed(self, message: frame.Frame) -> list[memoryview]:
        if self.kinds[0] != "unix" or message.payload_bytes < SHARED_BYTES:
            return message.buffers
        slot = 0 if self._slots_out is None else self._slots_out.put(message)
        return [memoryview(bytes([slot])), *([] if slot else message.buffers)]

    # Any thread.

    def release(self) -> None:
        super().release()
        self._slots_out = self._slots_in = None

    # The receiving thread.

    def _receive_loop(self) -> None:
        if self.kinds[1] == "unix":
            self.ahead_bytes = SHARED_BYTES - 1
            self._slots_in = RecvSegment.accept(self._in)
        super()._receive_loop()

    def receive_payload(self, head: frame.Head) -> RecvBuffer:
        if self.kinds[1] != "unix" or head.payload_bytes < SHARED_BYTES:
            return super().receive_payload(head)
        place = bytearray(len(_SOCKET))
        if not receive_exactly(self._in, memoryview(place)):
            raise ConnectionError(f"it ended inside {head.action.words}")
        (slot,) = place
        if slot == 0:
            return super().receive_payload(head)
        if self._slots_in is None or slot > SLOTS or head.payload_bytes > SLOT_BYTES:
            raise LinkError(f"{head.action.words} refers to slot {slot} of a segment that has no such slot.")
        return RecvBuffer.over(head, self._slots_in.lease(slot, head.payload_bytes))
