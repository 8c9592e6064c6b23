"""Window: how much may be under way on one direction of an object-store link until an answer comes."""

from __future__ import annotations

import threading

__all__ = ["Window"]

WINDOW_BYTES = 64 << 20
WINDOW_MESSAGES = 8


class Window:
    """Messages and bytes under way in one direction that an answer is to come for: a sender waits for room."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages = self._bytes = 0
        self._open = True

    @property
    def open(self) -> bool:
        return self._open

    def enter(self, messages: int, nbytes: int) -> bool:
        """Wait for room; False when the window was closed. What is larger than the window goes alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open or self._room(messages, nbytes))
            self._messages, self._bytes = self._messages + messages, self._bytes + nbytes
            return self._open

    def leave(self, messages: int, nbytes: int) -> None:
        with self._changed:
            self._messages, self._bytes = self._messages - messages, self._bytes - nbytes
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> None:
        """Wait until nothing is under way."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open or self._messages == 0, timeout_s)

    def close(self) -> None:
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def _room(self, messages: int, nbytes: int) -> bool:
        many = self._messages + messages > WINDOW_MESSAGES or self._bytes + nbytes > WINDOW_BYTES
        return self._messages == 0 or not many
