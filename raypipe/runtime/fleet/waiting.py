"""Wait for a run's workers: requests placement groups, reports what is missing, and gives up after a timeout.

    ask_for ---> pending groups, which Ray's autoscaler counts ---> enough to begin with ---> start_granted
       ^                           |
       +--- stop? lease lost? -----+---> report: what is missing, and what holds it ---> too late: PlanError

Runs of a fixed size and runs whose number of workers may change wait here, for their first workers and after a loss.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal

from raypipe.errors import PlanError
from raypipe.run.requests import Requests
from raypipe.runtime.fleet.fleet import Fleet
from raypipe.runtime.fleet.missing_resources import NO_ANSWER, Shortage, shortage
from raypipe.runtime.worker.places import AWAY, PLACE_TIMEOUT_S, created, in_words

Patience = float | Literal["auto"] | None
"""Type of PipelineConfig.resource_timeout_s."""

NOT_SCALED_S = 600.0
"""Timeout in seconds of a wait with patience "auto" on a cluster without an autoscaler."""
POLL_S = 0.25
TELL_S = 1.0
"""Seconds of waiting before the first report."""
LOOK_S = 30.0
"""Seconds between queries for the holders of resources; a change of the number of available workers causes one too."""
ANSWER_S = 10.0
"""Timeout in seconds of a query for the holders of resources; then the cluster is reported as not answering."""
SETTLE_S = 0.5
"""Seconds to wait for further placement groups, once enough for the run to begin have been created."""
YIELD_S = 3.0
"""Seconds between releasing all placement groups and requesting them again, in which another run gets the resources."""
MOST_FAILED = 3
"""Number of consecutive failed attempts to start workers that ends the wait."""


class Waiting:
    """Wait for the workers of one run: requests placement groups, starts workers in them, reports what is missing.

    Args:
        fleet: has no plan yet, or the plan that the previous driver left.
        requests: requests of clients; a request to stop ends a wait.
        report: called with a sentence that names what the run waits for.
        event: called with (decision, reason, ...) to record an event in events.jsonl.
        patience: longest wait in seconds; None for no limit; "auto" for no limit with an autoscaler, else NOT_SCALED_S.
        check: called repeatedly during a wait; the wait ends with its exception if it raises one.
    """

    def __init__(
        self,
        fleet: Fleet,
        requests: Requests,
        report: Callable[[str], None],
        event: Callable[..., None],
        patience: Patience = "auto",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._fleet, self._requests = fleet, requests
        self._report, self._event, self._patience, self._check = report, event, patience, check
        places = fleet.places
        places.stopped = lambda: bool(requests.stop_reason)
        if isinstance(patience, float | int):  # for another worker in place of a lost one
            places.patience_s = min(PLACE_TIMEOUT_S, patience)

    def for_workers(self, count: int) -> bool:
        """Wait until ``count`` stage actors are running; start missing ones.

        Returns:
            False if the run was stopped.

        Raises:
            PlanError: too few actors came in time.
        """
        return bool(self.until(lambda: count, lambda there: there if there >= count else 0, count))

    def until(
        self,
        target: Callable[[], int],
        begins: Callable[[int], int],
        least: int,
        why: str = "",
        going: Callable[[], Mapping[str, float | None]] = dict,
    ) -> int:
        """Wait until there are placement groups for enough members (stage actors), and start members in them.

        Args:
            target: returns the number of members to request.
            begins: called with the number of available members; returns the number of workers with which the run
                begins, or 0 to wait for more members.
            least: smallest number of workers that the run needs, for messages.
            why: reason for ``least``, for messages; "" without one.
            going: returns the deadline of each node that is about to go, by Ray's id; members there are replaced.

        Returns:
            Number of workers with which the run begins; 0 if the run was stopped.

        Raises:
            PlanError: too few members came in time, or members failed to start MOST_FAILED times in a row.
        """
        began_s, clock_s = time.monotonic(), time.time()
        changed_s, here, failed = began_s, -1, 0
        places, looking = self._fleet.places, _Looking(self._fleet)
        seen, rests_s, reported = None, began_s, ""
        while not self._requests.stop_reason:
            self._check()
            now_s = time.monotonic()
            if (coming := self._coming(target(), going()) if now_s >= rests_s else None) is None:
                time.sleep(POLL_S)
                continue
            if coming != here:
                changed_s, here = now_s, coming
            enough = begins(coming) > 0
            if enough and (coming >= target() or now_s - changed_s >= SETTLE_S):
                failed = self._started(failed)
                if ready := begins(places.living):
                    return ready
            elif not enough and now_s - began_s > TELL_S and (short := looking.look(coming, least)) is not None:
                what = f"{least} worker{'s' * (least > 1)} of {in_words(places.needs)} each{why and f' ({why})'}"
                patience_s = self._lasts_s(short)
                line = (
                    f"waiting since {_clock(clock_s)} for {what}: {coming} can be had, {target()} are requested, and "
                    f"{short.reason}{_until(clock_s, patience_s)}"
                )
                if line != reported:
                    self._report(line)
                    if not reported:
                        self._event("wait for workers", line)
                    reported = line
                if short.yields and short is not seen and coming > places.living:
                    self._event("give way", "another run holds a part of what it needs, and has priority by its name")
                    places.ask_for(0)
                    rests_s = now_s + YIELD_S
                seen = short
                if patience_s is not None and now_s - began_s > patience_s:
                    raise PlanError(_gave_up(what, least, coming, patience_s, short))
            time.sleep(POLL_S)
        return 0

    def _lasts_s(self, short: Shortage) -> float | None:
        if self._patience == "auto":
            return None if short.scaled or short is NO_ANSWER else NOT_SCALED_S
        return self._patience

    def _coming(self, count: int, going: Mapping[str, float | None]) -> int | None:
        """Request placement groups for missing members; return the number of available members.

        A member is available if it is living or starting, or if its placement group was created. Returns None if Ray
        does not answer.

        Args:
            count: number of members to have.
            going: nodes that are about to go, by Ray's id; members on them are replaced.
        """
        places = self._fleet.places
        try:
            places.ask_for(count, going)
            return places.living + places.starting + len(created(places.waiting))
        except AWAY:
            return None

    def _started(self, failed: int) -> int:
        """Start members in created placement groups; return the number of attempts that have failed in a row.

        Args:
            failed: number of attempts that had failed in a row before this call.

        Raises:
            PlanError: members failed to start MOST_FAILED times in a row.
        """
        try:
            self._fleet.places.start_granted()
        except PlanError as error:  # it had a place, and may get one again
            if failed + 1 >= MOST_FAILED:
                raise
            self._event("warning", f"A worker could not be started: {error}")
            return failed + 1
        except AWAY:
            return failed
        return 0


class _Looking:
    """Background query for the reason why the cluster has too few workers for the run.

    A thread makes the query, so that the caller's wait can end while Ray does not answer.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._places = fleet.places
        self._shortage: Shortage | None = None
        self._shortage_at = -1  # available workers when that query began
        self._thread: threading.Thread | None = None
        self._began_s, self._seen = -LOOK_S, -1

    def look(self, coming: int, count: int) -> Shortage | None:
        """Return the newest result, and start a query if it is due.

        A query is due if the last one began LOOK_S ago, or was made for another number of available workers.

        Args:
            coming: number of available workers.
            count: number of workers that the run needs.

        Returns:
            None while there is no result for ``coming``; NO_ANSWER once the query for it has taken ANSWER_S.
        """
        now_s = time.monotonic()
        idle = self._thread is None or not self._thread.is_alive()
        if idle and (coming != self._seen or now_s - self._began_s >= LOOK_S):
            self._began_s, self._seen = now_s, coming
            arguments = coming, count
            self._thread = threading.Thread(target=self._look, args=arguments, name="raypipe holders", daemon=True)
            self._thread.start()
        if self._shortage is not None and self._shortage_at == coming:
            return self._shortage
        return NO_ANSWER if now_s - self._began_s >= ANSWER_S else None

    def _look(self, coming: int, count: int) -> None:
        self._shortage = shortage(self._places.needs, count, self._places.owner.name)
        self._shortage_at = coming


def _clock(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def _until(began_s: float, patience_s: float | None) -> str:
    return "" if patience_s is None else f"; gives up at {_clock(began_s + patience_s)} (resource_timeout_s)"


def _gave_up(what: str, least: int, coming: int, patience_s: float, short: Shortage) -> str:
    """Format the error message of a wait that timed out: what is missing, why, and a remedy.

    Args:
        what: needed workers and their resources, as text.
        least: smallest number of workers that the run needs.
        coming: number of workers that were available.
        patience_s: seconds that were waited.
        short: reason why there are too few workers.
    """
    if short.fits == 0:
        fix = "Add a node that has as much, or lower ScalingConfig(resources_per_worker=...)."
    elif short.fits is not None and short.fits < least:
        fix = f"Add a node, or lower num_stages (and num_workers with it) so that {short.fits} will do."
    else:
        fix = "Start the run again when they are free, or let it wait: PipelineConfig(resource_timeout_s=None)."
    return f"The run needs {what}, and in {patience_s:g} s {coming} could be had: {short.reason}. {fix}"
