"""Transfer of tensors between host memory, which holds frames, files and data, and the memory of a device.

    to_device   host tensor -> staging -> (copy_in) -> device tensor -> compute waits
    to_host     device tensor -> copy_out waits -> (copy_out) -> staging -> the host waits; for messages, the sender
    in a codec  decoded in copy_in, encoded in copy_out, so that its bytes only are copied and computing goes on

Shapes, strides and ``requires_grad`` are kept, because kernels, and so results, depend on them. If the device is the
CPU (``Device.immediate``), most methods return the same tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from raypipe.engine.codec import Codec
from raypipe.engine.codec.codec import CodedTensor, applies, travels_coded, wire_bytes
from raypipe.engine.device.device import Device, Mark, StreamName, TransferKind
from raypipe.engine.messages.channel import Message, Payload
from raypipe.engine.messages.frame import PendingCopy, key_of, wait_for_copies
from raypipe.engine.messages.record import densified, distinct_elements
from raypipe.ir.schedule import Action

KEPT = 2
"""Least number of staging buffers of each size: one is filled while the other is copied to the device."""
KEPT_BYTES = 16 << 20
"""Bytes of staging buffers of one size, beyond KEPT, before a copy waits until an earlier one has been made."""
SCALARS = (TransferKind.LOSS, TransferKind.NORMS)
"""Kinds that are copied to the host in the computing stream: another stream costs more than it saves for few bytes."""

Tensors = Sequence[torch.Tensor | None]


class _Coding(NamedTuple):
    """Codec of a tensor in a transfer, and the key of stochastic rounding; without a key it rounds to nearest."""

    name: str
    key: int | None


class DeviceTransfer:
    """Transfers between host memory and one device, for use by one computing thread.

    Argument ``what`` of the methods is the kind of the tensors, which names the waits on the device.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._staging: dict[int, deque[tuple[torch.Tensor, Mark]]] = {}
        self._filled: list[torch.Tensor] = []  # staging buffers since the last mark

    def message(self, message: Message, what: TransferKind) -> Message:
        """Copy the tensors of a received message to the device; weight version and times are kept."""
        if self.device.immediate:
            return message
        return Message.of(self.to_device(message, what), message.weight_version, message.stamp)

    def outgoing(
        self,
        action: Action,
        tensors: Tensors,
        what: TransferKind,
        codec: Codec,
        *,
        on_device: bool = False,
        computed: Mark | None = None,
    ) -> Payload:
        """Start copying a message's tensors to host memory for a channel; return before the copies are complete.

        Tensors are encoded on the device if it supports the codec. Outputs that require no gradient are cloned on the
        device first: they may share memory that the next forward changes, such as the memory of a buffer.

        Args:
            what: OUTPUTS or INPUT_GRADS.
            on_device: True if the channel sends from device memory; the tensors then stay on the device.
            computed: mark in the computing stream after the tensors were computed; None records one.
        """
        device, own = self.device, what is TransferKind.OUTPUTS
        if device.immediate or not any(tensor is not None for tensor in tensors):
            return tuple(tensors)
        if on_device:
            return tuple(apart(x) if own and x is not None and not x.requires_grad else x for x in tensors)
        if not device.codes or codec.name == "none":
            return self._to_host(tensors, what, [None] * len(tensors), apart=own, computed=computed)
        names = [x is not None and travels_coded(codec.name, action.op, x) for x in tensors]
        codings = [
            _Coding(codec.name, key_of(codec, action, place)) if coded else None for place, coded in enumerate(names)
        ]
        return self._to_host(tensors, what, codings, apart=own, computed=computed)

    def to_device(self, tensors: Payload, what: TransferKind) -> tuple[torch.Tensor | None, ...]:
        """Copy tensors to the device, for use in the computing stream; encoded tensors are decoded there.

        The caller may change the host's tensors as soon as this returns.
        """
        device = self.device
        if device.immediate or not any(tensor is not None for tensor in tensors):
            return cast(tuple[torch.Tensor | None, ...], tuple(tensors))
        if all(x is None or (isinstance(x, torch.Tensor) and device.holds(x)) for x in tensors):
            there = cast(tuple[torch.Tensor | None, ...], tuple(tensors))  # a link between devices brought them
            for x in there:
                if x is not None:
                    device.record_stream(x)
            return there
        copies: list[torch.Tensor] = []
        shown: list[torch.Tensor | None] = []
        with device.stream(StreamName.COPY_IN):
            for tensor in tensors:
                if tensor is None:
                    shown.append(None)
                    continue
                if isinstance(tensor, CodedTensor):
                    wire = self._staged(tensor.wire, what)
                    copies.append(device.empty(tensor.elements, tensor.dtype))
                    device.decode(tensor.codec, wire, copies[-1])
                    shape, strides = tensor.shape, tensor.strides
                else:
                    flat, plain = _flat(tensor)
                    copies.append(self._staged(flat, what))
                    shape, strides = tuple(plain.shape), plain.stride()
                view = copies[-1].as_strided(shape, strides).detach()
                shown.append(view.requires_grad_(tensor.requires_grad))
            copied = self._mark_staged()
        device.wait(copied, f"{what}: computed with once they are on the device")
        for copy in copies:
            device.record_stream(copy)
        return tuple(shown)

    def named(self, tensors: Mapping[Any, torch.Tensor], what: TransferKind) -> dict[Any, torch.Tensor]:
        """Copy named tensors to the device like ``to_device``. The thread must have no other device work meanwhile."""
        if self.device.immediate:
            return dict(tensors)
        with self.device.prepare_thread():
            return _by_name(tensors, self.to_device(list(tensors.values()), what))

    def fill(self, target: torch.Tensor, tensor: torch.Tensor, what: TransferKind) -> None:
        """Copy a host tensor into the device tensor ``target``. The thread must have no other device work meanwhile."""
        if self.device.immediate:
            target.copy_(tensor)
            return
        with self.device.prepare_thread():
            (there,) = self.to_device((tensor,), what)
            assert there is not None
            target.copy_(there)

    def copied(self, tensors: Mapping[str, torch.Tensor], what: TransferKind) -> dict[str, torch.Tensor]:
        """Copy named tensors to new host memory, even if the device is the CPU; wait for the copies.

        The thread must have no other device work meanwhile.
        """
        bare = {name: tensor.detach() for name, tensor in tensors.items()}
        if self.device.immediate:
            return {name: tensor.to("cpu", copy=True) for name, tensor in bare.items()}
        with self.device.prepare_thread():
            return _by_name(bare, self.to_host(list(bare.values()), what))

    def to_host(self, tensors: Tensors, what: TransferKind) -> tuple[torch.Tensor | None, ...]:
        """Copy tensors to host memory, and wait for the copies. On the CPU the same tensors are returned."""
        copies = self.copying(tensors, what)
        wait_for_copies(copies)
        return cast(tuple[torch.Tensor | None, ...], tuple(copies))

    def _to_host(
        self,
        tensors: Tensors,
        what: TransferKind,
        codings: Sequence[_Coding | None],
        *,
        apart: bool = False,
        computed: Mark | None = None,
    ) -> PendingCopy:
        """Start copying tensors to host memory.

        Args:
            codings: codec of each tensor, which encodes it on the device before the copy if it supports the tensor;
                None copies the tensor unchanged.
            apart: True if tensors that require no gradient are cloned on the device first.
            computed: see ``outgoing``.
        """
        device = self.device
        flattened = [None if tensor is None else (*_flat(tensor), tensor.requires_grad) for tensor in tensors]
        if apart:
            flattened = [x if x is None or x[2] else (x[0].clone(), *x[1:]) for x in flattened]
        beside = what not in SCALARS
        pairs = zip(tensors, flattened, strict=True)
        copied_now = any(x is not None and y is not None and x.data_ptr() != y[0].data_ptr() for x, y in pairs)
        if beside and (computed is None or copied_now):
            computed = device.mark()
        shown: list[torch.Tensor | CodedTensor | None] = []
        with device.stream(StreamName.COPY_OUT) if beside else nullcontext():
            if beside:
                device.wait(computed, f"{what}: copied once they are computed")
            for entry, coding in zip(flattened, codings, strict=True):
                if entry is None:
                    shown.append(None)
                    continue
                flat, plain, requires_grad = entry
                if not device.holds(flat):
                    copy = flat.clone().as_strided(plain.shape, plain.stride())
                    shown.append(copy.detach().requires_grad_(requires_grad))
                    continue
                if beside:
                    device.record_stream(flat)
                if coding is not None and applies(coding.name, flat.dtype, flat.numel()):
                    wire = device.empty(wire_bytes(coding.name, flat.dtype, flat.numel()), torch.uint8)
                    device.encode(coding.name, flat, wire, coding.key)
                    wire_copy = device.staging(wire.numel()).copy_(wire, non_blocking=True)
                    shape, strides = tuple(plain.shape), plain.stride()
                    shown.append(
                        CodedTensor(wire_copy, coding.name, flat.dtype, shape, strides, requires_grad, flat.numel())
                    )
                    continue
                copy = device.staging(flat.nbytes).view(flat.dtype)
                copy.copy_(flat, non_blocking=True)
                shown.append(copy.as_strided(plain.shape, plain.stride()).detach().requires_grad_(requires_grad))
            there = device.mark()
        return PendingCopy.of(shown, partial(device.finish, there, f"{what}: read once they are in host memory"))

    def read(self, scalars: Tensors, what: TransferKind) -> list[float | None]:
        """Read the values of scalar tensors with one transfer."""
        return self.reading(scalars, what)()

    def reading(self, scalars: Tensors, what: TransferKind) -> Callable[[], list[float | None]]:
        """Start to copy scalar tensors to host memory; return a function that waits for their values, in any thread."""
        copies = self.copying(scalars, what)
        values: list[float | None] = []

        def read() -> list[float | None]:
            if not values:
                wait_for_copies(copies)
                values.extend(None if x is None else float(cast(torch.Tensor, x)) for x in copies)
            return values

        return read

    def copying(self, tensors: Tensors, what: TransferKind) -> Payload:
        """Start to copy tensors to host memory; ``wait_for_copies`` waits. On the CPU the same tensors are returned."""
        if self.device.immediate or not any(tensor is not None for tensor in tensors):
            return tuple(tensors)
        return self._to_host(tensors, what, [None] * len(tensors))

    def two_parts_s(self, marks: tuple[Mark, Mark, Mark] | None) -> tuple[float, float] | None:
        """Return the seconds between the first two marks, and between the last two; None if ``marks`` is None."""
        if marks is None:
            return None
        begin_s, between_s, end_s = self.device.seconds(marks)
        return between_s - begin_s, end_s - between_s

    def _staged(self, flat: torch.Tensor, what: TransferKind) -> torch.Tensor:
        """Copy a flat tensor to the device through staging memory, in the current stream."""
        buffer = self._take(flat.nbytes, what)
        staged = buffer[: flat.nbytes].view(flat.dtype)
        staged.copy_(flat)
        self._filled.append(buffer)
        return self.device.empty(flat.numel(), flat.dtype).copy_(staged, non_blocking=True)

    def _mark_staged(self) -> Mark:
        """Record one mark after all copies from staging buffers since the last one."""
        copied = self.device.mark()
        for buffer in self._filled:
            self._staging[buffer.numel()].append((buffer, copied))
        self._filled.clear()
        return copied

    def _take(self, nbytes: int, what: TransferKind) -> torch.Tensor:
        """Return a staging buffer (host memory) of at least ``nbytes``, whose last copy has been made.

        If all buffers are in use, a new one is allocated, up to KEPT_BYTES; then the oldest copy is waited for.
        """
        size = 1 << max(nbytes - 1, 63).bit_length()
        kept = self._staging.setdefault(size, deque())
        if kept and self.device.reached(kept[0][1]):
            return kept.popleft()[0]
        count = len(kept) + sum(buffer.numel() == size for buffer in self._filled)
        if count < KEPT or count * size < KEPT_BYTES:
            return self.device.staging(size)
        if not kept:  # one transfer has filled them all
            self._mark_staged()
        buffer, copied = kept.popleft()
        self.device.finish(copied, f"{what}: staged once the copy before has been made")
        return buffer


