"""Three named levels of a network shared with strangers, the same for everybody who asks.

The strangers come and go: in ``busy`` of all episodes of four steps they use the network, spread evenly. Then a message
finds its link taken with probability ``share``, and has to wait for half to one and a half times ``delay`` computation
times of a micro-batch; everything behind it waits too.

    level      busy    share   delay     what it is like
    light      0.25    0.5     0.3       a neighbour who sends now and then
    moderate   0.40    0.5     0.5       a neighbour who trains too
    heavy      0.40    1.0     0.7       several of them

Whether and how long follows from (seed, hop, direction, step, micro-batch) by a hash, so both a simulation and every
process of a run know it without asking each other, and a run can be repeated. On 4 and on 8 equal stages kFkB gains
about what the paper's abstract reports for preempted networks, 4 to 30 % (Ada-Grouper, arXiv:2303.01675; its settings
are not published, so these levels are ours).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EPISODE_STEPS", "LEVELS", "Contention", "delay_s"]

EPISODE_STEPS = 4
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class Contention:
    """One level.

    Attributes:
        name: of the level.
        busy: share of episodes in which anybody else uses the network.
        share: of messages that then find their link taken.
        delay: mean of what they wait, in computation times of one micro-batch (forward and backward).
    """

    name: str
    busy: float
    share: float
    delay: float


LEVELS = {
    level.name: level
    for level in (
        Contention("light", 0.25, 0.5, 0.3),
        Contention("moderate", 0.40, 0.5, 0.5),
        Contention("heavy", 0.40, 1.0, 0.7),
    )
}
"""By name."""


def delay_s(
    level: Contention, unit_s: float, *, seed: int, hop: int, forward: bool, step: int, microbatch: int
) -> float:
    """Seconds for which the link is taken before this message can have it.

    Args:
        unit_s: forward and backward of one micro-batch on one stage.
    """
    # Multiples of the golden ratio fall evenly into every part of the circle, however short the run.
    if (_unit(_mix(seed)) + step // EPISODE_STEPS * GOLDEN) % 1.0 >= level.busy:
        return 0.0
    state = seed
    for word in (hop, int(forward), step, microbatch):
        state = _mix(state ^ (word + 1))
    if _unit(state) >= level.share:
        return 0.0
    return (0.5 + _unit(_mix(state))) * level.delay * unit_s


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
