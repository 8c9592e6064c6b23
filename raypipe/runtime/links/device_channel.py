"""DeviceChannel: one worker's end of a link whose payloads go from device to device; headers and ends go over sockets.

    compute     send() mark ...
    sender              wait for it | encode, gather | header ==socket==> | payload ==group==>
    receiver            header <==socket== | payload <==group== | finished | decode --> inbox --> recv()

The header says how large the payload is before anybody has to receive it, in the order of one connection; deadlines,
goodbyes, reasons of an abort and the end of a process are those of ``socket_channel``. A group moves bytes in one
direction and nothing else (``PayloadGroup``): NCCL's, see nccl.py. Each direction has its own, so that neither waits
for the other.

Payloads carry no checksum: they leave the device through hardware that has its own.
"""

from __future__ import annotations

import socket
import time
from typing import Any, NamedTuple, Protocol

import torch

from raypipe.engine.codec import Codec
from raypipe.engine.device import Device, Mark, Stream
from raypipe.engine.messages import frame
from raypipe.engine.messages.channel import Payload
from raypipe.engine.messages.device_frame import decoded_on, framed_on
from raypipe.ir.schedule import Action
from raypipe.runtime.links.socket_channel import SocketChannel, receive_exactly

__all__ = ["DeviceChannel", "PayloadGroup"]


class PayloadGroup(Protocol):
    """Two ends between which bytes go one way."""

    def send(self, payload: torch.Tensor) -> None:
        """Send; returns when the memory may be changed. ConnectionError where the link broke or was given up."""

    def recv(self, payload: torch.Tensor) -> None:
        """Fill it with as many bytes as the peer sends; returns when they are there. ConnectionError likewise."""

    def abort(self) -> None:
        """End every wait at this end, from any thread; returns soon."""


class _Marked(tuple[Any, ...]):
    """Tensors, and the mark behind the work that computes them; None where all are in host memory."""

    mark: Mark | None = None


class _Sealed(NamedTuple):
    header: bytes
    payload: torch.Tensor


class DeviceChannel(SocketChannel):
    """See the Channel protocol, and SocketChannel for the first arguments.

    Args:
        device: of this end.
        groups: in which this end sends, and receives.
    """

    on_device = True

    def __init__(
        self, name: str, generation: int, max_tensors: int, outgoing: socket.socket, incoming: socket.socket,
        device: Device, groups: tuple[PayloadGroup, PayloadGroup],
    ) -> None:  # fmt: skip
        self._device, (self._group_out, self._group_in) = device, groups
        super().__init__(name, generation, max_tensors, outgoing, incoming, checksum="off")

    def send(self, action: Action, tensors: Payload, weight_version: int = 0) -> None:
        marked = _Marked(tensors)
        if any(isinstance(x, torch.Tensor) and not x.is_cpu for x in tensors):
            marked.mark = self._device.mark()
        super().send(action, marked, weight_version)

    # The sending thread.

    def framed(self, action: Action, tensors: Payload, weight_version: int, codec: Codec) -> _Sealed:
        device, mark = self._device, getattr(tensors, "mark", None)
        with device.prepare_thread(), device.stream(Stream.COPY_OUT):
            if mark is not None:
                device.wait(mark, f"{action.op}: sent once it is computed")
            for x in tensors:
                if isinstance(x, torch.Tensor) and not x.is_cpu:
                    device.record_stream(x)
            header, payload = framed_on(
                device,
                action,
                tensors,
                generation=self.generation,
                max_tensors=self.max_tensors,
                weight_version=weight_version,
                codec=codec,
            )
        return _Sealed(header, payload)

    def transmit(self, message: Any) -> None:
        self.write(message.header)
        if message.payload.numel():
            with self._device.prepare_thread(), self._device.stream(Stream.COPY_OUT):
                self._group_out.send(message.payload)

    # Any thread.

    def interrupt(self, reason: str | None) -> None:
        super().interrupt(reason)
        for group in (self._group_out, self._group_in):
            group.abort()

    # The receiving thread.

    def _receive_loop(self) -> None:
        with self._device.prepare_thread(), self._device.stream(Stream.COPY_IN):
            super()._receive_loop()

    def _receive(self, header: bytearray) -> bool:
        if not receive_exactly(self._in, memoryview(header)):
            return False
        head = frame.parse(memoryview(header), generation=self.generation, max_tensors=self.max_tensors)
        payload = self._device.empty(head.payload_bytes, torch.uint8)
        if head.payload_bytes:
            self._group_in.recv(payload)
        arrived_at_s = time.time()
        if head.generation == self.generation:
            coded = self.coded
            tensors = frame.decode(head, payload, coded=True) if coded else decoded_on(self._device, head, payload)
            self._device.finish(self._device.mark(), f"{head.action.op}: given once it is decoded")
            self.deliver(head, tensors, arrived_at_s)
        return True
