"""A short chaos: a second stage is lost while the run recovers from the loss of another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import processes

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 400


def chaos(*words: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "jobs" / "check" / "chaos.py"), "--limit", str(LIMIT_S), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S + 150, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found: dict[str, Any] = processes.said_last(done.stdout)["figures"]
    assert found["equal"]
    assert found["same_losses"]
    assert found["lost_steps"] == 0
    assert found["left_behind"] == {}
    return found


def test_a_run_that_loses_stages_ends_like_one_that_does_not() -> None:
    """With versions of the weights beside them; without, losses are those of tests/runtime/fleet/test_recovery.py."""
    found = chaos("--faults", "1", "--seed", "5", "--kinds", "again", "--stages", "2", "--schedule", "2bw")
    assert found["faults"] == {"again": 1}
    assert found["failures"] >= 1
    assert found["survivors_lost"] == 0
