"""Workers of a run whose number may change: asked for, started as they come, and taken into its plan where that pays.

    ask_for ---> places that wait, which Ray's autoscaler counts ---> start_granted ---> spares
                                                                                           |
    Requests.resize <--- pays? <--- a plan for all that are there <------------------------+

A thread of the driver looks once a second. What it decides is in planner/elastic.py.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ray.exceptions import RayError

from raypipe.config.ray import WorkerRange
from raypipe.engine.rundir import RunFolder
from raypipe.errors import CheckpointError, PlanError, RaypipeError
from raypipe.planner.elastic import LEAST_GAIN, asked_for, begins_with, gain_of, move_seconds
from raypipe.planner.worth import Gain, pays
from raypipe.runtime.run.lease import Lease
from raypipe.runtime.run.planned import Asked, Planned
from raypipe.runtime.run.requests import Requests
from raypipe.runtime.run.spec import RunSpec
from raypipe.runtime.run.status import RunStatus
from raypipe.runtime.workers.fleet import Fleet
from raypipe.runtime.workers.places import AWAY, granted, in_words, room

__all__ = ["Growth", "Plans", "growth_of"]

EVERY_S = 1.0
POLL_S = 0.25
SETTLE_S = 0.5
"""After enough places have come, for how long others may follow before the run begins without them."""
PATIENCE_S = 2.0
"""For a place where a worker was lost or has to move: a run that grows again need not wait for one."""
AGAIN_S = 10.0
"""Between two tries to start a worker, after one that failed."""
MOST_FAILED = 3
"""Tries in a row to start workers, after which the run does not wait for others."""
RESIZE_TIMEOUT_S = 600.0


class Plans(Protocol):
    """Who makes plans for the run; see Recovery."""

    @property
    def state_bytes(self) -> float: ...

    def planned_for(self, workers: int) -> Planned: ...


class Growth:
    """Keeps a run's wish for workers, waits where there are too few, and has the run grow.

    Args:
        fleet: without a plan yet, or with one that it was left with.
        wanted: workers of the plan for the most of them.
        survives: the run survives failures, so that one more is worth having as a spare.
        tell: is called with what is waited for.
        event: (decision, reason, ...) notes it.

    Attributes:
        asked: the size that somebody asked for last, beyond which the run does not grow.
        check: is called again and again while the run waits; what it raises ends the wait.
    """

    def __init__(
        self,
        fleet: Fleet,
        workers: WorkerRange,
        wanted: int,
        requests: Requests,
        tell: Callable[[str], None],
        event: Callable[..., None],
        *,
        survives: bool,
    ) -> None:
        self._fleet, self._workers, self._requests = fleet, workers, requests
        self._wanted, self._survives = wanted, survives
        self.asked: Asked | None = None
        self.check: Callable[[], None] = lambda: None
        self._tell, self._event = tell, event
        self._looked_s, self._move_s = time.monotonic(), 0.0
        self._planned: dict[int, Planned] = {}  # by workers; planning may take seconds
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._going: Callable[[], Mapping[str, float | None]] = dict
        fleet.places.patience_s = PATIENCE_S

    @property
    def count(self) -> int:
        """Members that are worth keeping: workers, and perhaps a spare."""
        return asked_for(self._workers, self._wanted, spare=self._survives)

    def least(self) -> int:
        """Members without which the run waits."""
        return min(self._workers.least, self._wanted)

    def wants(self, asked: Asked) -> None:
        """From now on the run wants as many workers as these stages use, because somebody asked for them."""
        self.asked, self._wanted = asked, asked.workers
        self._planned.clear()

    def refill(self) -> None:
        """Places for those that are missing are asked for at the next look, as always."""

    def plan(self, make: Callable[[int], Planned]) -> Planned | None:
        """What ``make`` makes of the workers that are there, once there are enough; None to stop instead.

        Raises:
            PlanError: there is no plan even for as many as the run wants.
        """
        least, why = 0, ""
        while workers := self.wait(least, why):
            try:
                return make(workers)
            except PlanError as impossible:  # it needs the memory of more
                if workers >= self._wanted:
                    raise
                least, why = workers + 1, str(impossible)
        return None

    def wait(self, least: int = 0, why: str = "") -> int:
        """Start the members that come, and wait until there are enough; how many a plan may have, 0 to stop instead.

        Args:
            least: members that are needed, where the range allows fewer.
            why: that many, for people.
        """
        began_s, told, clock = time.monotonic(), "", time.strftime("%H:%M:%S")
        changed_s, here, failed = began_s, -1, 0
        places = self._fleet.places
        while not self._requests.stop_reason:
            self.check()
            coming = self._coming()
            if coming is None:
                time.sleep(POLL_S)
                continue
            if coming != here:
                changed_s, here = time.monotonic(), coming
            enough = coming >= least and begins_with(self._workers, self._wanted, coming) > 0
            if enough and (coming >= self.count or time.monotonic() - changed_s >= SETTLE_S):
                failed = self._started(failed)
                found = begins_with(self._workers, self._wanted, places.living)
                if found and found >= least:
                    return found
            elif not enough and time.monotonic() - began_s > EVERY_S:
                told = self._tell_waiting(self._waits_for(max(least, self.least()), coming, clock, why), told)
            time.sleep(POLL_S)
        return 0

    def _coming(self) -> int | None:
        """Ask for those that are missing; how many members there could be now. None where Ray does not answer."""
        places = self._fleet.places
        try:
            places.ask_for(self.count, self._going())
            return places.living + places.starting + len(granted(places.waiting))
        except AWAY:
            return None

    def _started(self, failed: int) -> int:
        """Start workers where there are places; how often that has failed in a row.

        Raises:
            RaypipeError, RayError: once too often.
        """
        try:
            self._fleet.places.start_granted()
        except (RaypipeError, RayError) as error:  # the node may have gone again
            if failed + 1 >= MOST_FAILED:
                raise
            self._note("warning", f"A worker could not be started: {error}")
            return failed + 1
        except AWAY:
            return failed
        return 0

    def _tell_waiting(self, line: str, told: str) -> str:
        if line != told:
            self._tell(line)
        if not told:
            self._note("wait for workers", line)
        return line

    def _note(self, decision: str, reason: str, **numbers: Any) -> None:
        with contextlib.suppress(CheckpointError):  # a full disk is told by those who need the folder
            self._event(decision, reason, **numbers)

    def _waits_for(self, least: int, coming: int, since: str, why: str) -> str:
        needs = self._fleet.places.needs
        try:
            has = f"the cluster has {room(needs)}"
        except AWAY:
            has = "the cluster does not answer"
        return (
            f"waiting since {since} for {least} worker{'s' * (least > 1)} of {in_words(needs)} each"
            f"{why and f' ({why})'}: {coming} can "
            f"be had, {self.count} are asked for, and {has}"
        )

    def serve(
        self, plans: Plans, status: Callable[[], RunStatus], going: Callable[[], Mapping[str, float | None]]
    ) -> None:
        """Grow from now on until ``close``, in a thread.

        Args:
            status: of the run now.
            going: nodes that are about to go; see DrainWatch.
        """
        self._looked_s, self._going = time.monotonic(), going
        self._thread = threading.Thread(target=self._grow, args=(plans, status), name="raypipe growth", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more; the fleet gives back the places that it waits for."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(EVERY_S)

    def _grow(self, plans: Plans, status: Callable[[], RunStatus]) -> None:
        pause_s, complaint = EVERY_S, ""
        while not self._ended.wait(pause_s):
            pause_s = EVERY_S
            try:
                self._fleet.places.ask_for(self.count, self._going())
                if self._fleet.places.start_granted():
                    try:
                        self._fleet.rehearse_spares()
                    finally:
                        self._leave_again()
                if time.monotonic() - self._looked_s >= self._workers.interval_s:
                    self._look(plans, status())
                    self._looked_s = time.monotonic()
            except Exception as error:  # noqa: BLE001  (whatever it is, the next look may work)
                pause_s = AGAIN_S
                what = str(error) if isinstance(error, RaypipeError) else type(error).__name__
                if what != complaint and not self._ended.is_set():
                    complaint = what
                    self._note("warning", f"The run could not grow: {str(error) or what}")

    def _leave_again(self) -> None:
        """There are new spares: a move from a node that goes, which was refused for want of them, may succeed now."""
        now_s = time.time()
        in_time = {node for node, deadline_s in self._going().items() if deadline_s is None or now_s < deadline_s}
        if left := in_time & {member.facts["node"] for member in self._fleet.in_use if not member.lost}:
            self._requests.leave(left)

    def _look(self, plans: Plans, status: RunStatus) -> None:
        """Have the run grow to all workers that are there, or ask for no more, where it would not pay."""
        used = len(self._fleet.in_use)
        there = min(len(self._fleet.places.staying(self._going())), self._wanted)
        if self._wanted <= used or status.state != "running":
            return
        if there > used:
            planned, gain = self._plan_of(plans, there), self._gain(plans, used, there, status)
            if planned.plan.schedule.num_workers > used and (gain is None or pays(gain, LEAST_GAIN)):
                self._resize(planned, gain, there - used)
                return
        gain = self._gain(plans, used, self._wanted, status)
        if gain is not None and not pays(gain, LEAST_GAIN):
            self._wanted = used
            self._note("ask for fewer", f"more than {used} workers would not pay: {_in_words(gain)}")

    def _plan_of(self, plans: Plans, workers: int) -> Planned:
        if workers not in self._planned:
            self._planned[workers] = plans.planned_for(workers)
        return self._planned[workers]

    def _gain(self, plans: Plans, used: int, there: int, status: RunStatus) -> Gain | None:
        """None where nobody knows: plans are made without seconds."""
        now, then = (self._plan_of(plans, workers).plan.prediction for workers in (used, there))
        if now is None or then is None:
            return None
        move_s = move_seconds(plans.state_bytes, self._move_s)
        return gain_of(now.step_s, then.step_s, status.step_s, move_s, status.num_steps - status.step)

    def _resize(self, planned: Planned, gain: Gain | None, more: int) -> None:
        begin_s = time.monotonic()
        why = "" if gain is None else f", and {_in_words(gain)}"
        reason = f"{more} more worker{'s' * (more > 1)} came{why}"
        try:
            self._requests.resize(planned.plan.partition.num_stages, RESIZE_TIMEOUT_S, planned, reason)
        except PlanError:  # it is being resized, or ends, or the loop has told why not: another look will tell
            return
        self._move_s = time.monotonic() - begin_s


def growth_of(
    fleet: Fleet,
    spec: RunSpec,
    requests: Requests,
    tell: Callable[[str], None],
    lease: Lease,
    asked: Asked | None = None,
) -> Growth | None:
    """Of a run that may change its number of workers; None of any other.

    Args:
        lease: on the run's folder: who lost it does not wait for workers any more.
        asked: the size that somebody asked an earlier driver for.
    """
    if spec.workers is None:
        return None
    event, survives = RunFolder(spec.place).event, bool(spec.max_failures)
    growth = Growth(fleet, spec.workers, spec.wanted_workers, requests, tell, event, survives=survives)
    growth.check = lease.check
    if asked is not None:
        growth.wants(asked)
    return growth


def _in_words(gain: Gain) -> str:
    return (
        f"steps should take {gain.after_s:.3g} s instead of {gain.before_s:.3g} s, {gain.steps_left} of them are left, "
        f"for a move of {gain.pause_s:.3g} s"
    )
