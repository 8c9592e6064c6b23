"""Seconds of every stage, from the medians of its last steps."""

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
FLOOR_S = 1e-3


class StageEstimator:
    """What is known of all stages.

    Args:
        drift_threshold: relative change of a stage's forward and backward together that is a change.
    """

    def __init__(self, num_stages: int, drift_threshold: float = 0.25) -> None:
        self._window: list[deque[StageSample]] = [deque(maxlen=WINDOW_STEPS) for _ in range(num_stages)]
        self._drift = [Drift(drift_threshold, FLOOR_S) for _ in range(num_stages)]
        self._parts: list[tuple[float, float] | None] = [None] * num_stages  # I and W over the whole they were run for

    def add(self, samples: Iterable[StageSample]) -> News:
        """Take in one step; CHANGED when a stage has become another."""
        news = News.STEADY
        for sample in samples:
            window = self._window[sample.stage]
            busy_s = sample.forward_s + self._whole_s(sample)
            self._drift[sample.stage], word = self._drift[sample.stage].after(busy_s)
            window.append(sample)
            parts = [
                (s.input_s / s.backward_s, s.weight_s / s.backward_s)
                for s in window
                if s.backward_s > 0 and s.input_s is not None and s.weight_s is not None
            ]
            if parts:
                self._parts[sample.stage] = median(i for i, _ in parts), median(w for _, w in parts)
            if word is News.CHANGED:
                keep = list(window)[-2:]
                window.clear()
                window.extend(keep)
                news = News.CHANGED
        return news

    @property
    def complete(self) -> bool:
        """Whether every stage has been heard of."""
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

    def halves(self) -> tuple[tuple[float, float], ...]:
        """By stage, I and W of a backward; empty while a stage that has one has not told.

        Whole backwards are run from their halves now and then only: their seconds are those of the whole, by what the
        halves were of it when that was seen last.
        """
        found = []
        for window, parts in zip(self._window, self._parts, strict=True):
            whole_s = [s.backward_s for s in window if s.backward_s > 0]
            told = [(s.input_s, s.weight_s) for s in window if s.input_s is not None and s.weight_s is not None]
            if whole_s and parts is not None:
                found.append((median(whole_s) * parts[0], median(whole_s) * parts[1]))
            elif whole_s:
                return ()
            else:
                input_s, weight_s = zip(*told or [(0.0, 0.0)], strict=True)
                found.append((median(input_s), median(weight_s)))
        return tuple(found)

    def _whole_s(self, sample: StageSample) -> float:
        """A whole backward, where none was run from its halves: they cost more by what that was seen to be."""
        if sample.backward_s or sample.input_s is None or sample.weight_s is None:
            return sample.backward_s
        parts = self._parts[sample.stage]
        return (sample.input_s + sample.weight_s) / (sum(parts) if parts is not None else 1.0)

    def to_dict(self) -> dict[str, Any]:
        """The state, for JSON."""
        return {
            "window": [[list(sample) for sample in window] for window in self._window],
            "drift": [asdict(one) for one in self._drift],
            "parts": self._parts,
        }

    def load(self, found: dict[str, Any]) -> None:
        """Inverse of ``to_dict``."""
        for window, rows in zip(self._window, found["window"], strict=True):
            window.clear()
            window.extend(StageSample(*row) for row in rows)
        self._drift = [Drift(**one) for one in found["drift"]]
        self._parts = [None if parts is None else (float(parts[0]), float(parts[1])) for parts in found["parts"]]
