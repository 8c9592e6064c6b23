"""A short chaos: a few faults, one of them while the run recovers from another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(420)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_run_that_loses_stages_ends_like_one_that_does_not(schedule: str) -> None:
    words = ["--faults", "1", "--seed", "5", "--kinds", "again", "--stages", "2", "--schedule", schedule]
    command = [sys.executable, str(ROOT / "jobs" / "check" / "chaos.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert figures["equal"]
    assert figures["failures"] >= figures["faults"]
