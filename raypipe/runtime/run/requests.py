"""What is asked of a running loop from outside its thread: begin, stop, save a checkpoint, resize, leave nodes, move
layers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Protocol

from raypipe.errors import PlanError, RaypipeError
from raypipe.planner.replan import Offer
from raypipe.runtime.run.planned import Planned

__all__ = ["Requests", "Resize"]


class _Haltable(Protocol):
    def halt(self) -> None: ...


class Resize:
    """A number of stages that somebody wants, and the answer.

    Attributes:
        planned: the plan for them; None where one is to be made.
        reason: why, for people.
        num_replicas: of every stage, one number for all or one for each; None for as many as were configured.
        error: why the run does not have it; None where it has.
    """

    def __init__(
        self,
        num_stages: int,
        planned: Planned | None = None,
        reason: str = "asked for",
        num_replicas: int | tuple[int, ...] | None = None,
    ) -> None:
        self.num_stages, self.planned, self.reason = num_stages, planned, reason
        self.num_replicas = num_replicas
        self.done = threading.Event()
        self.error: RaypipeError | None = None

    def answer(self, error: RaypipeError | None = None) -> None:
        self.error = error
        self.done.set()


class Requests:
    """Shared by the thread that runs the loop and those that answer people.

    Attributes:
        stop_reason: why the run shall end after the segment that is running; empty while nobody asked.
    """

    def __init__(self) -> None:
        self.stop_reason = ""
        self._fleet: _Haltable | None = None
        self._resize: Resize | None = None
        self._leaving: set[str] = set()
        self._offer: Offer | None = None
        self._joining = False
        self._hand_over: Callable[[], None] | None = None
        self._patience_s = 0.0
        self._over = False
        self._lock = threading.Lock()
        self._checkpoint = threading.Event()
        self._go_on = threading.Event()

    def serve(self, fleet: _Haltable, patience_s: float = 0.0) -> None:
        """From now on ``stop`` halts this fleet, at once if it was asked for already.

        Args:
            patience_s: so long nodes may wait to be left until the run comes to a step at which it pauses anyway.
        """
        with self._lock:
            self._fleet, self._patience_s = fleet, patience_s
            stopping, leaving = bool(self.stop_reason), bool(self._leaving)
        if stopping:
            fleet.halt()
        elif leaving:
            self._halt_to_leave()

    def checked(self) -> None:
        """The model has been checked: the loop may begin."""
        self._go_on.set()

    def wait_checked(self, timeout_s: float) -> bool:
        """Wait for that word; whether the loop may begin, be it only to stop."""
        return self._go_on.wait(timeout_s) or bool(self.stop_reason)

    def stop(self, reason: str) -> None:
        """End the run after the segment that is running, with a checkpoint. The first reason is the one told."""
        with self._lock:
            self.stop_reason = self.stop_reason or reason or "asked to stop"
            fleet = self._fleet
        if fleet is not None:
            fleet.halt()

    def resize(
        self,
        num_stages: int,
        timeout_s: float,
        planned: Planned | None = None,
        reason: str = "asked for",
        num_replicas: int | tuple[int, ...] | None = None,
    ) -> None:
        """Have the run go on with so many stages; waits until it does.

        Args:
            planned, reason, num_replicas: as in ``Resize``.

        Raises:
            PlanError: there is no such plan, no place for it, or nobody is there to make one.
        """
        asked = Resize(num_stages, planned, reason, num_replicas)
        with self._lock:
            if self._over:
                raise PlanError("The run is over, so it cannot be resized.")
            if self._resize is not None or self._fleet is None or self.stop_reason:
                why = self.stop_reason or ("it is being resized" if self._resize else "it has not begun")
                raise PlanError(f"The run cannot be resized now: {why}. Ask again later.")
            self._resize, fleet = asked, self._fleet
        fleet.halt()
        if not asked.done.wait(timeout_s):
            raise PlanError(f"The run was not resized within {timeout_s:g} s; it may be so later: see its status.")
        if asked.error is not None:
            raise asked.error

    def leave(self, nodes: Collection[str]) -> None:
        """Have the stages on these nodes moved to others soon, for the nodes are about to go."""
        with self._lock:
            self._leaving.update(nodes)
            served = self._fleet is not None
        if served:
            self._halt_to_leave()

    def _halt_to_leave(self) -> None:
        if self._patience_s:
            timer = threading.Timer(self._patience_s, self._halt_if_leaving)
            timer.daemon = True
            timer.start()
        else:
            self._halt_if_leaving()

    def _halt_if_leaving(self) -> None:
        with self._lock:
            fleet, leaving = self._fleet, bool(self._leaving)
        if fleet is not None and leaving:
            fleet.halt()

    def offer(self, offer: Offer) -> None:
        """Have the stages cut like this soon. What is ordered already comes first: there is no hurry."""
        with self._lock:
            self._offer = offer

    def join(self) -> None:
        """Have spares taken in where replicas are missing. What is ordered already comes first."""
        with self._lock:
            self._joining = True

    def hand_over(self, go: Callable[[], None]) -> None:
        """Have ``go`` end this driver soon, behind a step: another one takes the stages over where they stand."""
        with self._lock:
            self._hand_over = go

    def take_hand_over(self) -> Callable[[], None] | None:
        """What ends this driver, once; None while it has been asked for what the next one would not know of: stages to
        move or to resize, a checkpoint, an end."""
        with self._lock:
            if self._leaving or self._resize is not None or self.stop_reason or self._checkpoint.is_set():
                return None
            found, self._hand_over = self._hand_over, None
        return found

    def take_joining(self) -> bool:
        """Whether spares are to be taken in, once."""
        with self._lock:
            found, self._joining = self._joining, False
        return found

    @property
    def has_offer(self) -> bool:
        """Whether there is another cut to take."""
        return self._offer is not None

    def take_offer(self) -> Offer | None:
        """The other cut, once."""
        with self._lock:
            found, self._offer = self._offer, None
        return found

    @property
    def wants_change(self) -> bool:
        """Whether there is a resize, a move or another cut to be made, or a replica to be taken in."""
        with self._lock:
            return self._resize is not None or bool(self._leaving) or self._offer is not None or self._joining

    def take_leaving(self) -> frozenset[str]:
        """The nodes that are about to go, once."""
        with self._lock:
            found, self._leaving = frozenset(self._leaving), set()
        return found

    def take_resize(self) -> Resize | None:
        """The resize that somebody waits for, once; whoever takes it answers it."""
        with self._lock:
            asked, self._resize = self._resize, None
        return asked

    def end(self) -> None:
        """Nobody answers any more, and whoever asks is told so at once."""
        with self._lock:
            self._over, self._fleet = True, None
        if (asked := self.take_resize()) is not None:
            asked.answer(PlanError("The run ended before it could be resized."))

    def checkpoint(self) -> None:
        """Save a checkpoint after one of the next segments."""
        self._checkpoint.set()

    @property
    def wants_checkpoint(self) -> bool:
        """Whether somebody asked for a checkpoint that has not been taken."""
        return self._checkpoint.is_set()

    def take_checkpoint(self) -> bool:
        """Whether somebody asked for a checkpoint since the last call."""
        asked = self._checkpoint.is_set()
        self._checkpoint.clear()
        return asked
