"""The watcher of a node's stages: the driver itself on its own node, an actor without resources on every other one.

Here     looks when it is asked, in the driver's process
There    an actor that looks ten times a second, and is asked as often as it answers

Both also know what a cloud has announced for their machine (notices.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.runtime.workers.notices import Announced, Notice
from raypipe.runtime.workers.processes import LOOK_S, Ended, Look, Processes

__all__ = ["Here", "There", "watcher_of"]

ANSWER_S = 3.0
"""A watcher that has been silent for longer than this says nothing of its node any more."""
ENDED_S = 1.0
"""How long a node may take to say how a process ended."""
AGAIN_S = 10.0


class Here:
    """The watcher of this process's own node."""

    def __init__(self) -> None:
        self._processes = Processes()
        self._announced = Announced()
        self.looks: Mapping[int, Look] = {}

    @property
    def announced(self) -> tuple[Notice, ...]:
        """By the machine's cloud, so far."""
        return self._announced.notices

    def ask(self, pids: Sequence[int], now_s: float, awake_s: float) -> None:
        """Look at these processes.

        Args:
            awake_s: since the last call, in which the caller was awake.
        """
        for pid in pids:
            self._processes.watch(pid)
        self._processes.sample(now_s)
        self.looks = self._processes.looks()

    def ended(self, pid: int) -> Ended | None:
        """How a process ended; None where it is there or nobody knows."""
        return _told(self._processes, pid, ENDED_S)

    def end(self, pid: int) -> None:
        self._processes.end(pid)

    def close(self) -> None:
        self._announced.close()
        self._processes.close()


class There:
    """The watcher of another node, as long as that answers.

    Args:
        node: Ray's id of it.

    Attributes:
        announced: by the machine's cloud, as far as its actor has told.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._actor = _start(node)
        self._asked: Any = None
        self._looks: Mapping[int, Look] = {}
        self.announced: tuple[Notice, ...] = ()
        self._silent_s = 0.0
        self._begun_s = time.monotonic()

    @property
    def looks(self) -> Mapping[int, Look]:
        """Of the last answer; none of one that is too old."""
        return self._looks if self._silent_s < ANSWER_S else {}

    def ask(self, pids: Sequence[int], now_s: float, awake_s: float) -> None:
        """Take the answer that has come, if one has, and ask again."""
        self._silent_s += awake_s
        if self._asked is not None and ray.wait([self._asked], timeout=0)[0]:
            asked, self._asked = self._asked, None
            try:
                self._looks, self.announced = ray.get(asked)
                self._silent_s = 0.0
            except ActorDiedError:
                if now_s - self._begun_s > AGAIN_S:
                    self._actor, self._begun_s = _start(self._node), now_s
            except RayError:  # it cannot be reached at the moment
                pass
        if self._asked is None:
            self._asked = self._actor.looks.remote(list(pids))

    def ended(self, pid: int) -> Ended | None:
        try:
            found: Ended | None = ray.get(self._actor.ended.remote(pid), timeout=ENDED_S * 2)
        except RayError:
            return None
        return found

    def end(self, pid: int) -> None:
        self._actor.end.remote(pid)

    def close(self) -> None:
        with contextlib.suppress(RayError):
            ray.kill(self._actor, no_restart=True)


def watcher_of(node: str) -> Here | There:
    """Of the node with this id."""
    return Here() if node == ray.get_runtime_context().get_node_id() else There(node)


class _NodeWatch:
    """The actor: it looks in a thread of its own, so that what it says does not depend on how often it is asked."""

    def __init__(self) -> None:
        self._processes = Processes()
        self._announced = Announced()
        threading.Thread(target=self._run, name="raypipe node watch", daemon=True).start()

    def looks(self, pids: Sequence[int]) -> tuple[dict[int, Look], tuple[Notice, ...]]:
        """At these processes from now on, and what the cloud has announced."""
        for pid in pids:
            self._processes.watch(pid)
        return self._processes.looks(), self._announced.notices

    def ended(self, pid: int) -> Ended | None:
        return _told(self._processes, pid, ENDED_S)

    def end(self, pid: int) -> None:
        self._processes.end(pid)

    def _run(self) -> None:
        while True:
            self._processes.sample(time.monotonic())
            time.sleep(LOOK_S)


def _told(processes: Processes, pid: int, wait_s: float) -> Ended | None:
    """How a process ended, as soon as the kernel says it; its raylet may be slow to ask."""
    deadline_s = time.monotonic() + wait_s
    while True:
        found = processes.ended(pid, time.monotonic())
        known = found is not None and (found.signal or found.status is not None)
        if known or pid not in processes or time.monotonic() > deadline_s:
            return found
        time.sleep(0.01)


def _start(node: str) -> Any:
    return (
        ray.remote(num_cpus=0, max_restarts=0, max_concurrency=2)(_NodeWatch)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote()
    )
