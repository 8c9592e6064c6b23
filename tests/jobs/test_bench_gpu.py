"""The parts of bench_gpu that decide what a figure means, on the CPU."""

from __future__ import annotations

import statistics

import pytest

from jobs.bench.gpu import bench
from raypipe.engine.device import CPU

pytestmark = pytest.mark.ray


def test_figures_follow_from_the_trials() -> None:
    figures, raw = bench.measure(bench.TINY, lambda: CPU)
    medians = {label: statistics.median(seconds) for label, seconds in raw["step_s"].items()}
    assert set(medians) == {"plain", "stage", "two_stages"}
    assert all(len(seconds) == bench.TINY.steps * bench.TINY.rounds for seconds in raw["step_s"].values())
    assert figures["stage_over_plain"] == pytest.approx(medians["stage"] / medians["plain"])
    tokens = bench.TINY.minibatch * bench.TINY.context
    assert figures["tokens_per_second_plain"] == pytest.approx(tokens / medians["plain"])
    assert figures["peak_over_plain"] > 0
