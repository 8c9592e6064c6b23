"""Seconds of every stage, or every worker, from the medians of its last steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from statistics import median
from typing import Any

from raypipe.ir.links import StageSample
from raypipe.planner.control.drift import Drift, News

__all__ = ["StageEstimator"]

WINDOW_STEPS = 8
SPLIT_TIMINGS = 5
"""Timings of split backwards that are kept, as fractions of a whole one."""
FLOOR_S = 1e-3


class StageEstimator:
    """What is known of all stages.

    Args:
        drift_threshold: relative change of a stage's forward and backward together that is a change.
    """

    def __init__(self, num_stages: int, drift_threshold: float = 0.25) -> None:
        self._window: list[deque[StageSample]] = [deque(maxlen=WINDOW_STEPS) for _ in range(num_stages)]
        self._drift = [Drift(drift_threshold, FLOOR_S) for _ in range(num_stages)]
        # I and W as fractions of a whole backward, which are the same while the machine is slow.
        self._split_shares: list[deque[tuple[float, float]]] = [deque(maxlen=SPLIT_TIMINGS) for _ in range(num_stages)]

    def add(self, samples: Iterable[StageSample]) -> News:
        """Take in one step; CHANGED when a stage has become faster or slower for good.

        Then all stages forget their earlier steps: what slows one often slows others by less than the threshold, and
        seconds of different times would be compared as if the stages were out of balance.
        """
        news = News.STEADY
        for sample in samples:
            window = self._window[sample.stage]
            busy_s = sample.forward_s + self._whole_s(sample)
            self._drift[sample.stage], heard = self._drift[sample.stage].after(busy_s)
            window.append(sample)
            if sample.backward_s > 0 and sample.input_s is not None and sample.weight_s is not None:
                shares = sample.input_s / sample.backward_s, sample.weight_s / sample.backward_s
                self._split_shares[sample.stage].append(shares)
            if heard is News.CHANGED:
                news = News.CHANGED
        if news is News.CHANGED:
            for window in self._window:
                keep = list(window)[-2:]
                window.clear()
                window.extend(keep)
        return news

    @property
    def complete(self) -> bool:
        """Whether every stage has reported a step."""
        return all(self._window)

    def seconds(self) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
        """By stage: forward, whole backward, optimizer step."""
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
        """By stage, (I, W): the input and weight parts of a split backward; empty until all with a backward were timed.

        A run of whole backwards splits one now and then to time its parts; in between they count as the same fractions
        of a whole one.
        """
        found = []
        for stage, window in enumerate(self._window):
            shares = self._shares(stage)
            parts_s = [(s.input_s or 0.0, s.weight_s or 0.0) for s in window if not s.backward_s]
            whole_s = [s.backward_s for s in window if s.backward_s]
            if whole_s and shares is None:
                return ()
            if shares is not None:
                parts_s.extend((s * shares[0], s * shares[1]) for s in whole_s)
            found.append((median(i for i, _ in parts_s), median(w for _, w in parts_s)))
        return tuple(found)

    def _whole_s(self, sample: StageSample) -> float:
        """A whole backward; where all were split, what both parts take, less what splitting was measured to cost."""
        if sample.backward_s or sample.input_s is None or sample.weight_s is None:
            return sample.backward_s
        shares = self._shares(sample.stage)
        return (sample.input_s + sample.weight_s) / (sum(shares) if shares is not None else 1.0)

    def _shares(self, stage: int) -> tuple[float, float] | None:
        """What I and W take, as fractions of a whole backward; None before both were timed."""
        timed = self._split_shares[stage]
        return (median(i for i, _ in timed), median(w for _, w in timed)) if timed else None

    def to_dict(self) -> dict[str, Any]:
        """The state, for JSON."""
        return {
            "window": [[list(sample) for sample in window] for window in self._window],
            "drift": [asdict(one) for one in self._drift],
            "told": [[list(pair) for pair in timed] for timed in self._split_shares],
        }

    def load(self, found: dict[str, Any]) -> None:
        """Inverse of ``to_dict``."""
        for window, rows in zip(self._window, found["window"], strict=True):
            window.clear()
            window.extend(StageSample(*row) for row in rows)
        self._drift = [Drift(**one) for one in found["drift"]]
        for timed, pairs in zip(self._split_shares, found["told"], strict=True):
            timed.clear()
            timed.extend((float(i), float(w)) for i, w in pairs)
