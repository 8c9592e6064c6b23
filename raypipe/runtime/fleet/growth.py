"""Workers that a run starts while it trains: spares that replace lost workers, and growth.

Spares are actors without stages, with torch and the optimizer imported. A run whose number of workers may change has a
Growth, which also starts workers as nodes come, and resizes the run if that pays:

    ask_for ---> pending placement groups, which Ray's autoscaler counts ---> start_granted ---> spares
                                                                                                   |
    Requests.resize <--- pays? <--- a plan for all available workers <-----------------------------+

A thread of the driver checks once a second for placement groups that Ray has created. Growth pays if the time that
shorter steps save exceeds the duration of the resize, see planner/elastic.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from raypipe.config.ray import WorkerRange
from raypipe.errors import PlanError, RaypipeError
from raypipe.planner.elastic import (
    LEAST_GAIN,
    Gain,
    begins_with,
    gain_of,
    move_seconds,
    pays,
    target_workers,
)
from raypipe.run.requests import Requests
from raypipe.run.spec import Planned, RequestedSize, RunSpec
from raypipe.run.status import RunStatus
from raypipe.runtime.fleet.fleet import Fleet
from raypipe.runtime.fleet.waiting import Waiting
from raypipe.runtime.worker.places import AWAY, PLACE_TIMEOUT_S

EVERY_S = 1.0
PATIENCE_S = 2.0
"""Timeout in seconds of a wait for a placement group after a worker was lost or has to move; short, because such a run
can grow again later."""
AGAIN_S = 10.0
"""Seconds between two attempts to start workers or spares, after a failed one."""
POLL_S, SLOW_POLL_S = 0.25, 2.0
RESIZE_TIMEOUT_S = 600.0


class Growth:
    """Growth of one run: starts missing workers, waits if there are too few to train, and resizes the run.

    Args:
        fleet: has no plan yet, or the plan that the previous driver left.
        workers: smallest and largest number of workers, and the interval between two decisions to grow.
        wanted: number of workers that the run's largest plan uses.
        waiting: used to wait for workers.
        event: called with (decision, reason, ...) to record an event in events.jsonl.
        survives: True if the run survives failures, so that one more worker is kept as a spare.
    """

    def __init__(
        self,
        fleet: Fleet,
        workers: WorkerRange,
        wanted: int,
        requests: Requests,
        waiting: Waiting,
        event: Callable[..., None],
        *,
        survives: bool,
    ) -> None:
        self._fleet, self._workers, self._requests = fleet, workers, requests
        self._wanted, self._survives = wanted, survives
        self._waiting, self._event = waiting, event
        self._looked_s, self._move_s = time.monotonic(), 0.0
        self._planned: dict[int, Planned] = {}  # by workers; planning may take seconds
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._going: Callable[[], Mapping[str, float | None]] = dict
        self._make: Callable[[int], Planned]
        self._state_bytes = 0.0
        fleet.places.patience_s = PATIENCE_S

    @property
    def count(self) -> int:
        """Number of members to have: wanted workers, plus a spare if the run survives failures, within the range."""
        return target_workers(self._workers, self._wanted, spare=self._survives)

    def least(self) -> int:
        """Return the smallest number of workers with which the run trains."""
        return min(self._workers.least, self._wanted)

    def resized(self, size: RequestedSize) -> None:
        """Limit the growth of the run to ``size.workers`` workers; drop cached plans."""
        self._wanted = size.workers
        self._planned.clear()

    def refill(self) -> None:
        """Do nothing, unlike ``Spares.refill``: the thread requests missing workers at its next check."""

    def plan(self, make: Callable[[int], Planned]) -> Planned | None:
        """Wait for enough workers and return a plan for them; return None if the run was stopped.

        Args:
            make: called with a number of workers; returns a plan, or raises PlanError if more workers are needed.

        Raises:
            PlanError: there is no plan even for all wanted workers, or workers did not come in time.
        """
        least, why = 0, ""
        while workers := self.wait(least, why):
            try:
                return make(workers)
            except PlanError as impossible:  # it needs the memory of more workers
                if workers >= self._wanted:
                    raise
                least, why = workers + 1, str(impossible)
        return None

    def wait(self, least: int = 0, why: str = "") -> int:
        """Start workers as their placement groups are created, until there are enough.

        Args:
            least: number of workers that are needed; has no effect if it is below the range's minimum.
            why: reason for ``least``, for messages.

        Returns:
            Number of workers to make a plan for; 0 if the run was stopped.

        Raises:
            PlanError: too few workers came in time.
        """
        needed = max(least, self.least())

        def begins(there: int) -> int:
            return begins_with(self._workers, self._wanted, there) if there >= least else 0

        return self._waiting.until(lambda: self.count, begins, needed, why, self._going)

    def serve(
        self,
        make: Callable[[int], Planned],
        state_bytes: float,
        status: Callable[[], RunStatus],
        going: Callable[[], Mapping[str, float | None]],
    ) -> None:
        """Start a thread that grows the run until ``close``.

        Args:
            make: called from any thread with a number of workers; returns a plan for them.
            state_bytes: approximate bytes of the run's state, from which the duration of a resize is estimated.
            status: returns the status of the run.
            going: returns the nodes that are about to go, with their deadlines; see DrainWatch.
        """
        self._looked_s, self._going = time.monotonic(), going
        self._make, self._state_bytes = make, state_bytes
        self._thread = threading.Thread(target=self._grow, args=(status,), name="raypipe growth", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; pending placement groups are removed when the fleet ends."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(EVERY_S)

    def _grow(self, status: Callable[[], RunStatus]) -> None:
        pause_s, complaint = EVERY_S, ""
        while not self._ended.wait(pause_s):
            pause_s = EVERY_S
            try:
                self._fleet.places.ask_for(self.count, self._going())
                if not self._fleet.recovering and self._fleet.places.start_granted():
                    try:
                        self._fleet.rehearse_spares()
                    finally:
                        self._leave_again()
                if time.monotonic() - self._looked_s >= self._workers.interval_s:
                    self._look(status())
                    self._looked_s = time.monotonic()
            except Exception as error:  # noqa: BLE001  (whatever it is, the next look may work)
                pause_s = AGAIN_S
                what = str(error) if isinstance(error, RaypipeError) else type(error).__name__
                if what != complaint and not self._ended.is_set():
                    complaint = what
                    self._event("warning", f"The run could not grow: {str(error) or what}")

    def _leave_again(self) -> None:
        """Request again that stages leave draining nodes, after new spares came.

        An earlier request may have been refused for lack of spares.
        """
        now_s = time.time()
        in_time = {node for node, deadline_s in self._going().items() if deadline_s is None or now_s < deadline_s}
        if left := in_time & {member.facts["node"] for member in self._fleet.in_use if not member.lost}:
            self._requests.leave(left)

    def _look(self, status: RunStatus) -> None:
        """Resize the run to all available workers if that pays.

        If even a resize to the wanted number of workers would not pay, the present number becomes the wanted number.
        """
        used = len(self._fleet.in_use)
        there = min(len(self._fleet.places.staying(self._going())), self._wanted)
        if self._wanted <= used or status.state != "running":
            return
        if there > used:
            planned, gain = self._plan_of(there), self._gain(used, there, status)
            if planned.plan.schedule.num_workers > used and (gain is None or pays(gain, LEAST_GAIN)):
                self._resize(planned, gain, there - used)
                return
        gain = self._gain(used, self._wanted, status)
        if gain is not None and not pays(gain, LEAST_GAIN):
            self._wanted = used
            self._event("want fewer", f"more than {used} workers would not pay: {_in_words(gain)}")

    def _plan_of(self, workers: int) -> Planned:
        if workers not in self._planned:
            self._planned[workers] = self._make(workers)
        return self._planned[workers]

    def _gain(self, used: int, there: int, status: RunStatus) -> Gain | None:
        """Estimate the gain of a resize from ``used`` to ``there`` workers; None if a plan has no predicted times."""
        now, then = (self._plan_of(workers).plan.prediction for workers in (used, there))
        if now is None or then is None:
            return None
        move_s = move_seconds(self._state_bytes, self._move_s)
        return gain_of(now.step_s, then.step_s, status.step_s, move_s, status.num_steps - status.step)

    def _resize(self, planned: Planned, gain: Gain | None, more: int) -> None:
        begin_s = time.monotonic()
        why = "" if gain is None else f", and {_in_words(gain)}"
        reason = f"{more} more worker{'s' * (more > 1)} came{why}"
        try:
            self._requests.resize(planned.plan.partition.num_stages, RESIZE_TIMEOUT_S, planned, reason)
        except PlanError:  # it is being resized, or ends, or the loop has recorded why not: the next look tries again
            return
        self._move_s = time.monotonic() - begin_s


def growth_of(
    fleet: Fleet,
    spec: RunSpec,
    requests: Requests,
    waiting: Waiting,
    event: Callable[..., None],
    size: RequestedSize | None = None,
) -> Growth | None:
    """Create the Growth of a run whose number of workers may change; return None for a fixed number.

    Args:
        size: size of the last resize, under an earlier driver; None if the run was not resized.
        event: see Growth.
    """
    if spec.workers is None:
        return None
    growth = Growth(
        fleet, spec.workers, spec.wanted_workers, requests, waiting, event, survives=bool(spec.max_failures)
    )
    if size is not None:
        growth.resized(size)
    return growth


def _in_words(gain: Gain) -> str:
    return (
        f"steps should take {gain.after_s:.3g} s instead of {gain.before_s:.3g} s, {gain.steps_left} of them are left, "
        f"for a move of {gain.pause_s:.3g} s"
    )


class Spares:
    """Spares of one run: starts new ones in a thread, so that the number of workers and spares together stays the same.

    Args:
        count: number of workers and spares to keep; 0 for a run without spares.
        event: called with (decision, reason) when a spare is ready, or could not be started.
        join: called when a spare is ready, to request that spares become replicas; the wait for placement groups then
            has no timeout. None for a run without replicas.
        offered: smallest value of ``count`` after a resize.
    """

    def __init__(
        self,
        fleet: Fleet,
        count: int,
        event: Callable[[str, str], None],
        join: Callable[[], None] | None = None,
        offered: int = 0,
    ) -> None:
        self._fleet, self.count, self._event, self._join = fleet, count, event, join
        self._offered = offered
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def resized(self, size: RequestedSize) -> None:
        """Adapt ``count`` to a resized run's number of workers; do nothing in a run without replicas or spares."""
        if self._join is not None and self.count:
            self.count = max(self._offered, size.workers)

    def refill(self) -> None:
        """Start missing spares in a thread, unless it is running already; call ``join`` at once if a spare is ready."""
        if self._join is not None and self._fleet.spares:
            self._join()
        with self._lock:
            busy = self._thread is not None and self._thread.is_alive()
            if busy or self._fleet.places.living >= self.count:
                return
            self._thread = threading.Thread(target=self._refill, name="raypipe spares", daemon=True)
            self._thread.start()

    def _refill(self) -> None:
        places, reported = self._fleet.places, ""
        while not places.closed:
            try:
                if self._started():
                    self._fleet.rehearse_spares()
                    self._event(
                        "spare", f"{self.count} workers are there; spares have torch and the optimizer imported"
                    )
                    if self._join is not None:
                        self._join()
                return
            except (RaypipeError, *AWAY) as error:
                what = f"A spare worker could not be started: {error}"
                if what != reported and not places.closed:
                    self._event("warning", what)
                if self._join is None:
                    return
                reported = what
                time.sleep(AGAIN_S)

    def _started(self) -> bool:
        """Start missing spares as their placement groups are created, but not while the run recovers from a failure.

        Returns:
            False if a placement group was not created in time in a run without replicas, or if the fleet has ended.
        """
        places, late_s, reported = self._fleet.places, time.monotonic() + PLACE_TIMEOUT_S, False
        while places.living < self.count and not places.closed:
            if self._fleet.recovering:
                time.sleep(POLL_S)
                late_s = time.monotonic() + PLACE_TIMEOUT_S
                continue
            places.ask_for(self.count)  # in every round: more may be lost meanwhile
            if places.start_granted():
                continue
            if time.monotonic() > late_s and not reported:
                reported, waits = True, " The run goes on without, and waits for it." if self._join else ""
                self._event("warning", f"A worker found no place within {PLACE_TIMEOUT_S:g} s.{waits}")
                if self._join is None:
                    places.ask_for(places.living)
                    return False
            time.sleep(SLOW_POLL_S if reported else POLL_S)
        return not places.closed


def spares_of(
    fleet: Fleet, spec: RunSpec, wanted: int, join: Callable[[], None], event: Callable[[str, str], None]
) -> Spares:
    """Create the Spares of a run; their ``count`` is 0 if the run does not survive failures (max_failures=0).

    Args:
        wanted: number of workers with all replicas of all stages; 0 for a run without replicas.
        join, event: see Spares.
    """
    offered = spec.num_workers or 0
    count = max(offered, wanted) if spec.max_failures else 0
    return Spares(fleet, count, event, join if wanted else None, offered)
