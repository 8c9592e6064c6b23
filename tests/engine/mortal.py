"""A worker that dies in the middle of a step, after so many of its messages."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

from raypipe.engine.executor import Executor
from raypipe.engine.memory_channel import InMemoryChannel
from raypipe.engine.messages.channel import Message
from raypipe.engine.one_thread import one_thread
from raypipe.errors import LinkError
from raypipe.ir.schedule import Row
from raypipe.ir.segment import Segment

__all__ = ["Mortal", "MortalChannel", "run_step"]


class Mortal:
    """Channels of a worker that is gone after so many messages, which it has sent or taken."""

    def __init__(self, most: float = math.inf) -> None:
        self.used, self.most = 0, most
        self.channels: dict[int, Any] = {}

    def use(self) -> None:
        if self.used == self.most:
            for channel in self.channels.values():
                channel.within.close()
        self.used += 1


class MortalChannel:
    def __init__(self, within: InMemoryChannel, life: Mortal) -> None:
        self.within, self._life = within, life

    def __getattr__(self, name: str) -> Any:
        return getattr(self.within, name)

    def send(self, *message: Any) -> None:
        self._life.use()
        self.within.send(*message)

    def recv(self, *wanted: Any) -> Message:
        self._life.use()
        return self.within.recv(*wanted)


def run_step(executors: Sequence[Executor], rows: Sequence[Row], segment: Segment) -> None:
    """One step of all workers, each in a thread; who fails leaves."""

    def work(executor: Executor, row: Row) -> None:
        try:
            executor.run(segment, row)
        except LinkError:
            executor.leave("it failed")

    with one_thread():
        threads = [threading.Thread(target=work, args=pair) for pair in zip(executors, rows, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
