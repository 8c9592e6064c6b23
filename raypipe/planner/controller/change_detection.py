"""Detection of changes in the measured seconds of links and stages, and of settled stage times (no change for a while).

        ordinary step: the mean moves a little
  +---+
  v   | agrees
steady ---- differs ----> suspect ---- differs again ----> changed: the new mean is that of these two steps
  ^                          |
  +--------- agrees ---------+        a single outlier is noise and hardly moves the mean
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

from raypipe.ir.communication import StageSample


class DriftState(StrEnum):
    """Result of comparing the seconds of a step with the running mean of earlier steps.

    STEADY: the step agrees with the mean. SUSPECT: it differs, and the step before it did not differ in the same
    direction. CHANGED: it differs, as the step before it did.
    """

    STEADY = "steady"
    SUSPECT = "suspect"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class Drift:
    """Detector of changes in one series of seconds, one value per step.

    Attributes:
        threshold: relative distance from the mean above which a step disagrees with it.
        floor_s: distances are relative to the mean or to these seconds, whichever is more.
        weight: weight of the newest step in the mean.
        mean_s: running mean; None before the first step.
        odd_s: seconds of the last step if it disagreed with the mean, else None.
    """

    threshold: float
    floor_s: float
    weight: float = 0.2
    mean_s: float | None = None
    odd_s: float | None = None

    def after(self, seconds: float) -> tuple[Drift, DriftState]:
        """Return the detector after one more step, and the result of comparing that step with the mean."""
        if self.mean_s is None:
            return replace(self, mean_s=seconds), DriftState.STEADY
        allowed_s = self.threshold * max(self.mean_s, self.floor_s)
        change_s = seconds - self.mean_s
        if abs(change_s) <= allowed_s:
            # The outlier before is clipped: it moves the mean no further than an ordinary step can.
            odd_s = 0.0 if self.odd_s is None else max(-allowed_s, min(allowed_s, self.odd_s - self.mean_s))
            mean_s = max(0.0, self.mean_s + self.weight * (change_s + odd_s))
            return replace(self, mean_s=mean_s, odd_s=None), DriftState.STEADY
        if self.odd_s is not None and (self.odd_s > self.mean_s) == (seconds > self.mean_s):
            return replace(self, mean_s=(self.odd_s + seconds) / 2, odd_s=None), DriftState.CHANGED
        return replace(self, odd_s=seconds), DriftState.SUSPECT


WINDOW_STEPS = 8
"""Newest steps of which medians are taken."""
SPLIT_TIMINGS = 5
"""Newest timings of split backwards that are kept, as fractions of a whole backward."""
FLOOR_S = 1e-3
"""Least mean that changes of a stage's seconds are relative to."""
SETTLED_STEPS = 6
"""Steps without a change after which stage times count as settled."""
MEASURED_STEPS = 4
"""Fewest measured steps among SETTLED_STEPS; medians include the two steps that showed the change."""


