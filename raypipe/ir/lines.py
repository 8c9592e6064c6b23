"""Bytes that are the most of a few straight lines over the number of samples: (fixed, per sample), (fixed, per sample).

bytes |            /            an operation's memory has moments: at one the gradient of a large parameter is
      |          /  per sample  made, whatever the batch; at another all that there is grows with the samples
      |________/
      |  fixed
      +--------------- samples
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Lines", "lowered", "most", "pruned"]

Lines = tuple[tuple[int, int], ...]
"""((fixed bytes, bytes per sample), ...); no line is zero."""


def most(lines: Iterable[tuple[int, int]], samples: int) -> int:
    """The highest line at so many samples, 0 at least."""
    return max((fixed + samples * per_sample for fixed, per_sample in lines), default=0)


def pruned(lines: Iterable[tuple[int, int]]) -> Lines:
    """Without those that another one is never below, and those that are never above zero."""
    found: list[tuple[int, int]] = []
    for fixed, per_sample in sorted(set(lines), key=lambda line: (-line[1], -line[0])):
        if max(fixed, per_sample) > 0 and (not found or fixed > found[-1][0]):
            found.append((fixed, per_sample))
    return tuple(found)


def lowered(lines: Lines, per_sample: int) -> Lines:
    """The same less so many bytes per sample."""
    return pruned((fixed, slope - per_sample) for fixed, slope in lines)
