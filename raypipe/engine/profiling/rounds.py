"""From rounds of a profile to seconds by operation that add up to the whole model's.

    round   whole (F, B) | op 0 op 1 op 2 ... forward | ... backward | sums of gradients

Medians over rounds are taken of every number by itself; the operations' are then scaled to the whole's. That is best
taken again with nothing in between: the operations one by one leave other caches behind than training does, so that
the whole of a round took up to 8 % longer.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Moment", "Round", "Seconds", "seconds_between", "seconds_of"]

_THREAD = getattr(resource, "RUSAGE_THREAD", None)


class Moment(NamedTuple):
    """Wall clock, processor time of this thread, and how often it has waited, at one moment."""

    wall_s: float
    cpu_s: float
    waits: int

    @classmethod
    def now(cls) -> Moment:
        waits = -1 if _THREAD is None else resource.getrusage(_THREAD).ru_nvcsw
        return cls(time.perf_counter(), time.thread_time(), waits)


def seconds_between(begin: Moment, end: Moment) -> float:
    """What the work between two moments takes on a processor of its own.

    A thread that never waited of its own accord and yet fell behind the clock was sent away for another process;
    its processor time is then what counts. One that waited, for a sleep or a device, took what the clock says.
    """
    wall_s, cpu_s = end.wall_s - begin.wall_s, end.cpu_s - begin.cpu_s
    return wall_s if begin.waits < 0 or end.waits > begin.waits else min(wall_s, cpu_s)


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds: (forward, backward) of the whole, and by operation forward, backward, sums of gradients."""

    whole: tuple[float, float]
    forward: list[float]
    backward: list[float]
    sums: list[float]


@dataclass(frozen=True, slots=True)
class Seconds:
    """By operation forward, backward and sums of gradients, which add up to ``whole``, (forward, backward).

    Attributes:
        raw_ratio: (forward, backward) sums before scaling over the whole, in the median round.
    """

    whole: tuple[float, float]
    forward: list[float]
    backward: list[float]
    sums: list[float]
    raw_ratio: tuple[float, float]

    def by_operation(self) -> list[float]:
        """Seconds of all three together."""
        return [sum(parts) for parts in zip(self.forward, self.backward, self.sums, strict=True)]


def seconds_of(rounds: Sequence[Round], alone: Sequence[tuple[float, float]] = ()) -> Seconds:
    """Medians, scaled.

    Args:
        alone: (forward, backward) of the whole where nothing ran in between, to scale to; empty takes the rounds' own.
    """
    wholes = alone or [r.whole for r in rounds]
    whole = (statistics.median(f for f, _ in wholes), statistics.median(b for _, b in wholes))
    forward, backward, sums = (
        [statistics.median(seconds) for seconds in zip(*part, strict=True)]
        for part in ([r.forward for r in rounds], [r.backward for r in rounds], [r.sums for r in rounds])
    )
    # Of each round by itself, for what else the machine does changes from one to the next.
    raw = (
        statistics.median(sum(r.forward) / r.whole[0] for r in rounds),
        statistics.median((sum(r.backward) + sum(r.sums)) / r.whole[1] for r in rounds),
    )
    done = (sum(forward), sum(backward) + sum(sums))
    scale = (whole[0] / done[0], whole[1] / done[1] if done[1] else 0.0)
    return Seconds(
        whole,
        [seconds * scale[0] for seconds in forward],
        [seconds * scale[1] for seconds in backward],
        [seconds * scale[1] for seconds in sums],
        raw,
    )
