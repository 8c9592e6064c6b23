"""Hears which nodes are about to go, of Ray's list and of the clouds, and has the stages on them moved in time.

Ray's list (drains.py)     a node of this run is on it             --> event "drain", leave
a cloud (notices.py)       a machine goes                          --> event "drain", Ray is told, leave
                           it pauses, or may be taken some day     --> event "notice"
the driver's own node      is one of these                         --> the driver is told too, with stages there or not
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

from raypipe.errors import CheckpointError
from raypipe.runtime.workers.drains import drain_node, draining_nodes
from raypipe.runtime.workers.notices import Kind, Notice
from raypipe.runtime.workers.places import AWAY

__all__ = ["DrainWatch"]

EVERY_S = 1.0


class DrainWatch:
    """A thread of the driver; it ends with ``close``.

    Args:
        nodes: Ray's ids of the nodes that the run has workers on now.
        announced: by clouds so far, by node.
        leave: told once of each node with workers that is about to go.
        event: (decision, reason, ...) notes it.
        here: the driver's node.
        driver_goes: told once, after ``leave``, where that is about to go: (deadline in Unix seconds, or None; why Ray
            would not start the driver again on another node, "" where it would).

    Attributes:
        going: nodes that are about to go -> Unix seconds of the deadline; None where nobody knows.
    """

    def __init__(
        self,
        nodes: Callable[[], Set[str]],
        announced: Callable[[], Mapping[str, Sequence[Notice]]],
        leave: Callable[[Collection[str]], None],
        event: Callable[..., None],
        here: str = "",
        driver_goes: Callable[[float | None, str], None] = lambda deadline_s, stays: None,
    ) -> None:
        self._nodes, self._announced, self._leave, self._event = nodes, announced, leave, event
        self._here, self._driver_goes, self._looked = here, driver_goes, False
        self.going: Mapping[str, float | None] = {}
        self._heard: set[tuple[str, Notice]] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="raypipe drains", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(EVERY_S)

    def _watch(self) -> None:
        complaint: type[Exception] | None = None
        pause_s = 0.0  # the first look tells which nodes were to go before this driver began
        while not self._ended.wait(pause_s):
            pause_s = EVERY_S
            try:
                self._look()
                self._looked = True
            except Exception as error:  # noqa: BLE001  (whatever it is, the next look may work)
                if type(error) is not complaint:
                    complaint = type(error)
                    self._note(
                        "warning", f"Nobody could tell which nodes are about to go; it is tried again: {error!r}"
                    )

    def _look(self) -> None:
        for node, notices in self._announced().items():
            for notice in notices:
                self._hear(node, notice)
        try:
            draining = draining_nodes()
        except AWAY:
            return
        ours = {*self._nodes(), self._here}
        new = {node for node in draining if node in ours} - set(self.going)
        if not new:
            return
        self.going = {**self.going, **{node: draining[node] for node in new}}
        deadlines = [s for node in new if (s := draining[node]) is not None]
        self._note("drain", f"Ray drains {', '.join(sorted(new))}", **_numbers(min(deadlines, default=None)))
        self._tell(new, "" if self._looked else "Ray has started it on a node that was to go already")

    def _hear(self, node: str, notice: Notice) -> None:
        """Of a cloud, once. Ray is told first, so that no other worker is started on a machine that goes."""
        if (node, notice) in self._heard:
            return
        self._heard.add((node, notice))
        numbers = {"node": node, **_numbers(notice.deadline_s)}
        if notice.kind is not Kind.GOES:
            self._note("notice", f"{notice.reason}: the machine {notice.kind}", **numbers)
            return
        known = node in self.going
        self.going = {**self.going, node: notice.deadline_s}
        if refused := _refused(node, notice):
            numbers["ray"] = refused
        self._note("drain", notice.reason, **numbers)
        if not known:
            self._tell({node}, refused and "Ray does not take the node for one that goes")

    def _tell(self, nodes: Collection[str], stays: str) -> None:
        """Stages first: the driver that moves them goes after them, but for the reason why it stays."""
        if with_workers := self._nodes() & set(nodes):
            self._leave(with_workers)
        if self._here in nodes:
            self._driver_goes(self.going[self._here], stays)

    def _note(self, decision: str, reason: str, **numbers: Any) -> None:
        with contextlib.suppress(CheckpointError):  # a full disk is told by those who need the folder
            self._event(decision, reason, **numbers)


def _refused(node: str, notice: Notice) -> str:
    try:
        return drain_node(node, notice.reason, notice.deadline_s)
    except AWAY as error:
        return f"Ray could not be told: {error}"


def _numbers(deadline_s: float | None) -> dict[str, Any]:
    """Of a deadline in Unix seconds, for events.jsonl."""
    if deadline_s is None:
        return {}
    return {"deadline_s": round(deadline_s, 1), "seconds_left": round(deadline_s - time.time(), 1)}
