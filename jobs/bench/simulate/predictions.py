"""Settings and predictions that the benchmark of the simulator and its runs share."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from jobs.lib.common import median

__all__ = ["JITTER", "WARM_UP_STEPS", "Prediction", "Settings", "jittered", "stage_times_s"]

WARM_UP_STEPS = 2
JITTER = 0.2
"""An emulated action takes its stage's time, give or take at most this share of it."""


@dataclass(frozen=True)
class Settings:
    """Extent of a measurement; a shape is (stages, micro-batches)."""

    shapes: tuple[tuple[int, int], ...] = ((64, 4096), (1024, 4096))
    rounds: int = 3
    emulated: tuple[tuple[int, int, str], ...] = (
        (2, 8, "1f1b"), (3, 8, "slack"), (4, 16, "1f1b"), (4, 16, "gpipe"), (4, 8, "slack"), (3, 12, "1f1b"),
    )  # fmt: skip
    num_steps: int = WARM_UP_STEPS + 8


class Prediction(NamedTuple):
    """One run: what was predicted before it, and its steps after the warm-up."""

    name: str
    predicted_s: float
    steps_s: list[float]

    @property
    def measured_s(self) -> float:
        return median(self.steps_s)

    @property
    def error(self) -> float:
        return abs(self.predicted_s - self.measured_s) / self.measured_s


def stage_times_s(num_stages: int, seed: int) -> list[tuple[float, float]]:
    """Draw forward and backward times of uneven stages: 4 to 16 ms, and 1.5 to 2.5 times as long."""
    draw = random.Random(seed)
    forward = [draw.uniform(0.004, 0.016) for _ in range(num_stages)]
    return [(f, f * draw.uniform(1.5, 2.5)) for f in forward]


def jittered(seconds: float, share: float) -> float:
    """Move ``seconds`` by up to JITTER of it; share is a number from 0 to 1."""
    return seconds * (1 - JITTER + 2 * JITTER * share)
