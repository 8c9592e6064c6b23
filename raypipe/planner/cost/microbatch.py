"""Choice of the number of micro-batches, by a model of the step time (after Hu, 2024).

The slowest stage takes t(b) = sigma (b + b0) for a micro-batch of b samples: b0 is the size at which half of the time
is overhead (``StageTime``; the measured sizes are used if a line does not fit). N micro-batches of a mini-batch of B
samples through S stages take

    T(N) = (N + S - 1) sigma (B/N + b0) + 2 (S - 1) c(B/N)  =  A + p N + q / N        c: one hop, one way

     T |\\                          /      N* = sqrt(q / p); without transfers sqrt(B (S - 1) / b0)
       | \\                     _-'        x = N / N*:  T = A + sqrt(p q) (x + 1/x)
       |  \\_                _-'           T <= (1 + epsilon) T*  for  1/x+ <= x <= x+
       |     '-._______..-'                x+ = 1 + d/2 + sqrt(d + d^2/4),  d = epsilon T* / sqrt(p q)
       +-----[----N*--------]---- N
     bubbles               overhead

N* grows only with the square root of B, and the range is wide. The model leaves out: split backwards, which shorten
the bubble (so that N is rather too high than too low), transfers that the schedule does not hide (give ``exposed``),
kernels whose speed grows in steps, and batch normalisation, whose results depend on b. Only the abstract of the paper
was available; the model is ours.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from raypipe.errors import PlanError
from raypipe.ir.plan import CurvePoint
from raypipe.planner.cost.tolerance import EVEN, as_quick

STRAIGHT = 0.05
"""Maximum relative error of the line; beyond it the measured points themselves are used."""


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


GRID = 1024
"""Number of values of N from 1 to B, in equal ratios, that are tried if the closed form does not apply."""


@dataclass(frozen=True, slots=True)
class Hop:
    """The slowest transfer between two stages, one way.

    Attributes:
        latency_s: seconds per message, in addition to those of its bytes.
        seconds_per_sample: bytes per sample over the bandwidth.
        exposed: True if the schedule does not hide transfers (1F1B): each micro-batch waits for them too.
    """

    latency_s: float = 0.0
    seconds_per_sample: float = 0.0
    exposed: bool = False

    def seconds(self, samples: float) -> float:
        return self.latency_s + self.seconds_per_sample * samples


class Pipe(NamedTuple):
    """Pipeline that a mini-batch passes through.

    Attributes:
        hop: slowest transfer; None if transfers cost nothing.
        chunks: stages per worker; times are of all stages of a worker.
        rounds: duration of a step of N micro-batches in units of t(b), without transfers; None for
            N + (P - 1) / chunks, which is N + S - 1 with one stage per worker.
        in_rounds: with several stages per worker, prefer multiples of the number of workers, as interleaved does: other
            numbers are taken only if no multiple is possible.
    """

    num_stages: int
    hop: Hop | None = None
    chunks: int = 1
    rounds: Callable[[float], float] | None = None
    in_rounds: bool = True

    @property
    def num_workers(self) -> int:
        """Number of workers, P."""
        return self.num_stages // self.chunks


class Bounds(NamedTuple):
    """Constraints on the number of micro-batches.

    Attributes:
        fits: returns True if (micro-batches, samples of each) fit into memory; None for no limit.
        takes: returns True if the model accepts all micro-batches of an epoch that is divided into so many samples
            each; batch normalisation rejects a single sample. None if any number is accepted.
        multiple: the number must be a multiple of it, so that every replica of a stage gets equally many.
    """

    fits: Callable[[int, int], bool] | None = None
    takes: Callable[[int], bool] | None = None
    multiple: int = 1


_UNBOUNDED = Bounds()


@dataclass(frozen=True, slots=True)
class MicrobatchChoice:
    """Chosen number of micro-batches, with its reason and the curve.

    Attributes:
        optimum: N*, not rounded, from 1 to B.
        low, high: ends of the range in which the model stays within ``epsilon`` of its optimum, from 1 to B.
        decided_by: "optimum", "divisors", "schedule", "model" or "memory", the last bound that changed the number, or
            "simulation", if that found another number to be faster.
        curve: every candidate, by N.
    """

    num_microbatches: int
    microbatch_size: int
    predicted_s: float
    optimum: float
    low: float
    high: float
    epsilon: float
    decided_by: str
    reason: str
    curve: tuple[CurvePoint, ...]

    def simulated(self, num_microbatches: int, microbatch_size: int, step_s: float) -> MicrobatchChoice:
        """Return the choice with the number that simulation found to be best; itself if it is the same.

        Args:
            step_s: simulated, for a number that is not in the curve.
        """
        if num_microbatches == self.num_microbatches:
            return self
        new = CurvePoint(num_microbatches, microbatch_size, step_s)
        points = {point.num_microbatches: point for point in (new, *self.curve)}
        what = f"{num_microbatches} micro-batch{'es' * (num_microbatches > 1)} of {microbatch_size}"
        verdict, _, known = self.reason.partition("; ")
        by_memory = self.decided_by == "memory"  # memory still decides, since it excluded other numbers
        why = verdict.partition(", ")[2] if by_memory else f"better than {self.num_microbatches} in simulation"
        return replace(
            self,
            num_microbatches=num_microbatches,
            microbatch_size=microbatch_size,
            predicted_s=points[num_microbatches].predicted_s,
            decided_by="memory" if by_memory else "simulation",
            reason=f"{what}, {why}" + (known and f"; {known}"),
            curve=tuple(points[count] for count in sorted(points)),
        )

    def __str__(self) -> str:
        """Format the reason, then the curve as a table."""
        best = min(c.predicted_s for c in self.curve)
        lines = [self.reason, f"{'N':>6}  {'samples':>7}  {'predicted':>10}  {'over best':>9}"]
        for c in self.curve:
            mark = "<- chosen" if c.num_microbatches == self.num_microbatches else c.refused
            text = f"{c.num_microbatches:>6}  {c.microbatch_size:>7}  {c.predicted_s * 1e3:>7.4g} ms"
            lines.append(f"{text}  {c.predicted_s / best - 1:>9.1%}  {mark}".rstrip())
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Model:
    """Step time T(N) of one pipeline, and its coefficients."""

    time: StageTime
    minibatch_size: int
    bubble: float  # stages that fill and drain: S - 1, over the chunks of an interleaved schedule
    hops: int  # 0 on one worker, which transfers nothing
    hop: Hop
    rounds: Callable[[float], float] | None = None  # instead of N + bubble

    @classmethod
    def of(cls, time: StageTime, minibatch_size: int, pipe: Pipe) -> _Model:
        bubble = (pipe.num_workers - 1) / pipe.chunks
        hops = 0 if pipe.num_workers == 1 else pipe.num_stages - 1
        return cls(time, minibatch_size, bubble, hops, pipe.hop or Hop(), pipe.rounds)

    def step_s(self, count: float, samples: float) -> float:
        waits = 2 * self.hops / (self.hops + 1) * count if self.hop.exposed else 0.0
        fill = 2 * self.hops + waits
        rounds = self.rounds(count) if self.rounds else count + self.bubble
        return rounds * self.time.seconds(samples) + fill * self.hop.seconds(samples)

    def coefficients(self) -> tuple[float, float, float]:
        """Return A, p and q of A + p N + q / N."""
        sigma, overhead = self.time.sigma_s, self.time.overhead_samples
        waits = 2 * self.hops / (self.hops + 1) if self.hop.exposed else 0.0
        per_sample = self.minibatch_size * self.hop.seconds_per_sample
        constant = sigma * (self.minibatch_size + self.bubble * overhead)
        constant += 2 * self.hops * self.hop.latency_s + waits * per_sample
        slope = sigma * overhead + waits * self.hop.latency_s
        return constant, slope, self.minibatch_size * self.bubble * sigma + 2 * self.hops * per_sample

    def range(self, epsilon: float) -> tuple[float, float, float]:
        """Return N* and the two ends of the range, all between 1 and B."""
        if self.time.is_straight and self.rounds is None:
            return self._closed_form(epsilon)
        return self._by_points(epsilon)

    def _by_points(self, epsilon: float) -> tuple[float, float, float]:
        """Search T(N) on a grid, for a t(b) that is not linear, or rounds other than N + S - 1."""
        counts = np.geomspace(1.0, self.minibatch_size, GRID)
        steps_s = np.array([self.step_s(n, self.minibatch_size / n) for n in counts.tolist()])
        best = int(steps_s.argmin())
        beyond = np.flatnonzero(steps_s > (1 + epsilon) * steps_s[best])
        low = max((int(i) + 1 for i in beyond if i < best), default=0)
        high = min((int(i) - 1 for i in beyond if i > best), default=len(counts) - 1)
        return float(counts[best]), float(counts[low]), float(counts[high])

    def _closed_form(self, epsilon: float) -> tuple[float, float, float]:
        """Solve for the range, if t(b) is linear.

        T(N) <= (1 + epsilon) T(N*) is p N^2 - r N + q <= 0 with r = (1 + epsilon) T(N*) - A.
        """
        constant, p, q = self.coefficients()
        most = float(self.minibatch_size)
        optimum = min(max(1.0, math.sqrt(q / p)), most) if p else (most if q else 1.0)
        right = (1 + epsilon) * (constant + p * optimum + q / optimum) - constant
        root = math.sqrt(max(0.0, right * right - 4 * p * q))
        # q / (the larger root) is the smaller one, and stays exact if p is close to 0.
        low = 2 * q / (right + root)
        high = (right + root) / (2 * p) if p else most
        return optimum, min(max(1.0, low), optimum), max(min(most, high), optimum)


def choose_microbatches(
    time: StageTime, minibatch_size: int, pipe: Pipe, bounds: Bounds = _UNBOUNDED, epsilon: float = 0.05
) -> MicrobatchChoice:
    """Choose the number of micro-batches with the least predicted step time, within the bounds.

    Candidates divide the mini-batch; if none of those within the bounds is in the range, numbers that leave a smaller
    last micro-batch are candidates too.

    Args:
        time: seconds of the slowest stage by micro-batch size.
        epsilon: relative excess over the optimum that a step may have within the reported range.

    Raises:
        PlanError: a number out of range, or memory holds no micro-batch of even one sample.
    """
    stages, chunks = pipe.num_stages, pipe.chunks
    if min(minibatch_size, stages, chunks) < 1 or stages % chunks or not 0 < epsilon < 1:
        raise PlanError(
            f"minibatch_size={minibatch_size}, {stages} stages, {chunks} per worker, epsilon={epsilon}: give "
            "numbers of at least 1, stages that divide evenly, and an epsilon between 0 and 1."
        )
    model = _Model.of(time, minibatch_size, pipe)
    optimum, low, high = model.range(epsilon)
    curve = _curve(model, pipe, bounds, (low, high))
    chosen = _best([c for c in curve if not c.refused])
    decided_by = _decided_by(model, optimum, curve, chosen)
    return MicrobatchChoice(
        chosen.num_microbatches,
        chosen.microbatch_size,
        chosen.predicted_s,
        optimum,
        low,
        high,
        epsilon,
        decided_by,
        _verdict(decided_by, chosen, curve, minibatch_size) + _known(time, (low, high), epsilon),
        tuple(curve),
    )


def _curve(model: _Model, pipe: Pipe, bounds: Bounds, near: tuple[float, float]) -> list[CurvePoint]:
    """List the candidates, at least one of which is allowed.

    If no divisor of the mini-batch is in the range ``near``, all numbers are candidates.
    """
    minibatch_size = model.minibatch_size
    in_rounds = math.lcm(bounds.multiple, pipe.num_workers) if pipe.chunks > 1 and pipe.in_rounds else bounds.multiple
    for wanted in dict.fromkeys((in_rounds, bounds.multiple)):
        refuse = functools.partial(_refusal, bounds._replace(multiple=wanted))
        curve = [_candidate(model, n, minibatch_size // n, refuse) for n in _divisors(minibatch_size)]
        if not any(near[0] <= c.num_microbatches <= near[1] for c in curve if not c.refused):
            curve = [_candidate(model, n, b, refuse) for n, b in all_sizes(minibatch_size)]
        if not all(c.refused for c in curve):
            return curve
    smallest = curve[-1]
    raise PlanError(
        f"No number of micro-batches of {minibatch_size} samples can be taken: {smallest.num_microbatches} of "
        f"{smallest.microbatch_size} fail for {smallest.refused}. Use more stages, or a schedule that holds fewer."
    )


def _known(time: StageTime, near: tuple[float, float], epsilon: float) -> str:
    """Describe what else is known of the number: its range, and the time of a micro-batch."""
    first, last = math.ceil(near[0]), math.floor(near[1])
    text = f"; from {first} to {last} a step is at most {epsilon:.0%} longer than at best" if first < last else ""
    if time.is_straight:
        size = f"{time.sigma_s * 1e3:.4g} ms x (b + {time.overhead_samples:.3g})"
        return f"{text}; a micro-batch of b samples takes about {size}"
    return (
        f"{text}; what a micro-batch takes is read off the measured sizes, for it does not grow evenly with its samples"
    )


def _verdict(decided_by: str, chosen: CurvePoint, curve: list[CurvePoint], minibatch_size: int) -> str:
    """Describe the number, and what decided on it."""
    count = chosen.num_microbatches
    what = f"{count} micro-batch{'es' * (count > 1)} of {chosen.microbatch_size}"
    faster = _best(curve).num_microbatches
    if decided_by == "memory":
        faster = _best([c for c in curve if c.refused in ("", "memory")]).num_microbatches
        return f"{what}, for {faster} would be faster but do not fit into memory"
    if decided_by == "model":
        return f"{what}, for {faster} would be faster but leave fewer samples in some than the model takes"
    if decided_by == "schedule":
        return f"{what}, for {faster} would be faster but the schedule or the replicas need a multiple"
    if decided_by == "divisors":
        return f"{what}, the fastest number that divides {minibatch_size} samples evenly"
    return f"{what}, the fastest number"


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def all_sizes(minibatch_size: int) -> list[tuple[int, int]]:
    """List (micro-batches, samples) of every possible number, the last micro-batch being the remainder."""
    return sorted({math.ceil(minibatch_size / b): b for b in range(minibatch_size, 0, -1)}.items())


def _candidate(model: _Model, count: int, samples: int, refuse: Callable[[int, int], str]) -> CurvePoint:
    return CurvePoint(count, samples, model.step_s(count, samples), refuse(count, samples))


def _refusal(bounds: Bounds, count: int, samples: int) -> str:
    """Return the bound that so many micro-batches of so many samples break; "" if they are allowed."""
    if bounds.takes is not None and not bounds.takes(samples):
        return "model"
    if count % bounds.multiple:
        return "schedule"
    return "memory" if bounds.fits is not None and not bounds.fits(count, samples) else ""


def _best(points: list[CurvePoint]) -> CurvePoint:
    """Return the fastest candidate; of equally fast ones, that with the fewest micro-batches."""
    return min(as_quick(points, lambda point: point.predicted_s), key=lambda point: point.num_microbatches)


def _decided_by(model: _Model, ideal: float, curve: list[CurvePoint], chosen: CurvePoint) -> str:
    """Return the last bound that changed the number; "optimum" if no bound did."""
    without_memory = _best([c for c in curve if c.refused in ("", "memory")])
    if chosen.num_microbatches != without_memory.num_microbatches:
        return "memory"
    fastest = _best(curve)
    if chosen.num_microbatches != fastest.num_microbatches:
        return fastest.refused or "schedule"
    nearest = round(ideal)
    at_optimum = model.step_s(nearest, model.minibatch_size / nearest)
    return "optimum" if chosen.predicted_s <= at_optimum * (1 + EVEN) else "divisors"
