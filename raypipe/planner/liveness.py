"""Liveness of workers: the failure that a missing signal means, and the time after which it is assumed.

There are two signals: a worker's heartbeat ("pulse"), answered twice a second by a thread of its own, and the watcher
of its node, which reads the kernel's data on its process. Only seconds during which the observer itself was running
count: a driver that was stopped for a minute has received nothing for a minute, which means nothing. Processor time
includes child processes, such as a compiler.

    failure      signal                                              limit                         then
    stopped      process in state T                                  STOPPED_S                     ended
    deadlocked   no pulse, almost no processor time used             DEADLOCKED_S                  ended
    deaf         no pulse, though processor time is used             DEAF_S                        ended
    unreachable  no pulse, and nothing from its node                 driver_grace_s                given up
    blocked      an action that waits for no other worker takes      BLOCKED_S, and BLOCKED_TIMES  ended
                 long, and almost no processor time is used          the longest
    slow         an action that waits for no other worker takes long SLOW_S, and SLOW_TIMES        logged
                                                                     the longest

A worker that is given up ends itself: its lease, which every pulse renews, is as long. A process that has ended needs
no row: Ray reports it at once. A wait for a message has the deadline of the links (engine/optim/state.py),
because a slow link cannot be distinguished from a lost message sooner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

STOPPED_S = 1.4
"""Limit above a stop of one second, which is harmless, and low enough to notice a stop within two seconds."""
DEADLOCKED_S = 60.0
"""Limit for processes that are being swapped in: they do not answer either, and use little processor time."""
DEAF_S = 180.0
"""Limit for user code that holds Python's lock for minutes without being hung."""
BLOCKED_S, BLOCKED_TIMES = 120.0, 100.0
IDLE_S = 60.0
SLOW_S, SLOW_TIMES = 20.0, 20.0


class Seen(NamedTuple):
    """Observations of a worker that has answered at least once.

    Attributes:
        silent_s: seconds since its last pulse.
        watched: True if the watcher of its node has answered lately, and sees the worker's process.
        stopped_s: seconds for which the process has been stopped.
        idle_s: seconds for which the process has used almost no processor time.
        action: action in progress at the last pulse.
        action_s: seconds for which this action has been in progress; 0 if the action waits for another stage or for
            data.
        longest_s: largest of the measured seconds of earlier actions and the predicted seconds of the plan's longest
            action.
    """

    silent_s: float
    watched: bool = False
    stopped_s: float = 0.0
    idle_s: float = 0.0
    action: str = ""
    action_s: float = 0.0
    longest_s: float = 0.0


class Diagnosis(NamedTuple):
    """Failure of a worker, or a warning that a worker is slow.

    Attributes:
        failure: name of the failure: "died", or a name in the first column of the table.
        over: True if the worker is lost, so that it has to be ended and replaced; False for a warning.
        why: text that follows the worker's name in messages.
        after_s: seconds from the failure, or the begin of the slow action, until it was noticed; 0 if unknown.
        ran_out_bytes: bytes that the worker held when it was killed for lack of memory, 0 if unknown; None if it failed
            for another reason.
    """

    failure: str
    over: bool
    why: str
    after_s: float
    ran_out_bytes: int | None = None


class Row(NamedTuple):
    """Row of the table: one kind of failure.

    Attributes:
        failure: name of the failure.
        silence_s: returns the seconds for which the signal has been missing.
        limit_s: returns the longest accepted silence, given the observations and driver_grace_s.
        over: True if the worker is lost once ``silence_s`` has reached ``limit_s``.
        why: rest of a sentence that begins with the worker's name; a format string of silence, action and longest.
    """

    failure: str
    silence_s: Callable[[Seen], float]
    limit_s: Callable[[Seen, float], float]
    over: bool
    why: str


TABLE = (
    Row(
        "stopped", lambda seen: seen.stopped_s, lambda seen, grace_s: STOPPED_S, True,
        "has been stopped for {silence:.1f} s, by SIGSTOP or a debugger; its process was ended",
    ),
    Row(
        "deadlocked", lambda seen: min(seen.silent_s, seen.idle_s) if seen.watched else 0.0,
        lambda seen, grace_s: DEADLOCKED_S, True,
        "has not answered for {silence:.0f} s and computes nothing: some code waits for ever and holds Python's lock; "
        "its process was ended",
    ),
    Row(
        "deaf", lambda seen: seen.silent_s if seen.watched else 0.0, lambda seen, grace_s: DEAF_S, True,
        "has not answered for {silence:.0f} s: some code holds Python's lock all the time; its process was ended",
    ),
    Row(
        "unreachable", lambda seen: 0.0 if seen.watched else seen.silent_s, lambda seen, grace_s: grace_s, True,
        "has not answered for {silence:.0f} s (driver_grace_s), and neither has its node: the node or the network "
        "to it is gone",
    ),
    Row(
        "blocked", lambda seen: seen.action_s if seen.idle_s >= IDLE_S else 0.0,
        lambda seen, grace_s: max(BLOCKED_S, BLOCKED_TIMES * seen.longest_s), True,
        "has been in {action} for {silence:.0f} s and computes nothing: some code of the model or the optimizer waits "
        "for ever; its process was ended",
    ),
    Row(
        "slow", lambda seen: seen.action_s, lambda seen, grace_s: max(SLOW_S, SLOW_TIMES * seen.longest_s), False,
        "has been in {action} for {silence:.0f} s, where the longest one before took {longest:.1f} s",
    ),
)  # fmt: skip
"""Rows by severity: the first one whose limit has passed is reported."""


def judge(seen: Seen, grace_s: float) -> Diagnosis | None:
    """Return the diagnosis of the first row of TABLE whose limit has passed; None if the worker is healthy.

    Args:
        grace_s: PipelineConfig.driver_grace_s.
    """
    for row in TABLE:
        silence_s = row.silence_s(seen)
        if silence_s >= row.limit_s(seen, grace_s):
            words = row.why.format(silence=silence_s, action=seen.action, longest=seen.longest_s)
            return Diagnosis(row.failure, row.over, words, silence_s)
    return None
