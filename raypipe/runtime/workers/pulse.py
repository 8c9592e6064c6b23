"""The worker's side of the heartbeat: what its process does, and the lease that every question of the driver renews.

    driver   --pulse(lease_s)-->  a concurrency group of its own: neither computing nor other calls hold it up
             <----- Pulse ------
    LeaseClock: counts down in a thread; at zero the worker ends itself, and on the way there Silence tells Prometheus

Nothing here slows an action down: how long one has been going on is seen by looking twice.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import ray
from ray.util.placement_group import remove_placement_group

from raypipe.engine.executor import Executor
from raypipe.ir.action import COMPUTE, Action, Op
from raypipe.runtime.workers.silence import Silence

__all__ = ["TICK_S", "ActionClock", "LeaseClock", "Pulse", "Vitals", "pulse_of"]

TICK_S = 0.5
END_S = 5.0
"""How long a worker whose lease has run out takes for closing its links and giving its place back."""

_STATM = Path("/proc/self/statm")


class Pulse(NamedTuple):
    """A worker's answer to "are you alive?".

    Attributes:
        process: its id.
        action: in progress, as text ("2F0"); empty between segments.
        action_s: how long it has been seen in progress.
        computes: it needs nobody else for it: neither a message of another stage nor a read of data.
        longest_s: the longest that an earlier action of computation was seen in progress, by looks twice a second.
        segments: done since the run began.
        cpu_s: processor time of all threads since the process began.
        resident_bytes: of the process, or on a device the most that its tensors took there; 0 where the system does not
            tell.
    """

    process: int
    action: str
    action_s: float
    computes: bool
    longest_s: float
    segments: int
    cpu_s: float
    resident_bytes: int


class ActionClock:
    """For how long an action has been going on, by looking at it now and then.

    An executor makes an object for every action that it begins, so that the same object is the same action.
    """

    def __init__(self) -> None:
        self._action: Action | None = None
        self._since_s = 0.0
        self._computed = False
        self.longest_s = 0.0
        """Of the actions seen so far that are over and were computations."""

    def look(self, action: Action | None, now_s: float, *, computes: bool) -> float:
        """Seconds since ``action`` was seen first."""
        if action is not self._action:
            if self._computed:
                self.longest_s = max(self.longest_s, now_s - self._since_s)
            self._action, self._since_s = action, now_s
        self._computed = computes
        return 0.0 if action is None else now_s - self._since_s


class LeaseClock:
    """Ends the process where nobody renews its lease.

    Only seconds in which this process was awake count: while it was stopped or starved, a renewal may have come that it
    could not see yet.

    Args:
        lease_s: from now on, until the first renewal says otherwise.
        end: called once, from a thread, when the lease has run out.
        passed: called at every tick before, from the same thread, with the share of the lease that has passed.
        tick_s: how often the thread counts.
    """

    def __init__(
        self,
        lease_s: float,
        end: Callable[[], None],
        passed: Callable[[float], None] = lambda share: None,
        tick_s: float = TICK_S,
    ) -> None:
        self._lease_s = self._left_s = lease_s
        self._end, self._passed, self._tick_s = end, passed, tick_s
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._count, name="raypipe lease of a worker", daemon=True)
        self._thread.start()

    def renew(self, lease_s: float) -> None:
        with self._lock:
            self._lease_s = self._left_s = lease_s

    def close(self) -> None:
        """Count no more."""
        self._closed.set()

    def _count(self) -> None:
        while not self._closed.wait(self._tick_s):
            with self._lock:
                self._left_s -= self._tick_s
                left = self._left_s / self._lease_s if math.isfinite(self._lease_s) else 1.0
            if left <= 0:
                self._end()
                return
            self._passed(1 - left)


class Vitals:
    """Both clocks of a worker, and its end when the lease has run out.

    Args:
        lease_s: how long it waits for the first pulse.
        close: closes its links.
    """

    def __init__(self, lease_s: float, close: Callable[[], None]) -> None:
        self._close = close
        self._place = ray.util.get_current_placement_group()
        self._actions = ActionClock()
        self._silence = Silence()
        self._lease = LeaseClock(lease_s, self._end, self._silence.passed)

    def belongs(self, run: str) -> None:
        """To this run."""
        self._silence.run = run

    def pulse(self, lease_s: float, executor: Executor | None, segments: int) -> Pulse:
        """Stay for ``lease_s`` more seconds; what this process does."""
        self._lease.renew(lease_s)
        if executor is None:
            return pulse_of(self._actions, None, segments, reads=False)
        found, device = pulse_of(self._actions, executor.doing, segments, reads=executor.reads), executor.device
        return found if device.immediate else found._replace(resident_bytes=device.peak_bytes())

    def _end(self) -> None:
        """Give everything back and end this process, whatever its other threads do."""
        sys.stderr.write("raypipe: the driver has not been heard of for a whole lease, so this stage ends.\n")
        giving_back = threading.Thread(target=self._give_back, daemon=True)
        giving_back.start()
        giving_back.join(END_S)
        os._exit(1)

    def _give_back(self) -> None:
        self._close()
        if self._place is not None:
            remove_placement_group(self._place)


def pulse_of(clock: ActionClock, action: Action | None, segments: int, *, reads: bool) -> Pulse:
    """Of this process.

    Args:
        action: in progress.
        reads: whether it waits for its data.
    """
    now_s = time.monotonic()
    computes = action is not None and action.op in _OWN and not reads
    return Pulse(
        os.getpid(),
        "" if action is None else action.label,
        clock.look(action, now_s, computes=computes),
        computes,
        clock.longest_s,
        segments,
        time.process_time(),
        _resident_bytes(),
    )


_OWN = COMPUTE | {Op.STEP}
"""What a stage does by itself."""


def _resident_bytes() -> int:
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
