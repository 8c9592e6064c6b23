"""Processes that a benchmark starts: what a child found comes back, and none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.lib.processes import in_child
from tests.waiting import wait_until


def double(number: int, file: str) -> None:
    Path(file).write_text(json.dumps(2 * number))


def fail(file: str) -> None:
    raise SystemExit(3)


@pytest.mark.slow
def test_what_a_child_writes_comes_back() -> None:
    assert in_child(double, 21, limit_s=120) == 42
    with pytest.raises(RuntimeError, match=r"ended with \[3\]"):
        in_child(fail, limit_s=120)


CHILD = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
from pathlib import Path
from jobs.lib.processes import in_child
def work(folder, file):
    try:
        (Path(folder) / "begun").touch()
        time.sleep(600)
    finally:
        time.sleep(0.1)
        (Path(folder) / "ended").touch()
if __name__ == "__main__":
    in_child(work, sys.argv[1], limit_s=600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["the parent", "all of the terminal"])
def test_an_interrupted_child_ends_what_it_has_started(tmp_path: Path, whom: str) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], env=environment, start_new_session=True, stderr=subprocess.DEVNULL
    ) as parent:
        wait_until((tmp_path / "begun").exists, 120)
        if whom == "the parent":
            parent.send_signal(signal.SIGINT)
        else:
            os.killpg(parent.pid, signal.SIGINT)
        parent.wait(120)
    assert (tmp_path / "ended").exists()
