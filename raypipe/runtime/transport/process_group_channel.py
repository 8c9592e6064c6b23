"""Channels whose payloads go through process groups of torch; headers, handshakes and goodbyes go over sockets.

    sender              header ==socket==> | payload ==group==>
    receiver            header <==socket== | payload <==group== | decode --> inbox --> recv()

between devices:

    compute     send() mark ...
    sender              wait for mark | encode, gather | header ==socket==> | payload ==group==>
    receiver            header <==socket== | payload <==group== | finished | decode --> inbox --> recv()

The header gives the size of the payload before a receive is posted; deadlines, goodbyes, reasons of an abort and the
end of a process are handled by ``socket_channel``. A group only moves bytes in one direction (``PayloadGroup``): gloo's
and NCCL's are in process_group.py, the one over memory that both ends open is in device_memory.py. Each direction has
its own group, so that neither waits for the other.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from raypipe.engine.codec import Codec
from raypipe.engine.codec.codec import CodedTensor
from raypipe.engine.device.device import Device, Mark, StreamName
from raypipe.engine.messages import frame
from raypipe.engine.messages.channel import Payload
from raypipe.engine.messages.frame import decode_on, encode_on
from raypipe.ir.schedule import Action
from raypipe.runtime.transport.socket_channel import Connections, RecvBuffer, SocketChannel, receive_exactly

LINGER_S = 0.05
REASON_WAIT_S = 0.1


class PayloadGroup(Protocol):
    """Group of two ranks (torch.distributed) that moves bytes in one direction."""

    def send(self, payload: torch.Tensor) -> None:
        """Send a tensor, and return once its memory may be changed; raise ConnectionError if the link has ended."""

    def recv(self, payload: torch.Tensor) -> None:
        """Fill ``payload`` with received bytes; raise ConnectionError if the link has ended."""

    def abort(self) -> None:
        """End every wait at this end; callable from any thread, returns soon."""

    def close(self) -> None:
        """Release all resources, after ``abort``."""


class ProcessGroupChannel(SocketChannel):
    """Channel whose payloads are in host memory and go through gloo.

    Args:
        connections: see SocketChannel; they carry headers and goodbyes.
        groups: (group for sending, group for receiving), which the channel owns from now on.
        checksum: see SocketChannel.
    """

    linger_s = LINGER_S  # gloo may lose a send that meets the peer's end

    def __init__(
        self, connections: Connections, groups: tuple[PayloadGroup, PayloadGroup], checksum: str = "auto"
    ) -> None:
        self._group_out, self._group_in = groups
        super().__init__(connections, checksum)

    # The sending thread.

    def transmit(self, message: frame.Frame) -> None:
        self.write(self.sealed(message))
        if len(message.buffers) == 1:
            self._transfer(self._group_out.send, torch.frombuffer(message.buffers[0], dtype=torch.uint8))
        elif message.buffers:
            self._transfer(self._group_out.send, frame.gather(message))

    # Any thread.

    def interrupt(self, reason: str | None) -> None:
        super().interrupt(reason)
        for group in (self._group_out, self._group_in):
            group.abort()

    def release(self) -> None:
        super().release()
        for group in (self._group_out, self._group_in):
            group.close()

    # The receiving thread.

    def fill(self, head: frame.Head, buffer: RecvBuffer) -> None:
        self._transfer(self._group_in.recv, buffer.payload)

    def _transfer(self, method: Callable[[torch.Tensor], None], payload: torch.Tensor) -> None:
        try:
            method(payload)
        except ConnectionError:
            # The reason of an abort was sent before the group ended, but on another connection.
            with contextlib.suppress(OSError, ValueError):
                select.select([self._out], [], [], REASON_WAIT_S)
            raise


class _Marked(tuple[Any, ...]):
    """Tensors of a message; ``mark`` is the device mark after the work that computes them, None in host memory."""

    mark: Mark | None = None


class _DeviceMessage(NamedTuple):
    header: bytes
    payload: torch.Tensor


def _memory_on(device: Device, tensors: Payload) -> list[torch.Tensor]:
    """Return the tensors of a message that are in memory of the device, among them encoded ones."""
    memory = [x.wire if isinstance(x, CodedTensor) else x for x in tensors]
    return [x for x in memory if x is not None and device.holds(x)]


class DeviceGroupChannel(ProcessGroupChannel):
    """Channel whose payloads go from device to device, through NCCL or through device memory that both ends open.

    Payloads carry no checksum: they leave the device through hardware that has its own.

    Args:
        connections, groups: see ProcessGroupChannel.
        device: device of the tensors at this end.
    """

    on_device = True
    linger_s = 0.0

    def __init__(self, connections: Connections, groups: tuple[PayloadGroup, PayloadGroup], device: Device) -> None:
        self._device = device
        super().__init__(connections, groups, checksum="off")

    def send(self, action: Action, tensors: Payload, weight_version: int = 0) -> None:
        marked = _Marked(tensors)
        if _memory_on(self._device, tensors):
            marked.mark = self._device.mark()
        super().send(action, marked, weight_version)

    # The sending thread.

    def framed(self, action: Action, tensors: Payload, weight_version: int, codec: Codec) -> _DeviceMessage:
        device, mark = self._device, getattr(tensors, "mark", None)
        with device.prepare_thread(), device.stream(StreamName.COPY_OUT):
            if mark is not None:
                device.wait(mark, f"{action.op}: sent once it is computed")
            for x in _memory_on(device, tensors):
                device.record_stream(x)
            header, payload = encode_on(device, action, tensors, self.form, weight_version, codec)
        return _DeviceMessage(header, payload)

    def transmit(self, message: Any) -> None:
        self.write(message.header)
        if message.payload.numel():
            with self._device.prepare_thread(), self._device.stream(StreamName.COPY_OUT):
                self._transfer(self._group_out.send, message.payload)

    # The receiving thread.

    def _receive_loop(self) -> None:
        with self._device.prepare_thread(), self._device.stream(StreamName.COPY_IN):
            super()._receive_loop()

    def _receive(self, header: bytearray) -> bool:
        if not receive_exactly(self._in, memoryview(header)):
            return False
        head = frame.parse(memoryview(header), self.form)
        payload = self._device.empty(head.payload_bytes, torch.uint8)
        if head.payload_bytes:
            self._transfer(self._group_in.recv, payload)
        arrived_at_s = time.time()
        if head.generation == self.form.generation:
            coded = self.coded
            tensors = frame.decode(head, payload, coded=True) if coded else decode_on(self._device, head, payload)
            self._device.finish(self._device.mark(), f"{head.action.op}: given once it is decoded")
            self.inbox.deliver(head, tensors, arrived_at_s)
        return True
