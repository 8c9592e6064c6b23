"""What a micro-batch takes by its size: t(b) = sigma (b + b0), or the measured sizes where no line fits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from raypipe.errors import PlanError

__all__ = ["StageTime", "fit_stage_time"]

STRAIGHT = 0.05
"""Largest relative error of the line; beyond it the measured points themselves are used."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of the slowest stage, forward and backward, by micro-batch size.

    Attributes:
        sigma_s: seconds per sample in the limit of large micro-batches.
        overhead_samples: b0.
        worst_error: largest relative distance of the line from a measured point.
        points: (samples, seconds) as measured, by size.
    """

    sigma_s: float
    overhead_samples: float
    worst_error: float
    points: tuple[tuple[int, float], ...]

    @property
    def is_straight(self) -> bool:
        return self.worst_error <= STRAIGHT

    def seconds(self, samples: float) -> float:
        """t(b): the line, or between the points and along the line outside of them where it does not fit."""
        line = self.sigma_s * (samples + self.overhead_samples)
        if self.is_straight:
            return line
        sizes, times = zip(*self.points, strict=True)
        if samples > sizes[-1]:
            return float(times[-1] + self.sigma_s * (samples - sizes[-1]))
        return float(np.interp(samples, sizes, times))


def fit_stage_time(measured: Mapping[int, float]) -> StageTime:
    """The line through the measured seconds that is best in relative error, with neither part below zero.

    Args:
        measured: samples per micro-batch -> seconds; b0 shows only at small sizes.

    Raises:
        PlanError: fewer than two sizes, or seconds that are no positive numbers.
    """
    points = tuple(sorted(measured.items()))
    if len(points) < 2 or not all(b >= 1 and 0 < t < math.inf for b, t in points):
        raise PlanError(f"Seconds by micro-batch size {dict(points)}: measure two sizes or more, each above 0 s.")
    sizes, times = np.array(points, dtype=np.float64).T
    rows = np.stack([sizes / times, 1 / times], axis=1)
    slope, constant = np.linalg.lstsq(rows, np.ones(len(points)), rcond=None)[0]
    if constant < 0:  # through the origin
        slope, constant = float(rows[:, 0].sum() / (rows[:, 0] ** 2).sum()), 0.0
    if slope <= 0:
        # Every size takes as long: no sample costs anything that can be seen. A thousandth keeps b0 finite.
        slope = float(times.mean() / sizes.max()) / 1000
        constant = float(times.mean())
    error = float(np.abs((slope * sizes + constant) / times - 1).max())
    return StageTime(float(slope), float(constant / slope), error, points)
