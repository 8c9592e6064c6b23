"""Keys for random numbers: a 64-bit hash of a few integers, equal on every machine."""

from __future__ import annotations

_MASK64 = (1 << 64) - 1


def mixed(*parts: int) -> int:
    """Hash integers to 64 bits with the finaliser of splitmix64, so that every bit of every part changes the result.

    Args:
        parts: integers, of which the lowest 64 bits count; their order matters.
    """
    state = 0
    for part in parts:
        state = ((state ^ (part & _MASK64)) + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state
