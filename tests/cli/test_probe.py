"""``raypipe probe -o``: what is measured of a cluster becomes a file to plan with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from raypipe.runfile.cluster_file import read_cluster
from tests.runtime.raylets import Home

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CPUS = 4
"""Of the shared head."""


def test_what_was_measured_can_be_planned_for(head: Home, tmp_path: Path) -> None:
    """In a process of its own: this one is connected to another cluster."""
    file = tmp_path / "cluster.yaml"
    command = [sys.executable, "-m", "raypipe.cli", "probe", "--address", head.address, "-o", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert "Mbit/s" in done.stdout
    assert done.stdout.endswith(f"wrote {file}\n")
    found = read_cluster(file)
    assert len(found.devices) == CPUS
    assert len({device.host for device in found.devices}) == 1
    (inside,) = found.links
    assert 0 < inside.latency_s < 1
    assert 0 < inside.bandwidth_bytes_s < 1e12
