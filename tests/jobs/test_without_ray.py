"""Jobs that run on a machine without Ray: an import of it there fails, and they do their work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
WITHOUT_RAY = """
import runpy, sys

class NoRay:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoRay())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("command", "figure"),
    [
        ("jobs/bench/gpu --device cpu --no-record", "stage_over_plain"),
        ("jobs/check/two_processes.py --device cpu", "tensors_apart_two_stages"),
    ],
)
def test_jobs_for_a_gpu_need_no_ray(command: str, figure: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY, *command.split()],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert figure in json.loads(done.stdout.splitlines()[-1])["figures"]
    assert "Ray is not installed" in done.stdout or "bench" in command
