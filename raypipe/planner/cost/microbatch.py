"""Micro-batch sizes: t(b), the seconds of a micro-batch of b samples, and the explanation of the chosen number.

t(b) = sigma (b + b0): b0 is the size at which half of the time is overhead. The measured sizes are used if a line does
not fit. More micro-batches mean shorter bubbles and more overhead, so that the step of N micro-batches has a wide
minimum:

     T |\\                          /      (after Hu, 2024)
       | \\                     _-'
       |  \\_                _-'
       |     '-._______..-'
       +-----[-------------]---- N
     bubbles               overhead

The number is chosen by simulation, with cut and schedule (``search.cut_search``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raypipe.errors import PlanError
from raypipe.ir.plan import CurvePoint
from raypipe.planner.cost.tolerance import EVEN

STRAIGHT = 0.05
"""Maximum relative error of the line; beyond it the measured points themselves are used."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of a micro-batch, forward and backward, by its size.

    Attributes:
        sigma_s: seconds per sample in the limit of large micro-batches.
        overhead_samples: b0, the number of samples at which half of the time is overhead.
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
        """Return t(b): on the line, or between the measured points if the line does not fit them."""
        line = self.sigma_s * (samples + self.overhead_samples)
        if self.is_straight:
            return line
        sizes, times = zip(*self.points, strict=True)
        if samples > sizes[-1]:
            return float(times[-1] + self.sigma_s * (samples - sizes[-1]))
        return float(np.interp(samples, sizes, times))


def fit_stage_time(measured: Mapping[int, float]) -> StageTime:
    """Fit a line through the measured seconds, by least squares of relative errors, with non-negative coefficients.

    Args:
        measured: samples per micro-batch -> seconds. Small sizes are needed to see the constant overhead.

    Raises:
        PlanError: fewer than two sizes, or seconds that are not finite and positive.
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
        # Every size takes equally long: the cost of a sample is not measurable. A thousandth keeps b0 finite.
        slope = float(times.mean() / sizes.max()) / 1000
        constant = float(times.mean())
    error = float(np.abs((slope * sizes + constant) / times - 1).max())
    return StageTime(float(slope), float(constant / slope), error, points)


EPSILON = 0.05
"""Relative excess over the shortest step that a step may have within the reported range of numbers."""


@dataclass(frozen=True, slots=True)
class MicrobatchChoice:
    """Chosen number of micro-batches, with its reason and the steps of other numbers.

    Attributes:
        optimum: number with the shortest step, whether it is allowed or not.
        low, high: ends of the range of numbers whose steps are within EPSILON of the shortest.
        decided_by: limit that excludes a faster number: "memory", or "model" (fewest samples that the model accepts);
            "simulation" if no limit does.
        curve: simulated steps with several numbers, with the chosen cut and schedule.
    """

    optimum: float
    low: float
    high: float
    decided_by: str
    reason: str
    curve: tuple[CurvePoint, ...]


def explain_number(curve: Sequence[CurvePoint], chosen: int, minibatch_size: int, time: StageTime) -> MicrobatchChoice:
    """Explain the chosen number of micro-batches by the steps of other numbers.

    Args:
        curve: simulated steps, ascending by number of micro-batches; the chosen number is among them.
        chosen: chosen number.
        time: seconds of a micro-batch through the whole model.
    """
    best = min(curve, key=lambda point: point.predicted_s)
    within = [p.num_microbatches for p in curve if p.predicted_s <= best.predicted_s * (1 + EPSILON)]
    point = next(point for point in curve if point.num_microbatches == chosen)
    faster = min((p for p in curve if p.refused), key=lambda p: p.predicted_s, default=point)
    what = f"{chosen} micro-batch{'es' * (chosen > 1)} of {point.microbatch_size}"
    decided_by, why = "simulation", "the fastest number"
    if faster.predicted_s * (1 + EVEN) < point.predicted_s:
        decided_by, number = faster.refused, faster.num_microbatches
        why = f"for {number} would be faster but do not fit into memory"
        if decided_by == "model":
            why = f"for {number} would be faster but leave fewer samples in some than the model takes"
    elif minibatch_size % chosen == 0:
        why = f"the fastest number that divides {minibatch_size} samples evenly"
    if within[0] < within[-1]:
        why += f"; from {within[0]} to {within[-1]} a step is at most {EPSILON:.0%} longer than at best"
    if time.is_straight:
        size = f"{time.sigma_s * 1e3:.4g} ms x (b + {time.overhead_samples:.3g})"
        why += f"; a micro-batch of b samples takes about {size} in the whole model"
    else:
        why += "; what a micro-batch takes is read off the measured sizes, for it does not grow evenly with its samples"
    return MicrobatchChoice(best.num_microbatches, within[0], within[-1], decided_by, f"{what}, {why}", tuple(curve))


def divisors(number: int) -> list[int]:
    """List all divisors, in order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def all_sizes(minibatch_size: int) -> list[tuple[int, int]]:
    """List (number of micro-batches, samples in each) for every possible number; the last may have fewer samples."""
    return sorted({math.ceil(minibatch_size / b): b for b in range(minibatch_size, 0, -1)}.items())
