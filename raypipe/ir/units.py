"""Numbers with units as short text: bytes, seconds, rates, prices."""

from __future__ import annotations

import math


def human_bytes(count: float) -> str:
    """Format bytes: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_rate(samples_per_s: float) -> str:
    """Format a rate: 61550.1 -> "61,550 samples/s"."""
    return f"{samples_per_s:,.0f} samples/s" if samples_per_s >= 100 else f"{samples_per_s:.3g} samples/s"


def human_s(seconds: float) -> str:
    """Format seconds: 0.0123 -> "12.3 ms"."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 1000 else f"{seconds * factor:.0f} {unit}"
    raise AssertionError("unreachable: microseconds are the last unit")


def human_price(amount: float) -> str:
    """Format a price: 0.00001234 -> "0.0000123", 1234.5 -> "1,234.50"."""
    if amount >= 1 or amount == 0:
        return f"{amount:,.2f}"
    digits = 2 - math.floor(math.log10(amount))  # three that count
    return f"{amount:.{digits}f}"


def human_hours(seconds: float) -> str:
    """Format a duration: 5400 -> "1 h 30 min"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min"
