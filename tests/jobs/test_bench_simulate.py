"""The parts of bench_simulate that decide what a figure means; its runs are the benchmark itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jobs.bench.simulate import bench
from jobs.bench.simulate.bench import Phases
from jobs.bench.simulate.predictions import JITTER, Prediction, jittered, stage_times_s

ROOT = Path(__file__).parents[2]


def phases(make_s: float, timeline_s: float = 0.0) -> Phases:
    return Phases(make_s, 2.0, 3.0, timeline_s, actions=10, cpu_s=1.0, peak_bytes=2_000_000_000)


def test_a_figure_is_the_median_of_whole_trials() -> None:
    figures = bench.speed_figures(
        {(64, 4096): [phases(1.0, 9.0), phases(5.0, 7.0), phases(2.0, 8.0)], (2, 4): [phases(1.0)]}
    )
    assert figures["seconds_s64_m4096"] == 7.0
    assert figures["make_seconds_s64_m4096"] == 2.0
    assert (figures["lower_seconds_s64_m4096"], figures["makespan_seconds_s64_m4096"]) == (2.0, 3.0)
    assert figures["timeline_seconds_s64_m4096"] == 8.0
    assert "timeline_seconds_s2_m4" not in figures  # not measured, so not said
    assert figures["peak_gbytes_s2_m4"] == 2.0


def test_an_error_is_relative_to_what_was_measured() -> None:
    low, high = Prediction("low", 1.0, [2.0, 1.5, 9.0]), Prediction("high", 3.0, [2.0])
    exact = Prediction("exact", 2.0, [2.0])
    assert (low.measured_s, low.error, high.error, exact.error) == (2.0, 0.5, 0.5, 0.0)
    assert bench.errors([low, high, exact]) == 0.5


def test_stages_are_uneven_and_jitter_stays_in_its_bounds() -> None:
    times = stage_times_s(4, seed=1)
    assert times == stage_times_s(4, seed=1)
    assert times != stage_times_s(4, seed=2)
    assert max(f for f, _ in times) > 1.1 * min(f for f, _ in times)
    assert all(1.5 * f <= b <= 2.5 * f for f, b in times)
    assert jittered(1.0, 0.0) == pytest.approx(1 - JITTER)
    assert jittered(1.0, 0.5) == pytest.approx(1.0)
    assert jittered(1.0, 1.0) == pytest.approx(1 + JITTER)


def test_a_trial_in_a_child() -> None:
    """As the benchmark starts it. 30 actions compute, 40 send and receive, 9 end the update."""
    check = (
        "from jobs.bench.simulate import bench as b\nimport sys\n"
        "if __name__ == '__main__':\n"
        "    p = b.Phases(*b.in_child(b._simulate, (3, 5), True, limit_s=100))\n"
        "    print(p.actions, p.total_s > 0, p.timeline_s > 0, p.peak_bytes > 1e6, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["79", "True", "True", "True", "False"], done.stderr
