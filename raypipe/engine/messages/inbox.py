"""Inbox: where one thread leaves messages and another waits for the one it needs.

Every channel has one. Threads that wait for different messages do not disturb each other, and a
failure reaches all of them at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from raypipe.engine.messages.channel import Message, Stamp
from raypipe.engine.messages.frame import Head
from raypipe.errors import LinkError
from raypipe.ir.schedule import Action

__all__ = ["Inbox"]


class Inbox:
    """Messages that came and were not yet taken, by the sender's action.

    Args:
        name: the channel's, for messages to people.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._messages: dict[Action, Message] = {}
        self._error: LinkError | None = None
        self._lock = threading.Lock()
        # A bare lock per waiting thread: half the time to wake of a Condition, and only the one concerned wakes.
        self._waiting: list[tuple[Action, threading.Lock]] = []

    def deliver(
        self, head: Head, tensors: Sequence[torch.Tensor | None], arrived_at_s: float, damaged: int = 0
    ) -> None:
        """Leave a message. After a failure it is dropped; a second one of the same action is a failure.

        Args:
            arrived_at_s, damaged: see Stamp.
        """
        action = head.action
        stamp = Stamp(head.sent_at_s, arrived_at_s, head.payload_bytes, damaged)
        message = Message.of(tensors, head.weight_version, stamp)
        with self._lock:
            twice = action in self._messages
            if self._error is None and not twice:
                self._messages[action] = message
                self._wake(action)
        if twice:
            self.fail(LinkError(f"{self.name}: {action.words} came twice."))

    def take(self, action: Action, timeout_s: float) -> Message:
        """Wait for the message of ``action`` and remove it.

        Raises:
            LinkError: it did not come within ``timeout_s``, or the channel failed.
        """
        deadline_s = time.monotonic() + timeout_s
        woken = threading.Lock()
        woken.acquire()
        while True:
            with self._lock:
                if action in self._messages:
                    return self._messages.pop(action)
                if self._error is not None:
                    message = f"{self._error} (waiting for {action.words})"
                    raise type(self._error)(message) from self._error
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise LinkError(
                        f"{self.name}: {action.words} did not come within {timeout_s:g} s. "
                        "The peer is slower than the deadline, hangs, or its network is cut."
                    )
                self._waiting.append((action, woken))
            if not woken.acquire(timeout=min(left_s, threading.TIMEOUT_MAX)):
                self._give_up((action, woken))

    def fail(self, error: LinkError, *, keep: bool = False) -> None:
        """End every wait with ``error``, and every later one. The first failure is the one told.

        Args:
            error: what happened.
            keep: messages that are here may still be taken, because the peer ended in good order.
        """
        with self._lock:
            if self._error is None:
                self._error = error
            if not keep:
                self._messages.clear()
            self._wake(None)

    def _wake(self, action: Action | None) -> None:
        """Wake the threads that wait for ``action``, or all of them. Needs the lock."""
        still = []
        for wanted, woken in self._waiting:
            if action is None or wanted == action:
                woken.release()
            else:
                still.append((wanted, woken))
        self._waiting = still

    def _give_up(self, waiter: tuple[Action, threading.Lock]) -> None:
        """Leave the queue after a deadline, unless a message came in that very moment."""
        with self._lock:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:
                waiter[1].acquire()
