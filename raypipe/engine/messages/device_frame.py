"""Frames whose payload stays on the device that computes: the header of ``frame``, and one tensor of bytes there.

    tensors on the device --encode, gather--> payload, uint8 --a link between devices--> payload --> tensors over it

The layout of the payload is that of ``frame``, so that a header says the same of both.
"""

from __future__ import annotations

import torch

from raypipe.engine.codec import Codec
from raypipe.engine.codec.choice import travels_coded, wire_bytes
from raypipe.engine.codec.coded import CodedTensor
from raypipe.engine.device import Device
from raypipe.engine.messages import frame, layout
from raypipe.engine.messages.record import PAYLOAD_LIMIT_BYTES, Described, describe
from raypipe.errors import LinkError
from raypipe.ir.schedule import Action

__all__ = ["decoded_on", "framed_on"]


def framed_on(
    device: Device,
    action: Action,
    tensors: frame.Payload,
    *,
    generation: int,
    max_tensors: int,
    weight_version: int,
    codec: Codec,
) -> tuple[bytes, torch.Tensor]:
    """(header, payload on the device) of a message, in the current stream.

    Raises:
        LinkError: too many tensors, or one that cannot be sent; names the action.
    """
    described: list[Described | None] = []
    parts: list[torch.Tensor] = []
    for place, given in enumerate(tensors):
        if given is None:
            described.append(None)
            parts.append(torch.empty(0, dtype=torch.uint8))
            continue
        known, part = _part(device, action, place, given, codec)
        described.append(known)
        parts.append(part)
    header, places, payload_bytes = frame.header_of(
        action, described, generation=generation, max_tensors=max_tensors, weight_version=weight_version
    )
    payload = device.empty(payload_bytes, torch.uint8)
    for begin, part in zip(places, parts, strict=True):
        if part.numel():
            payload[begin : begin + part.numel()].copy_(part)
    return header, payload


def decoded_on(device: Device, head: frame.Head, payload: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Tensors over the payload, in the current stream; those in a codec in memory of their own."""
    found: list[torch.Tensor | None] = []
    for tensor in frame.decode(head, payload, coded=True):
        if not isinstance(tensor, CodedTensor):
            found.append(tensor)
            continue
        flat = device.empty(tensor.elements, tensor.dtype)
        device.decode(tensor.codec, tensor.wire, flat)
        found.append(flat.as_strided(tensor.shape, tensor.strides).detach().requires_grad_(tensor.requires_grad))
    return tuple(found)


def _part(
    device: Device, action: Action, place: int, given: torch.Tensor | CodedTensor, codec: Codec
) -> tuple[Described, torch.Tensor]:
    """What a tensor is, and its bytes on the device."""
    if isinstance(given, CodedTensor):
        known = describe(given.dtype, given.shape, given.strides, given.requires_grad, given.codec)
        assert known is not None, "a device encodes dense tensors"
        return known, given.wire.to(device.place)
    if given.layout is not torch.strided:
        raise LinkError(f"{action.words}: a {given.layout} tensor cannot be sent; send a strided one.")
    plain = layout.densified(given)
    name = codec.name if travels_coded(codec.name, action.op, given) else "none"
    found = describe(plain.dtype, tuple(plain.shape), plain.stride(), given.requires_grad, name)
    if found is None:
        raise LinkError(
            f"{action.words}: a tensor of shape {tuple(given.shape)} and {given.dtype} cannot be sent; at most "
            f"{PAYLOAD_LIMIT_BYTES} bytes are allowed."
        )
    flat = plain.as_strided((found.elements,), (1,)).to(device.place)
    if found.codec == "none":
        return found, flat.view(torch.uint8) if found.elements else torch.empty(0, dtype=torch.uint8)
    if not (device.codes or device.immediate):
        raise LinkError(
            f"{action.words}: links between devices encode there, and {device.title} has no CuPy. Install it (pip "
            "install 'raypipe[cuda13]'), leave codecs out, or take transport='tcp'."
        )
    wire = device.empty(wire_bytes(found.codec, flat.dtype, found.elements), torch.uint8)
    device.encode(found.codec, flat, wire, frame.key_of(codec, action, place))
    return found, wire
