"""Axes: ticks at round numbers, in a unit that makes them short."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["in_unit", "ticks"]

_UNITS = {
    "s": ((1e-6, "us"), (1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h")),
    "B": ((1.0, "B"), (1 << 10, "KiB"), (1 << 20, "MiB"), (1 << 30, "GiB"), (1 << 40, "TiB")),
    "B/s": ((1.0, "B/s"), (1e3, "kB/s"), (1e6, "MB/s"), (1e9, "GB/s")),
}


def in_unit(most: float, unit: str) -> tuple[float, str]:
    """What to divide values by, and what they are in then; other units than seconds and bytes stay as they are.

    Args:
        most: the largest of the values.
        unit: "s", "B", "B/s" or any other.
    """
    fits = [step for step in _UNITS.get(unit, ()) if most >= step[0]]
    return fits[-1] if fits else _UNITS.get(unit, ((1.0, unit),))[0]


def ticks(low: float, high: float, most: int = 6, whole: bool = False) -> Sequence[float]:
    """Round numbers from ``low`` to ``high``, at most about ``most``: steps of 1, 2 or 5 times a power of ten.

    Args:
        whole: only integers.
    """
    rough = max((high - low) / most, 1e-12 * max(abs(low), abs(high), 1e-300))
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    if whole:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return [number * step for number in range(first, last + 1)]