class StageEstimator:
    """Estimator of the seconds that each stage takes for a forward, a backward and an optimizer step.

    If stages have replicas, every worker is treated as a stage, and its number as a stage number.

    Args:
        drift_threshold: relative change of a stage's forward plus backward seconds that counts as a change.
    """

    def __init__(self, num_stages: int, drift_threshold: float = 0.25) -> None:
        self._window: list[deque[StageSample]] = [deque(maxlen=WINDOW_STEPS) for _ in range(num_stages)]
        self._drift = [Drift(drift_threshold, FLOOR_S) for _ in range(num_stages)]
        # I and W as fractions of a whole backward, which do not depend on how slow the machine is.
        self._split_shares: list[deque[tuple[float, float]]] = [deque(maxlen=SPLIT_TIMINGS) for _ in range(num_stages)]
        self._step = -1  # the newest
        self._since: int | None = None  # the step of the last change, or the one before the first
        self._measured = 0  # steps since then

    def add(self, samples: Iterable[StageSample]) -> DriftState:
        """Add the samples of one step; return CHANGED if a stage has become faster or slower for good, else STEADY.

        After a change all stages forget all but the last two steps. Other stages have often slowed too, by less than
        the threshold, and mixing seconds from before and after would make the stages seem out of balance.
        """
        news = DriftState.STEADY
        for sample in samples:
            self._begin_step(sample.step)
            window = self._window[sample.stage]
            busy_s = sample.forward_s + self._whole_s(sample)
            self._drift[sample.stage], stage_news = self._drift[sample.stage].after(busy_s)
            window.append(sample)
            if sample.backward_s > 0 and sample.input_s is not None and sample.weight_s is not None:
                shares = sample.input_s / sample.backward_s, sample.weight_s / sample.backward_s
                self._split_shares[sample.stage].append(shares)
            if stage_news is DriftState.CHANGED:
                news = DriftState.CHANGED
        if news is DriftState.CHANGED:
            for window in self._window:
                keep = list(window)[-2:]
                window.clear()
                window.extend(keep)
            self._since, self._measured = self._step, 0
        return news

    def _begin_step(self, step: int) -> None:
        """Count the step of a sample if it is the first sample of this step; after a rollback, count from 0 again."""
        if self._since is None or step < self._step:  # the first step, or the first after a rollback
            self._since, self._measured = step - 1, 0
        if step != self._step:
            self._step, self._measured = step, self._measured + 1

    @property
    def complete(self) -> bool:
        """True if every stage has reported a step."""
        return all(self._window)

    @property
    def settled_s(self) -> tuple[float, ...] | None:
        """Seconds of forward plus backward of one micro-batch, by stage; None while they have not settled."""
        if self._since is None or not self.complete:
            return None
        if self._step - self._since < SETTLED_STEPS or self._measured < MEASURED_STEPS:
            return None
        forward_s, backward_s, _ = self.seconds()
        return tuple(f + b for f, b in zip(forward_s, backward_s, strict=True))

    def seconds(self) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """Return (forward, whole backward, optimizer step) seconds, each by stage, as medians of the newest steps."""
        rows = [
            (
                median(s.forward_s for s in window),
                median(self._whole_s(s) for s in window),
                median(s.step_s for s in window),
            )
            for window in self._window
        ]
        forward_s, backward_s, step_s = zip(*rows, strict=True)
        return forward_s, backward_s, step_s

    def split_backward_s(self) -> tuple[tuple[float, float], ...]:
        """Compute the median seconds of the two parts of a split backward, (I, W), by stage.

        I computes the gradients of inputs, W those of weights. The result is empty until split backwards of all stages
        were timed. A run with whole backwards splits one now and then to time its parts. In between, the parts are
        computed from whole backwards by the last measured fractions.
        """
        by_stage = []
        for stage, window in enumerate(self._window):
            shares = self._shares(stage)
            parts_s = [(s.input_s or 0.0, s.weight_s or 0.0) for s in window if not s.backward_s]
            whole_s = [s.backward_s for s in window if s.backward_s]
            if whole_s and shares is None:
                return ()
            if shares is not None:
                parts_s.extend((s * shares[0], s * shares[1]) for s in whole_s)
            by_stage.append((median(i for i, _ in parts_s), median(w for _, w in parts_s)))
        return tuple(by_stage)

    def _whole_s(self, sample: StageSample) -> float:
        """Return the seconds of a whole backward in this sample.

        If the step ran split backwards only, the seconds of a whole one are estimated from those of I and W.
        """
        if sample.backward_s or sample.input_s is None or sample.weight_s is None:
            return sample.backward_s
        shares = self._shares(sample.stage)
        return (sample.input_s + sample.weight_s) / (sum(shares) if shares is not None else 1.0)

    def _shares(self, stage: int) -> tuple[float, float] | None:
        """Return the seconds of I and W as fractions of a whole backward; None before a step timed both kinds."""
        timed = self._split_shares[stage]
        return (median(i for i, _ in timed), median(w for _, w in timed)) if timed else None
