"""The parts of bench_codec that decide what a figure means."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.bench.codec import bench
from jobs.lib import records


@pytest.mark.slow
def test_a_quick_run_as_people_start_it(tmp_path: Path) -> None:
    """From the repository's root; the figures can be computed from the raw trials, and no record is left."""
    file = tmp_path / "codec.json"
    known = {path: path.stat().st_mtime_ns for path in records.FOLDER.iterdir()}
    command = [sys.executable, "jobs/bench/codec", "--quick", "--json", str(file)]
    done = subprocess.run(command, cwd=records.FOLDER.parents[1], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    run = json.loads(file.read_text())
    assert records.problems({"bench": run.pop("bench"), "runs": [run]}) == []
    assert run["command"] == "python jobs/bench/codec"
    assert json.loads(done.stdout.splitlines()[-1])["figures"] == run["figures"]
    trials = run["raw"][f"host {bench.OF_FIGURES['host']}"]["bf16"]
    seconds = sum(statistics.median(column) for column in zip(*trials["trials_s"], strict=True))
    moved_bytes = 2 * (4 + 2) * bench.OF_FIGURES["host"]
    assert run["figures"]["gbytes_per_second_bf16"] == pytest.approx(moved_bytes / seconds / 1e9, rel=1e-3)
    assert {path: path.stat().st_mtime_ns for path in records.FOLDER.iterdir()} == known
