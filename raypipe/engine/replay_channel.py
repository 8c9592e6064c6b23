"""ReplayChannel: the end of a link for a worker that does steps again which its neighbours have behind them.

recv   from what the neighbour had sent, as its log kept it
send   goes nowhere, for the neighbour has had it; but it is kept, for the day when that one is lost
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

from raypipe.engine.codec import Codec, Codecs
from raypipe.engine.message_log import KeepSent, Sent
from raypipe.engine.messages import frame
from raypipe.engine.messages.channel import Message, Payload, Stamp
from raypipe.errors import LinkAbortedError, LinkError
from raypipe.ir.schedule import Action

__all__ = ["ReplayChannel"]


class ReplayChannel:
    """See the Channel protocol.

    Args:
        name: for messages to people.
        generation: no older than that of any message.
        max_tensors: as both ends agreed.
        keep: is given what would have been sent.
    """

    on_device = False
    busy = False

    def __init__(self, name: str, generation: int, max_tensors: int, keep: KeepSent) -> None:
        self.name = name
        self.generation = generation
        self.max_tensors = max_tensors
        self._keep = keep
        self._codecs = Codecs()
        self._coded = False
        self._lock = threading.Lock()
        self._arrived: dict[Action, tuple[frame.Head, Sent]] = {}
        self._error: LinkError | None = None

    def deliver(self, messages: Iterable[Sent]) -> None:
        """What the neighbour had sent in the step that comes; what was left of the one before goes.

        Raises:
            LinkError: a header is damaged.
        """
        arrived = {}
        for sent in messages:
            head = frame.parse(sent.header, generation=self.generation, max_tensors=self.max_tensors)
            arrived[head.action] = head, sent
        with self._lock:
            self._arrived = arrived

    def send(self, action: Action, tensors: Payload, weight_version: int = 0) -> None:
        self._raise_if_failed()
        message = frame.encode(
            action,
            tensors,
            generation=self.generation,
            max_tensors=self.max_tensors,
            weight_version=weight_version,
            codec=self._codecs.of(action.op),
        )
        self._keep(action, message)

    def recv(self, action: Action, timeout_s: float) -> Message:
        """The message, if it was kept; nothing is waited for."""
        self._raise_if_failed()
        with self._lock:
            found = self._arrived.pop(action, None)
        if found is None:
            raise LinkError(f"{self.name}: {action.words} is not among the messages that were kept.")
        head, sent = found
        # Memory of torch's, where kernels expect it, and which a stage may write to.
        payload = torch.empty(sent.payload.size, dtype=torch.uint8)
        payload.numpy()[:] = sent.payload
        tensors = frame.decode(head, payload, coded=self._coded)
        return Message.of(tensors, head.weight_version, Stamp(head.sent_at_s, head.sent_at_s, head.payload_bytes))

    def keep_sent(self, keep: KeepSent) -> None:
        self._keep = keep

    def use(self, codec_forward: Codec, codec_backward: Codec) -> None:
        self._codecs = Codecs(codec_forward, codec_backward)

    def leave_coded(self) -> None:
        self._coded = True

    def abort(self, reason: str) -> None:
        with self._lock:
            self._error = self._error or LinkAbortedError(f"{self.name}: aborted: {reason}")

    def leave(self, reason: str) -> None:
        self.abort(reason)

    def close(self) -> None:
        self.abort("closed")

    def _raise_if_failed(self) -> None:
        with self._lock:
            if self._error is not None:
                raise type(self._error)(str(self._error)) from self._error
