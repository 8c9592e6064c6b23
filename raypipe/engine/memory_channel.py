"""InMemoryChannel: two workers in one process, joined by the frames that a network would carry.

The verified fake: it passes the same contract as the sockets do, and it copies through the same
headers, so that a local run meets the same layouts, flags, limits and codecs. The sender encodes and
decodes, in its own thread until tensors come that are still being copied to the host: from then on in
one of the link's, for the sender has other things to do meanwhile.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from functools import partial
from queue import Empty
from typing import Any

from raypipe.engine.codec import Codec, Codecs
from raypipe.engine.codec.host import one_core
from raypipe.engine.crew import Crew
from raypipe.engine.message_log import KeepSent
from raypipe.engine.messages import frame
from raypipe.engine.messages.channel import Message, Payload
from raypipe.engine.messages.inbox import Inbox
from raypipe.engine.messages.late import Late
from raypipe.errors import LinkAbortedError, LinkError
from raypipe.ir.schedule import Action

__all__ = ["InMemoryChannel"]

CLOSE_TIMEOUT_S = 5.0
"""How long ``close`` and ``leave`` wait for what was handed over."""


class _End:
    """What lies at one end of a link. Both channels know both ends, and not each other: no cycle outlives them."""

    def __init__(self, name: str, generation: int) -> None:
        self.generation = generation
        self.inbox = Inbox(name)
        self.coded = False
        self._lock = threading.Lock()
        self._error: LinkError | None = None

    def fail(self, error: LinkError, *, keep: bool = False) -> None:
        with self._lock:
            self._error = self._error or error
        self.inbox.fail(error, keep=keep)

    def raise_if_failed(self) -> None:
        with self._lock:
            if self._error is not None:
                raise type(self._error)(str(self._error)) from self._error


class InMemoryChannel:
    """One end of a pair; see the Channel protocol. Made by ``pair``."""

    on_device = False

    def __init__(self, name: str, max_tensors: int, own: _End, other: _End) -> None:
        self.name = name
        self.generation = own.generation
        self.max_tensors = max_tensors
        self._own, self._other = own, other
        self._codecs = Codecs()
        self._keep: KeepSent | None = None
        self._crew: Crew[None] | None = None

    @property
    def busy(self) -> bool:
        return False

    @classmethod
    def pair(cls, name: str, generation: int, max_tensors: int) -> tuple[InMemoryChannel, InMemoryChannel]:
        """Both ends of a link whose messages have at most ``max_tensors`` tensors."""
        ends = _End(name, generation), _End(name, generation)
        return cls(name, max_tensors, *ends), cls(name, max_tensors, *reversed(ends))

    def send(self, action: Action, tensors: Payload, weight_version: int = 0) -> None:
        self._own.raise_if_failed()
        frame.check_count(action, tensors, self.max_tensors)
        order = action, tensors, weight_version, self._codecs.of(action.op)
        if self._crew is None and isinstance(tensors, Late):
            self._crew = Crew(f"raypipe-send {self.name}", 1)
        if self._crew is None:
            self._carry(*order)
        else:
            self._crew.hand([partial(self._carry_beside, *order)])

    def _carry_beside(self, *order: Any) -> None:
        """In the link's own thread."""
        one_core()
        try:
            self._carry(*order)
        except Exception as error:  # noqa: BLE001  (a thread that ends in silence would leave both ends waiting)
            self.abort(str(error) if isinstance(error, LinkError) else f"sending failed: {error!r}")

    def _carry(self, action: Action, tensors: Payload, weight_version: int, codec: Codec) -> None:
        message = frame.encode(
            action,
            tensors,
            generation=self.generation,
            max_tensors=self.max_tensors,
            weight_version=weight_version,
            codec=codec,
        )
        if self._keep is not None:
            self._keep(action, message)
        try:
            head = frame.parse(message.header, generation=self._other.generation, max_tensors=self.max_tensors)
        except LinkError as error:  # what the receiving end of a network would find
            self.abort(str(error))
            return
        if head.generation == self._other.generation:
            payload = frame.gather(message)
            arrived_at_s = time.time()
            found = frame.decode(head, payload, coded=self._other.coded)
            self._other.inbox.deliver(head, found, arrived_at_s)

    def _sent(self) -> None:
        """Wait until the link's thread has sent what it was handed."""
        if self._crew is not None:
            with suppress(Empty):
                self._crew.hand([_nothing]).get(timeout=CLOSE_TIMEOUT_S)

    def recv(self, action: Action, timeout_s: float) -> Message:
        return self._own.inbox.take(action, timeout_s)

    def keep_sent(self, keep: KeepSent) -> None:
        self._keep = keep

    def use(self, codec_forward: Codec, codec_backward: Codec) -> None:
        self._codecs = Codecs(codec_forward, codec_backward)

    def leave_coded(self) -> None:
        self._own.coded = True

    def abort(self, reason: str) -> None:
        error = LinkAbortedError(f"{self.name}: aborted: {reason}")
        for end in (self._own, self._other):
            end.fail(error)

    def leave(self, reason: str) -> None:
        self._sent()
        self._own.fail(LinkAbortedError(f"{self.name}: aborted: {reason}"))
        self._other.fail(LinkAbortedError(f"{self.name}: aborted by the peer: {reason}"), keep=True)

    def close(self) -> None:
        self._sent()
        if self._crew is not None:
            self._crew.close()
        error = LinkError(f"{self.name}: closed.")
        self._own.fail(error)
        self._other.fail(error, keep=True)


def _nothing() -> None:
    """What a thread does last."""
