"""The guard against processes left behind sees children, orphans, and nobody else."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.processes import descendants, outlive

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
ROOT = Path(__file__).parents[1]
SLEEP = "import time; time.sleep(60)"


def test_descendants_are_seen_until_they_end() -> None:
    child = subprocess.Popen([sys.executable, "-c", SLEEP])
    try:
        assert SLEEP in descendants(os.getpid())[child.pid]
    finally:
        child.kill()
        child.wait()
    assert child.pid not in descendants(os.getpid())


@pytest.mark.slow
@pytest.mark.parametrize("workers", [[], ["-p", "xdist.plugin", "-n", "1"]])
def test_a_session_that_leaves_an_orphan_fails_and_ends_it(tmp_path: Path, workers: list[str]) -> None:
    """The child of a child that is already gone, in a session of its own: as a raylet would be."""
    test = f"""
        import subprocess, sys
        def test_leaves_an_orphan():
            start = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}], " \\
                    "start_new_session=True, stdout=-3, stderr=-3).pid)"
            done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=True)
            open({str(tmp_path / "pid")!r}, "w").write(done.stdout)
    """
    (tmp_path / "conftest.py").write_text("from tests import conftest as guard\nguard._PATIENCE_S = 0.2\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_orphan.py").write_text(textwrap.dedent(test))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        *workers,
        str(tmp_path),
    ]
    bare = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # half the time of the test otherwise
    done = subprocess.run(command, cwd=ROOT, env=bare, capture_output=True, text=True, timeout=240)
    pid = int((tmp_path / "pid").read_text())
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"process {pid} was left behind" in done.stdout
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"


def test_what_outlives_its_time_is_named_and_the_rest_not_waited_for() -> None:
    with subprocess.Popen(["sleep", "60"]) as stays, subprocess.Popen(["sleep", "0.1"]) as goes:
        found = {stays.pid: "stays", goes.pid: "goes", 2**22 - 1: "never was"}
        assert outlive(found, 1.0) == {stays.pid: "stays"}
        stays.kill()
        assert outlive(found, 60.0) == {}
