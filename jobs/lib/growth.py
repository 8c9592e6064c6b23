"""Whether processes grow: resident memory, descriptors and threads at several moments of a run, and what they come to.

MiB       .  .:  . .:  .  .     most: the highest look above the first
       first                    slope: the median over all pairs of looks, which a single high one does not move
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
"""Looks at a process at each moment, a tenth of a second apart; the least counts. A step has memory and threads too."""


class Look(NamedTuple):
    """One process at one moment."""

    resident_bytes: int
    descriptors: int
    threads: int

    @classmethod
    def at(cls, process: int) -> Look:
        """The least of some samples."""
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
    """Of one process over all looks.

    Attributes:
        slope_bytes: of resident memory per unit of what was counted, such as a step.
        most_bytes: the highest look above the first.
        descriptors, threads: by how many the least of the last third of the looks has more than the most of the first.
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
    """What looks come to.

    Args:
        looks: (what was counted, such as steps; the look), in order, at different counts; two at least.
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
