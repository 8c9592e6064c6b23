"""Worker's side of the heartbeat: reports what its process does, and ends the process if heartbeat requests stop.

    driver   --heartbeat(lease_s)-->  actor method in a concurrency group of its own: computing does not delay it
             <----- Heartbeat ------
    LeaseClock: counts down from lease_s in a thread; at zero the worker ends itself

Timing an action (such as the forward of one micro-batch) does not slow it down: its duration is estimated from the
heartbeats during it.

The driver publishes all other metrics of a run. The gauge of this module is set by workers, so that it also shows a
lost driver. It is set once LONG of the lease (driver_grace_s) has passed without a renewal, and to 0 at the next one:

share of the lease that has passed   0.02   ...   0.25   ...   0.9   | renewal |   0.02   ...   1
gauge                               not set       0.25         0.9                 0            the process ends
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import ray
from ray.util.metrics import Gauge
from ray.util.placement_group import remove_placement_group

from raypipe.engine.device.device import CPU, Device
from raypipe.engine.executor import Executor
from raypipe.ir.schedule import COMPUTE, Action, Op
from raypipe.metrics import metric
from raypipe.runtime.worker.places import owner_of, release_ended

LONG = 0.25
"""Share of the lease after which the gauge is set; a healthy driver renews the lease much sooner."""
TICK_S = 0.5
END_S = 5.0
"""Seconds in which a worker whose lease has expired closes its links and removes its placement group."""


class Heartbeat(NamedTuple):
    """Heartbeat of a worker.

    Attributes:
        process: process id.
        action: current action, as text ("2F0"); empty between segments.
        action_s: seconds since a heartbeat first saw this action.
        computes: True if the action waits neither for a message of another worker nor for data.
        longest_s: seconds of the longest earlier computation, as seen by heartbeats.
        segments: number of segments that the current call of ``StageActor.work`` has completed.
        cpu_s: processor seconds of all threads since the process began.
        resident_bytes: resident bytes of the process; for a worker on a GPU, peak bytes of its tensors; 0 if unknown.
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
    """Estimator of the current action's duration, from repeated calls of ``look``.

    Actions are compared with ``is``, because an executor makes a new object for every action that it begins.
    """

    def __init__(self) -> None:
        self._action: Action | None = None
        self._since_s = 0.0
        self._computed = False
        self.longest_s = 0.0
        """Duration of the longest finished computation seen so far."""

    def look(self, action: Action | None, now_s: float, *, computes: bool) -> float:
        """Return the seconds since ``action`` was first seen, and update ``longest_s`` if the action has changed.

        Args:
            action: current action; None between segments.
            now_s: ``time.monotonic()`` now.
            computes: True if the action waits for nothing, so that it counts for ``longest_s``.
        """
        if action is not self._action:
            if self._computed:
                self.longest_s = max(self.longest_s, now_s - self._since_s)
            self._action, self._since_s = action, now_s
        self._computed = computes
        return 0.0 if action is None else now_s - self._since_s


class LeaseClock:
    """Lease of a worker: a countdown that calls ``end`` unless it is renewed in time.

    Only seconds in which this process was awake count: while it is stopped or starved, it cannot process a renewal.

    Args:
        lease_s: duration of the lease in seconds; a renewal may set another one.
        end: called once, from a thread, when the lease has expired.
        passed: called from the same thread at every earlier tick, with the share (0 to 1) of the lease that has passed.
        tick_s: seconds between two ticks of the thread.
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
        """Stop counting."""
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
    """Action clock, lease and gauge of a worker; ends the process when the lease has expired.

    Args:
        lease_s: duration of the lease until the first heartbeat request renews it.
        close: closes the worker's links.

    Attributes:
        run: value of the gauge's tag "run"; "" sets no gauge.
    """

    def __init__(self, lease_s: float, close: Callable[[], None]) -> None:
        self._close = close
        self._place = ray.util.get_current_placement_group()
        self._actions = ActionClock()
        self._gauge: Gauge | None = None
        self._silent, self.run = False, ""
        self._lease = LeaseClock(lease_s, self._end, self._on_tick)

    def heartbeat(self, lease_s: float, executor: Executor | None, segments: int) -> Heartbeat:
        """Renew the lease for ``lease_s`` seconds, and return the heartbeat; without stages ``executor`` is None."""
        self._lease.renew(lease_s)
        if executor is None:
            return heartbeat_of(self._actions, None, segments, waits=False)
        return heartbeat_of(self._actions, executor.doing, segments, waits=executor.waits, device=executor.device)

    def _on_tick(self, share: float) -> None:
        """Set the gauge to the share of the lease that has passed, if it is LONG or more; set 0 after a renewal."""
        if (share < LONG and not self._silent) or not self.run:
            return
        if self._gauge is None:
            entry = metric("driver_silence_fraction")
            self._gauge = Gauge(entry.name, f"{entry.meaning} Unit: {entry.unit}.", tag_keys=entry.tags)
        self._silent = share >= LONG
        self._gauge.set(share if self._silent else 0.0, tags={"run": self.run})

    def _end(self) -> None:
        """Close links and remove the placement group; then end this process, regardless of its other threads."""
        sys.stderr.write("raypipe: no heartbeat request of the driver came in a whole lease, so this stage ends.\n")
        giving_back = threading.Thread(target=self._give_back, daemon=True)
        giving_back.start()
        giving_back.join(END_S)
        os._exit(1)

    def _give_back(self) -> None:
        self._close()
        if owner := owner_of(ray.get_runtime_context().get_actor_name()):
            release_ended(owner)  # dead stages too, if the driver is dead
        if self._place is not None:
            remove_placement_group(self._place)


def heartbeat_of(
    clock: ActionClock, action: Action | None, segments: int, *, waits: bool, device: Device = CPU
) -> Heartbeat:
    """Create the heartbeat of this process.

    Args:
        clock: estimates the action's duration; it is updated with the action.
        action: action that runs now; None between segments.
        segments: see Heartbeat.
        waits: True if the action waits for data or for other replicas, so that it does not count as computing.
        device: device whose peak of memory is reported.
    """
    now_s = time.monotonic()
    computes = action is not None and action.op in _OWN and not waits
    return Heartbeat(
        os.getpid(),
        "" if action is None else action.label,
        clock.look(action, now_s, computes=computes),
        computes,
        clock.longest_s,
        segments,
        time.process_time(),
        device.peak_bytes(),
    )


_OWN = COMPUTE | {Op.STEP}
"""Operations that do not wait for another stage."""
