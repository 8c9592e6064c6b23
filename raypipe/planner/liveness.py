"""Who is waited for, how long, and what silence means: the one table of liveness, and nothing but arithmetic.

Two signals say how a worker does: its pulse, answered twice a second by a thread of its own, and the watcher of its
node, which reads what the kernel says of its process. Seconds are those during which the one who looks was awake
itself: a driver that was stopped for a minute has not heard of anybody for a minute, and that means nothing.
Processor time is that of the process and of those that it has started, such as a compiler.

    means        signal                                              limit                         then
    stopped      process in state T                                  STOPPED_S                     ended
    deadlocked   no pulse, next to no processor time used            DEADLOCKED_S                  ended
    deaf         no pulse, though processor time is used             DEAF_S                        ended
    unreachable  no pulse, and nothing from its node                 driver_grace_s                given up
    blocked      an action that needs nobody else takes long, and    BLOCKED_S, and BLOCKED_TIMES  ended
                 next to no processor time is used                   the longest
    slow         an action that needs nobody else takes long         SLOW_S, and SLOW_TIMES        told
                                                                     the longest

A worker that is given up ends by itself where it lives: its lease, which every pulse renews, is as long.
A process that has ended needs no row: Ray tells at once. A wait for another stage's message has the deadline of the
links (engine/state.py), because nobody can tell a slow link from a lost message sooner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ["TABLE", "Finding", "Row", "Seen", "judge"]

STOPPED_S = 1.4
"""Longer than a stop of one second, which harms nobody, and short enough to be noticed within two."""
DEADLOCKED_S = 60.0
"""A process that has to be swapped in answers nobody either, and uses little processor time."""
DEAF_S = 180.0
"""The user's code may hold Python's lock for minutes without being lost."""
BLOCKED_S, BLOCKED_TIMES = 120.0, 100.0
IDLE_S = 60.0
SLOW_S, SLOW_TIMES = 20.0, 20.0


class Seen(NamedTuple):
    """What is known of a worker that has answered at least once.

    Attributes:
        silent_s: since its last pulse.
        watched: the watcher of its node has answered lately, and sees the process.
        stopped_s: since when its process is stopped.
        idle_s: since when its process has used next to no processor time.
        action: in progress at its last pulse.
        action_s: how long that has been in progress by now; 0 where it waits for another stage or for data.
        longest_s: the longest earlier action, measured or planned.
    """

    silent_s: float
    watched: bool = False
    stopped_s: float = 0.0
    idle_s: float = 0.0
    action: str = ""
    action_s: float = 0.0
    longest_s: float = 0.0


class Finding(NamedTuple):
    """What is wrong with a worker.

    Attributes:
        means: name of the row.
        over: it is lost: to be ended, and replaced.
        why: the rest of a sentence that begins with its name.
        after_s: how long it took to notice.
        ran_out_bytes: that it held when it was ended because there was no memory left, 0 unknown; None where that is
            not why.
    """

    means: str
    over: bool
    why: str
    after_s: float
    ran_out_bytes: int | None = None


class Row(NamedTuple):
    """One row of the table.

    Attributes:
        silence_s: how long the signal has been missing.
        limit_s: how long that is put up with, given driver_grace_s.
        over: the worker is lost then.
        why: the rest of a sentence; may name silence and action.
    """

    means: str
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
        "has not been heard of for {silence:.0f} s (driver_grace_s), and neither has its node: the node or the network "
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
"""Rows in the order of their weight: the first whose limit has passed is what is told."""


def judge(seen: Seen, grace_s: float) -> Finding | None:
    """The first row whose limit has passed; None where all is well.

    Args:
        grace_s: PipelineConfig.driver_grace_s.
    """
    for row in TABLE:
        silence_s = row.silence_s(seen)
        if silence_s >= row.limit_s(seen, grace_s):
            words = row.why.format(silence=silence_s, action=seen.action, longest=seen.longest_s)
            return Finding(row.means, row.over, words, silence_s)
    return None
