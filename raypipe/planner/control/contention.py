"""Three named levels of a link shared with strangers, the same for everybody who asks.

A message may find the link taken: with probability ``share`` it has to wait, for an exponentially distributed time of
mean ``delay`` times the seconds of one micro-batch's computation, and everything behind it waits too. Whether and how
long follows from (seed, hop, direction, step, micro-batch) by a hash, so both a simulation and every process of a run
know it without asking each other, and a run can be repeated.

    level      share   delay     what it is like
    light      0.10    0.6       a neighbour who sends now and then
    moderate   0.25    0.9       a neighbour who trains too
    heavy      0.40    1.5       several of them

On 4 and on 8 equal stages 2F2B and larger groups gain about what the paper's abstract reports for preempted networks,
4 to 30 % (Ada-Grouper, arXiv:2303.01675; its settings are not published, so these levels are ours).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["LEVELS", "Contention", "delay_s"]


@dataclass(frozen=True, slots=True)
class Contention:
    """One level.

    Attributes:
        name: of the level.
        share: of messages that find the link taken.
        delay: mean of what they wait, in computation times of one micro-batch (forward and backward).
    """

    name: str
    share: float
    delay: float


LEVELS = {
    level.name: level
    for level in (Contention("light", 0.10, 0.6), Contention("moderate", 0.25, 0.9), Contention("heavy", 0.40, 1.5))
}
"""By name."""


def delay_s(
    level: Contention, unit_s: float, *, seed: int, hop: int, forward: bool, step: int, microbatch: int
) -> float:
    """Seconds for which the link is taken before this message can have it.

    Args:
        unit_s: forward and backward of one micro-batch on one stage.
    """
    state = seed
    for word in (hop, int(forward), step, microbatch):
        state = _mix(state ^ (word + 1))
    if _unit(state) >= level.share:
        return 0.0
    return -math.log(1.0 - _unit(_mix(state))) * level.delay * unit_s


def _mix(state: int) -> int:
    """splitmix64 (Steele, Lea and Flood, 2014)."""
    mask = (1 << 64) - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def _unit(state: int) -> float:
    """From 0 up to, but not including, 1."""
    return (state >> 11) / (1 << 53)
