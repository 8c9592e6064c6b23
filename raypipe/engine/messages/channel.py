"""A channel joins two workers: whole messages, both ways, in the order of the schedule.

The *sender's action* is the message key: stage 1 asks for ``0SEND_F5`` and gets what stage 0 sent
under it. Together with the generation this is all the addressing there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from raypipe.engine.codec import Codec
from raypipe.engine.codec.coded import CodedTensor
from raypipe.engine.messages.frame import Frame
from raypipe.ir.schedule import Action

__all__ = ["Channel", "Message", "Stamp"]

Payload = Sequence[torch.Tensor | CodedTensor | None]
"""Boundary tensors in the order of the boundary; None where there is nothing (a gradient that is not needed)."""


class Stamp(NamedTuple):
    """How a message travelled.

    Attributes:
        sent_at_s: on the sender's wall clock, after any encoding.
        arrived_at_s: on the receiver's, when its last byte was there, before any decoding.
        wire_bytes: of the payload, after any codec.
        damaged: messages that came damaged on this way since the one before, and were asked for again.
    """

    sent_at_s: float = 0.0
    arrived_at_s: float = 0.0
    wire_bytes: int = 0
    damaged: int = 0


class Message(tuple[torch.Tensor | None, ...]):
    """What arrived: the tensors, and what its header said.

    Attributes:
        weight_version: of the micro-batch; 0 where the sender said nothing.
        stamp: how it travelled.
    """

    weight_version: int = 0
    stamp: Stamp = Stamp()

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor | None], weight_version: int, stamp: Stamp) -> Message:
        made = cls(tensors)
        made.weight_version, made.stamp = weight_version, stamp
        return made


class Channel(Protocol):
    """One worker's end of a link. Every implementation passes tests/contract/channel.py."""

    name: str
    """For messages to people: ``stage 0 <-> stage 1``."""

    on_device: bool
    """Tensors that lie on the device that computes are taken and given there, encoded and decoded too."""

    @property
    def busy(self) -> bool:
        """Whether something that was handed over has not left yet, so that other traffic would delay it."""

    def send(self, action: Action, tensors: Payload, weight_version: int = 0) -> None:
        """Hand over tensors and return at once; nobody may change them until they are sent.

        Args:
            weight_version: travels in the header, for ``Message.weight_version`` on the other side.

        Raises:
            LinkError: the link failed or was aborted, now or before.
        """

    def recv(self, action: Action, timeout_s: float) -> Message:
        """Wait for the message that the peer sent under ``action``.

        A tensor that needs a gradient on the sender's side arrives as a leaf that requires one. Type, shape and strides
        are the sender's, whatever codec it came in.

        Raises:
            LinkError: deadline missed, peer gone, wrong header, or aborted; names link, action, micro-batch.
        """

    def use(self, codec_forward: Codec, codec_backward: Codec) -> None:
        """Put what this end sends from now on into these codecs; the other end need not be told.

        For activations that require a gradient (SEND_F) and for gradients (SEND_B); nothing else is ever changed, see
        engine/codec. A channel begins with none. Links with threads of their own encode and decode there.
        """

    def keep_sent(self, keep: Callable[[Action, Frame], None]) -> None:
        """Have every message looked at before it leaves, in the thread that sends it, as it is encoded.

        Whoever looks copies what it wants. Not of links between devices: what crosses them never is in host memory.
        """

    def leave_coded(self) -> None:
        """Deliver tensors that come in a codec as CodedTensor from now on, for a device that decodes them itself."""

    def abort(self, reason: str) -> None:
        """End every wait on both sides now, from any thread; the channel stays unusable."""

    def leave(self, reason: str) -> None:
        """Give up in good order, from any thread: the peer gets what was handed over, then an abort with ``reason``.

        A stage that fails leaves, so that the steps it took part in end on every stage before the failure is felt.
        """

    def close(self) -> None:
        """Send what was handed over (within a deadline), then release threads and sockets. Safe to call twice."""
