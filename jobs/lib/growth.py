"""Growth of processes: resident memory, file descriptors and threads, read at several moments of a run.

MiB       .  .:  . .:  .  .     most: the highest reading minus the first one
       first                    slope: the median over all pairs of readings, which a single high one does not change
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

__all__ = ["MOST_BYTES", "Growth", "Look", "growth_of"]

MOST_BYTES = 5 << 20
SAMPLES = 5
"""Readings at each moment, 0.1 s apart, of which the least counts: a step takes memory and threads too."""


class Look(NamedTuple):
    """One process at one moment."""

    resident_bytes: int
    descriptors: int
    threads: int

    @classmethod
    def at(cls, process: int) -> Look:
        """Take several samples of a process, and return the least of each value."""
        found = [cls.now(process)]
        while len(found) < SAMPLES:
            time.sleep(0.1)
            found.append(cls.now(process))
        return cls(*map(min, zip(*found, strict=True)))

    @classmethod
    def now(cls, process: int) -> Look:
        """Read from /proc."""
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        found = dict(line.split(":", 1) for line in lines if ":" in line)
        resident = int(found["VmRSS"].split()[0]) << 10
        return cls(resident, len(list(Path(f"/proc/{process}/fd").iterdir())), int(found["Threads"]))


class Growth(NamedTuple):
    """Growth of one process over all looks.

    Attributes:
        slope_bytes: growth of resident memory per counted unit, such as a step.
        most_bytes: highest resident memory minus the first.
        descriptors, threads: least number in the last third of the looks minus the largest in the first third.
    """

    slope_bytes: float
    most_bytes: int
    descriptors: int
    threads: int

    @property
    def flat(self) -> bool:
        """Within 5 MiB of the first look, with no more descriptors and threads."""
        return self.most_bytes <= MOST_BYTES and self.descriptors <= 0 and self.threads <= 0


def growth_of(looks: Sequence[tuple[float, Look]]) -> Growth:
    """Compute growth from looks.

    Args:
        looks: (count, such as steps; look), in order, at different counts; at least two.
    """
    slopes = [
        (later.resident_bytes - earlier.resident_bytes) / (to - since)
        for (since, earlier), (to, later) in itertools.combinations(looks, 2)
    ]
    third = max(1, len(looks) // 3)
    begin, end = ([look for _, look in part] for part in (looks[:third], looks[-third:]))
    return Growth(
        median(slopes),
        max(look.resident_bytes for _, look in looks) - looks[0][1].resident_bytes,
        min(look.descriptors for look in end) - max(look.descriptors for look in begin),
        min(look.threads for look in end) - max(look.threads for look in begin),
    )
