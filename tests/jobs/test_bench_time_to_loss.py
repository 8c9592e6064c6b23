"""bench_time_to_loss times the training that its figures are about, and its figures follow from the raw trials."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.bench.time_to_loss import bench, training
from jobs.bench.time_to_loss.bench import Cell, Settings, figures_of, updates_to
from jobs.bench.time_to_loss.training import EVERY, Device, Ran, arithmetic, train
from jobs.lib import records


@pytest.mark.parametrize("name", bench.WAYS)
def test_it_trains_what_plain_arithmetic_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated times change no loss, and the copies of the weights are those after so many updates."""
    monkeypatch.setattr(training, "EVERY", 3)
    ran = train(bench.WAYS[name], Device(1e-3, 2e-3, 1e-3), seed=0, updates=20, num_steps=6)
    wanted = arithmetic(bench.WAYS[name], 0, 20)[:2]
    assert ran.heldout == pytest.approx(wanted, rel=1e-4)
    assert abs(wanted[0] - wanted[1]) > 0.01
    assert len(ran.losses) == len(ran.step_s) == 6


def test_figures_are_seconds_until_the_loss_of_equal_seeds() -> None:
    def ran(step_s: float, *heldout: float) -> Ran:
        updates, schedule = EVERY * len(heldout), "1f1b" if step_s in (0.33, 1.93) else "2bw r=3,3,2"
        return Ran([4.0] * updates, [step_s] * updates, [schedule], list(heldout), 0.1)

    found = {
        Cell("1f1b", 0, 0): ran(0.33, 4.0, 2.9, 2.0),
        Cell("2bw", 0, 0): ran(0.24, 4.0, 3.1, 2.2),
        Cell("1f1b", 0, 1): ran(0.33, 2.9, 2.8, 2.0),
        Cell("2bw", 0, 1): ran(0.24, 2.9, 2.8, 2.1),
        Cell("1f1b", 100, 0): ran(1.93, 4.0, 3.0),
        Cell("2bw", 100, 0): ran(0.7, 4.0, 3.1, 2.2),
    }
    figures = figures_of(Settings(), 3.0, found)
    assert figures["updates_1f1b_0ms"] == 1.5 * EVERY
    assert figures["updates_2bw_0ms"] == 2 * EVERY
    assert figures["times_1f1b_2bw_0ms"] == pytest.approx((0.66 / 0.72 + 0.33 / 0.24) / 2)
    assert figures["times_1f1b_2bw_100ms"] == pytest.approx(2 * 1.93 / (3 * 0.7))
    assert figures["heldout_2bw_0ms"] == pytest.approx(2.15)
    assert figures["of_simulated_1f1b_0ms"] == pytest.approx(1.0), "(M + S - 1) (f + b)"
    assert figures["of_simulated_2bw_0ms"] == pytest.approx(1.0), "M (f + b)"
    with pytest.raises(SystemExit, match="least was 2"):
        updates_to(1.9, found[Cell("1f1b", 0, 0)])


@pytest.mark.slow
def test_a_quick_run_as_people_start_it(tmp_path: Path) -> None:
    """From the repository's root; all cells are kept in the folder, and no record is left."""
    known = {path: path.stat().st_mtime_ns for path in records.FOLDER.iterdir()}
    command = [sys.executable, "jobs/bench/time_to_loss", "--quick", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=records.FOLDER.parents[1], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert {"times_1f1b_2bw_0ms", "times_1f1b_2bw_100ms", "times_1f1b_auto_100ms"} <= figures.keys()
    assert {path.stem for path in tmp_path.iterdir()} == {"fixed_loss"} | {
        cell.title for cell in bench.cells_of(bench.BENCH.quick)
    }
    assert {path: path.stat().st_mtime_ns for path in records.FOLDER.iterdir()} == known
