"""Which weight version a micro-batch meets, as a formula per mode.

Micro-batches k and updates are counted from 0 since the pipeline was last filled; version v is the weights after v
updates, and update j consumes micro-batches j u ... (j + 1) u - 1. A micro-batch uses one version on a stage, for
forward and backward alike. Below, S = 3: the version on stages 0, 1, 2 for k = 0, 1, 2, ...

    flush, u = 3             0 0 0 1 1 1 2 2 2     0 0 0 1 1 1 2 2 2     0 0 0 1 1 1 2 2 2
    stashing, u = 1          0 0 0 1 2 3 4 5 6     0 0 1 2 3 4 5 6 7     0 1 2 3 4 5 6 7 8
    bounded, u = 2           0 0 0 0 1 1 2 2 3     0 0 0 1 1 2 2 3 3     0 0 1 1 2 2 3 3 4
    vertical sync, u = 1     0 0 0 1 2 3 4 5 6     0 0 0 1 2 3 4 5 6     0 0 0 1 2 3 4 5 6
    2bw, u = 3               0 0 0 0 0 0 1 1 1     0 0 0 0 0 0 1 1 1     0 0 0 0 0 0 1 1 1
    2-1-1, u = 2             0 0 0 0 1 1 2 2 3     0 0 0 1 1 2 2 3 3     0 0 1 1 2 2 3 3 4

PipeDream: Narayanan et al., SOSP 2019, section 3.2 (1F1B-RR: replicas in turn), 3.3 (stashing, vertical sync).
2BW: arXiv:2006.09503, section 3.1,
v(k) = max(floor((k - 1) / m) - 1, 0) with k from 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "Mode",
    "bounded",
    "flush",
    "interval_of",
    "round_robin",
    "shifted",
    "stashing",
    "two_buffered",
    "vertical_sync",
]

Rule = Callable[[int, int], int]


@dataclass(frozen=True)
class Mode:
    """How a pipeline goes stale.

    Attributes:
        name: for messages.
        every: u, micro-batches per update.
        version: (stage, k) -> the version that micro-batch k meets there.
    """

    name: str
    every: int
    version: Rule

    def delay(self, stage: int) -> float:
        """Updates between the version of a micro-batch and that before its own update; the mean over an update."""
        far = 1000 * self.every
        return sum(k // self.every - self.version(stage, k) for k in range(far, far + self.every)) / self.every


def flush(num_microbatches: int) -> Mode:
    """Synchronous training: everything is done before the update, nothing of the next begins before it."""
    return Mode("flush", num_microbatches, lambda stage, k: k // num_microbatches)


def stashing(num_stages: int, depth: int = 1) -> Mode:
    """PipeDream: an update per micro-batch; over each hop ``depth`` micro-batches are in flight, as published one."""
    return Mode("stashing", 1, lambda stage, k: max(0, k - depth * (num_stages - 1 - stage)))


def bounded(num_stages: int, every: int, depth: int = 1) -> Mode:
    """The same with an update every so many micro-batches, so that fewer versions are alive."""
    return Mode(
        f"bounded, u = {every}", every, lambda stage, k: max(0, (k - depth * (num_stages - 1 - stage)) // every)
    )


def vertical_sync(num_stages: int, every: int = 1) -> Mode:
    """All stages use what stage 0 had: gradients of one consistent point."""
    return Mode(f"vertical sync, u = {every}", every, lambda stage, k: max(0, (k - (num_stages - 1)) // every))


def two_buffered(num_microbatches: int) -> Mode:
    """PipeDream-2BW: a mini-batch meets the weights from before the mini-batch before it."""
    return Mode("2bw", num_microbatches, lambda stage, k: max(0, k // num_microbatches - 1))


def round_robin(replicas: Sequence[int], every: int, *, vertical: bool = False) -> Mode:
    """Stages with replicas, micro-batch k on replica k % R of each; all replicas of a stage make an update together.

    Each of them has a queue as in stashing: its own forwards run w = floor((sum of R of this and later stages - 1) / R)
    ahead of its own backwards, and one in every ``every / R`` of these ends an update.

    Args:
        replicas: R by stage; each divides ``every``.
        vertical: all stages use what stage 0 had.
    """

    def version(stage: int, k: int) -> int:
        count = replicas[0 if vertical else stage]
        ahead = (sum(replicas[0 if vertical else stage :]) - 1) // count
        return max(0, (k // count - ahead) // (every // count))

    return Mode(f"{'-'.join(map(str, replicas))}, u = {every}", every, version)


def interval_of(num_stages: int, num_microbatches: int, num_versions: int, depth: int = 1) -> int:
    """The least u that divides a mini-batch and with which no stage needs more than ``num_versions`` (at least 2)."""
    least = -(-depth * (num_stages - 1) // (num_versions - 1))
    return min(u for u in range(1, num_microbatches + 1) if num_microbatches % u == 0 and u >= least)


def shifted(mode: Mode, by: Mapping[tuple[int, int], int]) -> Mode:
    """The mode with some versions moved; what a test must be able to see.

    Args:
        by: (stage, k) -> versions to add there.
    """
    return Mode(f"{mode.name}, shifted", mode.every, lambda stage, k: mode.version(stage, k) + by.get((stage, k), 0))
