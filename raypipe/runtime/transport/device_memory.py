"""Links between devices of one host, through device memory of the receiver that the sender opens (CUDA IPC).

    sender                                            receiver, who owns the slots
    payload --copy--> free slot, finished
    number of the slot ========bell (socket)=======>  slot --copy--> payload, finished
    the slot is free again <=======bell============   number of the slot

A payload larger than a slot goes in pieces. Nothing in device memory marks a slot: each end waits for its own copies
only, in the threads of the link, and for the other end at the bell. CUDA can also share events, but a stream that waits
for an event of a process that was killed may wait for ever, and with it all later work of the device. The bell ends
with the link or the process at its other end.

Both ends try to open each other's memory when a link is opened, because nothing else shows whether they can: peer
access, hidden GPUs and containers all matter. If one cannot, neither uses it.

Memory of a link is freed after the sender has closed it: until then the sender may be writing to it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
from collections import deque

import torch

from raypipe.engine.device.device import Device, StreamName
from raypipe.errors import LinkError
from raypipe.runtime.transport.process_group_channel import PayloadGroup
from raypipe.runtime.transport.socket_channel import Connections, receive_exactly

SLOTS = 4
SLOT_BYTES = 4 << 20
FILLED = "slots: announced once they are filled"
EMPTIED = "slots: given back once they are copied"
WRITTEN = "slots: offered once their proof is written"
READ = "slots: trusted once their proof is read"

_PROOF_BYTES = 16
_OFFER = struct.Struct(f"<{_PROOF_BYTES}sH")  # random bytes at the begin of the memory; size of the handle
_CANNOT = (ImportError, MemoryError, OSError, RuntimeError)

_LENT: dict[int, torch.Tensor] = {}
"""Memory of ended links that their senders have not closed, by the lease of each."""
_LOCK = threading.Lock()


class SlotGroup:
    """Slots of one direction at one of its ends; see PayloadGroup.

    Args:
        memory: SLOTS slots of SLOT_BYTES each.
        bell: socket to the other end.
        lease: descriptor of a pipe from the sender, who writes to it when it has closed the memory.
        owner: True at the receiver, who allocated the memory.
    """

    def __init__(self, device: Device, memory: torch.Tensor, bell: socket.socket, lease: int, *, owner: bool) -> None:
        self._device, self._bell, self._lease, self._owner = device, bell, lease, owner
        self._memory: torch.Tensor | None = memory
        self._free = deque(range(SLOTS))

    @classmethod
    def offer(cls, sock: socket.socket, device: Device) -> SlotGroup | None:
        """Allocate memory and offer it to the peer; return the receiver's end, or None if the device shares none."""
        proof = secrets.token_bytes(_PROOF_BYTES)
        try:
            with device.prepare_thread(), device.stream(StreamName.COPY_IN):
                memory, handle = device.share(SLOTS * SLOT_BYTES)
                memory[:_PROOF_BYTES].copy_(torch.frombuffer(bytearray(proof), dtype=torch.uint8))
                device.finish(device.mark(), WRITTEN)
        except _CANNOT:
            sock.sendall(_OFFER.pack(proof, 0))
            return None
        near, far = socket.socketpair()
        read, write = os.pipe()
        os.set_blocking(read, False)
        group = cls(device, memory, near, read, owner=True)
        try:
            socket.send_fds(sock, [_OFFER.pack(proof, len(handle))], [far.fileno(), write])
            sock.sendall(handle)
        except BaseException:
            group.close()
            raise
        finally:
            far.close()
            os.close(write)
        return group

    @classmethod
    def accept(cls, sock: socket.socket, device: Device) -> SlotGroup | None:
        """Open the memory that the peer offers; return the sender's end, or None if it offers none or this one fails.

        Raises:
            OSError: the connection ended.
        """
        offered, descriptors, _, _ = socket.recv_fds(sock, _OFFER.size, 2, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
        try:
            if len(offered) < _OFFER.size:
                raise ConnectionError("it closed the link")
            proof, handle_bytes = _OFFER.unpack(offered)
            handle = bytearray(handle_bytes)
            if handle and not receive_exactly(sock, memoryview(handle)):
                raise ConnectionError("it closed the link")
            if len(descriptors) < 2:
                return None
            with contextlib.suppress(*_CANNOT), device.prepare_thread(), device.stream(StreamName.COPY_OUT):
                memory = device.open_shared(bytes(handle), SLOTS * SLOT_BYTES)
                found = device.staging(_PROOF_BYTES).copy_(memory[:_PROOF_BYTES], non_blocking=True)
                device.finish(device.mark(), READ)
                if bytes(found.tolist()) == proof:
                    bell, lease = socket.socket(fileno=descriptors.pop(0)), descriptors.pop()
                    return cls(device, memory, bell, lease, owner=False)
            return None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def send(self, payload: torch.Tensor) -> None:
        for part in payload.split(SLOT_BYTES):
            slot = self._free.popleft() if self._free else self._read_slot()
            self._slot(slot, part).copy_(part)
            self._device.finish(self._device.mark(), FILLED)
            self._write_slot(slot)

    def recv(self, payload: torch.Tensor) -> None:
        for part in payload.split(SLOT_BYTES):
            slot = self._read_slot()
            part.copy_(self._slot(slot, part))
            self._device.finish(self._device.mark(), EMPTIED)
            with contextlib.suppress(ConnectionError):  # a sender that has left needs it no more
                self._write_slot(slot)

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._bell.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the memory; that of the receiver is freed once the sender has closed it too."""
        memory, self._memory = self._memory, None
        self._bell.close()
        if memory is not None and self._owner:
            with _LOCK:
                _LENT[self._lease] = memory
        elif memory is not None:
            del memory
            with contextlib.suppress(OSError):
                os.write(self._lease, b"\0")  # as well as its end: a fork of this process has it open too
            os.close(self._lease)
        reclaim()

    def _slot(self, slot: int, part: torch.Tensor) -> torch.Tensor:
        """Return the part of a slot that holds a piece of a payload."""
        if self._memory is None:
            raise ConnectionError("it was closed")
        return self._memory[slot * SLOT_BYTES :][: part.numel()]

    def _write_slot(self, slot: int) -> None:
        try:
            self._bell.sendall(bytes([slot]))
        except OSError as error:
            raise ConnectionError(str(error)) from error

    def _read_slot(self) -> int:
        """Wait for the number of a slot; raise ConnectionError if the link or the peer ended."""
        try:
            number = self._bell.recv(1)
        except OSError as error:
            raise ConnectionError(str(error)) from error
        if not number:
            raise ConnectionError("its bell ended")
        if number[0] >= SLOTS:
            raise LinkError(f"the peer refers to slot {number[0]} of {SLOTS} slots in device memory.")
        return number[0]


def reclaim() -> None:
    """Free the memory of ended links whose senders have closed it or died."""
    with _LOCK:
        for lease in list(_LENT):
            with contextlib.suppress(BlockingIOError):
                os.read(lease, 1)
                os.close(lease)
                del _LENT[lease]


def share_slots(ends: Connections, device: Device, timeout_s: float) -> tuple[PayloadGroup, PayloadGroup] | None:
    """Share device memory for both directions of a link, while the peer does the same.

    Args:
        ends: connections over Unix sockets, which stay open.

    Returns:
        (group for sending, group for receiving); None at both ends if the devices cannot share memory.

    Raises:
        LinkError: the peer ended, or did not answer in time.
    """
    reclaim()
    out, into = ends.outgoing, ends.incoming
    incoming = outgoing = None
    agreed = False
    try:
        for sock in (out, into):
            sock.settimeout(timeout_s)
        incoming = SlotGroup.offer(out, device)
        outgoing = SlotGroup.accept(into, device)
        out.sendall(bytes([incoming is not None and outgoing is not None]))
        verdict = bytearray(1)
        if not receive_exactly(into, memoryview(verdict)):
            raise ConnectionError("it closed the link")
        for sock in (out, into):
            sock.settimeout(None)
        if incoming is None or outgoing is None or not verdict[0]:
            return None
        agreed = True
        return outgoing, incoming
    except OSError as error:
        raise LinkError(f"{ends.name}: the peer ended while memory of devices was shared: {error}.") from error
    finally:
        for group in (incoming, outgoing):
            if group is not None and not agreed:
                group.close()
