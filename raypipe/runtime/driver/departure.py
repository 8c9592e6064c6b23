"""A driver whose own node is about to go, whether stages are there too or not.

moves    its stages leave first; behind a step it ends, Ray starts it again on another node, and it takes them over
stays    without failures to survive, on the head, or where Ray would start it here again: a checkpoint at once, and
         another one shortly before the node goes

Where nobody moved it, its death with the node would be noticed by Ray's health checks alone, in which stages wait.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ray

from raypipe.engine.rundir import RunFolder
from raypipe.errors import CheckpointError
from raypipe.runtime.run.requests import Requests
from raypipe.runtime.run.spec import RunSpec
from raypipe.runtime.workers.drain_watch import DrainWatch
from raypipe.runtime.workers.fleet import Fleet

__all__ = ["Departure", "watching_drains", "why_it_stays"]

BEFORE_S = 20.0
"""Before the node goes, for the second checkpoint."""
HEAD = "node:__internal_head__"
"""Resource of the node that Ray's own servers are on."""


class Departure:
    """Of one driver; ``goes`` is what DrainWatch tells.

    Args:
        stays: for people, why it cannot move; "" where it can.
        end: this process, which Ray starts again.
        alert: tells everybody who waits for news.
        event: (decision, reason, ...) notes it.
    """

    def __init__(
        self,
        stays: str,
        requests: Requests,
        end: Callable[[], None],
        alert: Callable[[str], None],
        event: Callable[..., None],
    ) -> None:
        self._stays, self._requests, self._end = stays, requests, end
        self._alert, self._event = alert, event
        self._timer: threading.Timer | None = None

    def goes(self, deadline_s: float | None, stays: str) -> None:
        """The node of this driver is about to go.

        Args:
            deadline_s: Unix seconds; None where nobody knows.
            stays: why Ray would not start the driver again on another node, as far as that has to do with the node.
        """
        stays = self._stays or stays
        if not stays:
            self._alert("the node of the driver is about to go: it moves to another one between two steps")
            self._requests.hand_over(self._move)
            return
        self._alert(f"the node of the driver is about to go, and the driver stays, for {stays}: checkpoints are saved")
        self._note("driver stays", stays)
        self._requests.checkpoint()
        if deadline_s is not None and (left_s := deadline_s - time.time() - BEFORE_S) > BEFORE_S:
            self._timer = threading.Timer(left_s, self._requests.checkpoint)
            self._timer.daemon = True
            self._timer.start()

    def close(self) -> None:
        """No checkpoint is asked for any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _move(self) -> None:
        """Called by the loop, when all that it knows is written."""
        self._note("driver moves", "its node is about to go; the next driver takes the stages over where they stand")
        self._end()

    def _note(self, decision: str, reason: str) -> None:
        with contextlib.suppress(CheckpointError):  # a full disk is told by those who need the folder
            self._event(decision, reason)


def why_it_stays(node: str, max_failures: int) -> str:
    """Why a driver on this node would not be started again elsewhere; "" where it would.

    Args:
        node: Ray's id of it.
    """
    if not max_failures:
        return "FailureConfig(max_failures=0) has Ray start no driver again"
    nodes: list[dict[str, Any]] = ray.nodes()
    if any(one["NodeID"] == node and HEAD in one["Resources"] for one in nodes):
        return "this is the head, with which the whole cluster goes"
    return ""


@contextlib.contextmanager
def watching_drains(
    fleet: Fleet, spec: RunSpec, requests: Requests, alert: Callable[[str], None]
) -> Iterator[DrainWatch]:
    """Inside, stages leave nodes that are about to go, and so does the driver that calls this.

    Args:
        alert: tells everybody who waits for news.
    """
    here, event = ray.get_runtime_context().get_node_id(), RunFolder(spec.place).event
    end = partial(os.kill, os.getpid(), signal.SIGKILL)  # nothing is to be tidied up: the stages stay
    departure = Departure(why_it_stays(here, spec.max_failures), requests, end, alert, event)
    watch = DrainWatch(lambda: fleet.nodes, lambda: fleet.watch.announced, requests.leave, event, here, departure.goes)
    with contextlib.closing(departure), contextlib.closing(watch):
        yield watch