def _by_name(names: Iterable[Any], tensors: Tensors) -> dict[Any, torch.Tensor]:
    return {name: tensor for name, tensor in zip(names, tensors, strict=True) if tensor is not None}


def memory_like(device: Device, tensor: torch.Tensor) -> torch.Tensor:
    """Allocate memory of the device for tensors of this layout, with gaps and overlaps; keep ``requires_grad``."""
    memory = device.empty(_span(tensor.detach()).numel(), tensor.dtype)
    return memory.as_strided(tensor.shape, tensor.stride()).requires_grad_(tensor.requires_grad)


def fill(target: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor into one of the same layout, with gaps and overlaps; autograd counts no change of the target."""
    _span(target.data).copy_(_span(tensor.detach()))


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's memory from its first to its last element; shape (elements,)."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1 if tensor.numel() else 0,), (1,))


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor of the device to new memory there; shape and strides are kept, gaps are not."""
    flat, plain = _flat(tensor.detach())
    return flat.clone().as_strided(plain.shape, plain.stride())


def _flat(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (distinct elements of a tensor, shape (elements,); the tensor, packed if it has gaps or overlaps)."""
    plain = densified(tensor)
    elements = distinct_elements(tuple(plain.shape), plain.stride())
    assert elements is not None, "it was packed"
    return plain.as_strided((elements,), (1,)), plain
