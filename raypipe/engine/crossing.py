"""Tensors between the memory of the host, where frames, files and data are, and that of a device.

    to_device   host tensor -> staging -> (copy_in) -> device tensor -> compute waits
    to_host     device tensor -> copy_out waits -> (copy_out) -> staging -> the host waits; of a message, who sends it
    in a codec  decoded in copy_in, encoded in copy_out, so that its bytes only are copied and computing goes on

Shapes, strides and ``requires_grad`` stay as they are, because kernels, and so bits, depend on them. Where the
device is immediate, tensors are handed through as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from raypipe.engine.codec import Codec
from raypipe.engine.codec.choice import applies, travels_coded, wire_bytes
from raypipe.engine.codec.coded import CodedTensor
from raypipe.engine.device import Crosses, Device, Mark, Stream
from raypipe.engine.messages import layout
from raypipe.engine.messages.channel import Message, Payload
from raypipe.engine.messages.frame import key_of
from raypipe.engine.messages.late import Late
from raypipe.ir.schedule import Action

__all__ = ["KEPT", "Crossing"]

KEPT = 2
"""Staging buffers of a size: one is filled while another is copied from."""

Tensors = Sequence[torch.Tensor | None]


class _Coding(NamedTuple):
    """A codec, and the key of its random rounding."""

    name: str
    key: int | None


class Crossing:
    """Of one thread that computes on one device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._staging: dict[int, deque[tuple[torch.Tensor, Mark]]] = {}

    def message(self, message: Message, what: Crosses) -> Message:
        """What a channel brought, where it is computed with."""
        if self.device.immediate:
            return message
        return Message.of(self.to_device(message, what), message.weight_version, message.stamp)

    def outgoing(
        self, action: Action, tensors: Tensors, what: Crosses, codec: Codec, *, on_device: bool = False
    ) -> Payload:
        """What a channel is given: copies in host memory, encoded before they are copied where the device does that.

        Nobody waits for the copies here. What requires no gradient may be memory that the next forward changes, such as
        a buffer, so it is copied on the device first; gradients are nobody else's.

        Args:
            what: outputs or gradients of inputs.
            on_device: the channel takes them where they are.
        """
        device = self.device
        if on_device or device.immediate or not any(tensor is not None for tensor in tensors):
            return tuple(tensors)
        apart = what is Crosses.OUTPUTS
        if not device.codes or codec.name == "none":
            return self._to_host(tensors, what, [None] * len(tensors), apart=apart)
        names = [x is not None and travels_coded(codec.name, action.op, x) for x in tensors]
        codings = [
            _Coding(codec.name, key_of(codec, action, place)) if coded else None for place, coded in enumerate(names)
        ]
        return self._to_host(tensors, what, codings, apart=apart)

    def to_device(self, tensors: Payload, what: Crosses) -> tuple[torch.Tensor | None, ...]:
        """Copies on the device, for the stream that computes; the host may change its own at once.

        What came in a codec is decoded there.
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
        with device.stream(Stream.COPY_IN):
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
            copied = device.mark()
        device.wait(copied, f"{what}: computed with once they are on the device")
        for copy in copies:
            device.record_stream(copy)
        return tuple(shown)

    def named(self, tensors: Mapping[Any, torch.Tensor], what: Crosses) -> dict[Any, torch.Tensor]:
        """``to_device`` by name, from any thread that does nothing else on the device meanwhile."""
        if self.device.immediate:
            return dict(tensors)
        with self.device.prepare_thread():
            return _by_name(tensors, self.to_device(list(tensors.values()), what))

    def fill(self, target: torch.Tensor, tensor: torch.Tensor, what: Crosses) -> None:
        """Copy host memory into a tensor of the device, in place; from such a thread too."""
        if self.device.immediate:
            target.copy_(tensor)
            return
        with self.device.prepare_thread():
            (there,) = self.to_device((tensor,), what)
            assert there is not None
            target.copy_(there)

    def copied(self, tensors: Mapping[str, torch.Tensor], what: Crosses) -> dict[str, torch.Tensor]:
        """Copies in host memory by name, on every device; from such a thread too."""
        bare = {name: tensor.detach() for name, tensor in tensors.items()}
        if self.device.immediate:
            return {name: tensor.to("cpu", copy=True) for name, tensor in bare.items()}
        with self.device.prepare_thread():
            return _by_name(bare, self.to_host(list(bare.values()), what))

    def to_host(self, tensors: Tensors, what: Crosses) -> tuple[torch.Tensor | None, ...]:
        """Copies in host memory, which the caller may read at once and keep."""
        if self.device.immediate or not any(tensor is not None for tensor in tensors):
            return tuple(tensors)
        found = self._to_host(tensors, what, [None] * len(tensors))
        found.arrive()
        return cast(tuple[torch.Tensor | None, ...], tuple(found))

    def _to_host(
        self, tensors: Tensors, what: Crosses, codings: Sequence[_Coding | None], *, apart: bool = False
    ) -> Late:
        """Copies in host memory that are on their way.

        Args:
            codings: by tensor, what it is encoded in before it is copied, if that applies to it.
            apart: of what requires no gradient there is a copy on the device first.
        """
        device = self.device
        known = [None if tensor is None else (*_flat(tensor), tensor.requires_grad) for tensor in tensors]
        if apart:
            known = [one if one is None or one[2] else (one[0].clone(), *one[1:]) for one in known]
        computed = device.mark()
        shown: list[torch.Tensor | CodedTensor | None] = []
        with device.stream(Stream.COPY_OUT):
            device.wait(computed, f"{what}: copied once they are computed")
            for one, coding in zip(known, codings, strict=True):
                if one is None:
                    shown.append(None)
                    continue
                flat, plain, requires_grad = one
                if not device.holds(flat):
                    copy = flat.clone().as_strided(plain.shape, plain.stride())
                    shown.append(copy.detach().requires_grad_(requires_grad))
                    continue
                device.record_stream(flat)
                if coding is not None and applies(coding.name, flat.dtype, flat.numel()):
                    wire = device.empty(wire_bytes(coding.name, flat.dtype, flat.numel()), torch.uint8)
                    device.encode(coding.name, flat, wire, coding.key)
                    bytes_there = device.staging(wire.numel()).copy_(wire, non_blocking=True)
                    shape, strides = tuple(plain.shape), plain.stride()
                    shown.append(
                        CodedTensor(bytes_there, coding.name, flat.dtype, shape, strides, requires_grad, flat.numel())
                    )
                    continue
                copy = device.staging(flat.nbytes).view(flat.dtype)
                copy.copy_(flat, non_blocking=True)
                shown.append(copy.as_strided(plain.shape, plain.stride()).detach().requires_grad_(requires_grad))
            there = device.mark()
        return Late.of(shown, partial(device.finish, there, f"{what}: read once they are in host memory"))

    def read(self, scalars: Tensors, what: Crosses) -> list[float | None]:
        """Values of scalar tensors, of which a device is asked together."""
        return [None if tensor is None else float(tensor) for tensor in self.to_host(scalars, what)]

    def two_parts_s(self, marks: tuple[Mark, Mark, Mark] | None) -> tuple[float, float] | None:
        """Seconds from the first mark to the second, and on to the third; None where nothing was marked."""
        if marks is None:
            return None
        begin_s, between_s, end_s = self.device.seconds(marks)
        return between_s - begin_s, end_s - between_s

    def _staged(self, flat: torch.Tensor, what: Crosses) -> torch.Tensor:
        """A copy on the device, in the current stream, by way of staging memory."""
        buffer = self._take(flat.nbytes, what)
        staged = buffer[: flat.nbytes].view(flat.dtype)
        staged.copy_(flat)
        copy = self.device.empty(flat.numel(), flat.dtype).copy_(staged, non_blocking=True)
        self._staging[buffer.numel()].append((buffer, self.device.mark()))
        return copy

    def _take(self, nbytes: int, what: Crosses) -> torch.Tensor:
        """Staging memory of at least so many bytes that no copy reads any more."""
        size = 1 << max(nbytes - 1, 63).bit_length()
        kept = self._staging.setdefault(size, deque())
        if len(kept) < KEPT:
            return self.device.staging(size)
        buffer, copied = kept.popleft()
        self.device.finish(copied, f"{what}: staged once the copy before has been made")
        return buffer


def _by_name(names: Iterable[Any], tensors: Tensors) -> dict[Any, torch.Tensor]:
    return {name: tensor for name, tensor in zip(names, tensors, strict=True) if tensor is not None}


def _flat(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The distinct elements in the order of memory, and the dense or expanded tensor that they are of."""
    plain = layout.densified(tensor)
    elements = layout.distinct_elements(tuple(plain.shape), plain.stride())
    assert elements is not None, "it was packed"
    return plain.as_strided((elements,), (1,)), plain
