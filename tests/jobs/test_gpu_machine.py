"""The check of a GPU machine: what it says of its parts."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.check import gpu_machine
from jobs.check.gpu_machine import PARTS, Part, carry_all_out, carry_out, named_in
from tests.processes import alive
from tests.waiting import wait_until

pytestmark = pytest.mark.ray

SAYS_AND_SLEEPS = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("tests/a.py::b", child.pid, flush=True)
child.wait()
"""


def test_a_part_that_takes_too_long_is_ended_with_its_children_and_what_it_said_is_kept() -> None:
    log = io.StringIO()
    found = carry_out(Part("long", 1, 5.0, ("-c", SAYS_AND_SLEEPS)), Path(), log)
    assert found.word == "TIMED OUT"
    (line,) = [line for line in log.getvalue().splitlines() if line.startswith("tests/a.py::b ")]
    wait_until(lambda: not alive(int(line.split()[1])))


def test_each_part_has_an_outcome_also_after_one_that_failed(tmp_path: Path) -> None:
    parts = [
        Part("good", 1, 60.0, ("-c", "print('yes')")),
        Part("bad", 1, 60.0, ("-c", "print('tests/a.py::b FAILED [ 1%]'); raise SystemExit(3)")),
        Part("after", 1, 60.0, ("-c", "open('OUT/file', 'w').close()")),
    ]
    done = carry_all_out(parts, tmp_path, "check")
    assert [(one.word, one.status) for one in done] == [("passed", 0), ("FAILED", 3), ("passed", 0)]
    assert [one["word"] for one in json.loads((tmp_path / "check.json").read_text())] == [one.word for one in done]
    assert (tmp_path / "check.txt").read_text().splitlines()[-1] == "failed: tests/a.py::b"
    assert (tmp_path / "file").exists()


def test_nothing_is_tried_on_a_machine_that_cannot(tmp_path: Path) -> None:
    done = carry_all_out(
        [Part("machine", 1, 60.0, ("-c", "1/0")), Part("next", 1, 60.0, ("-c", ""))], tmp_path, "check"
    )
    assert [one.word for one in done] == ["FAILED", "not run"]


def test_failures_are_found_in_both_ways_of_pytest_to_name_them() -> None:
    lines = ["[gw3] [ 10%] FAILED tests/gpu/a.py::b[c-1] ", "tests/gpu/a.py::d ERROR   [ 3%]", "tests/a.py::e PASSED"]
    assert named_in([*lines, *lines, "FAILED in words"]) == ["tests/gpu/a.py::b[c-1]", "tests/gpu/a.py::d"]


def test_limits_of_the_halves_leave_time_to_start_the_machine() -> None:
    limits = [sum(part.limit_s for part in PARTS if part.half == half) for half in (1, 2)]
    assert max(limits) <= 450
    assert sum(limits) <= 810


def test_commands_name_files_that_are_there() -> None:
    for part in PARTS:
        for word in (*part.command, *part.on_cpu):
            if word.startswith(("jobs/", "tests/")):
                assert (gpu_machine.ROOT / word).exists(), word
    named = " ".join(word for part in PARTS for word in part.command)
    for file in (gpu_machine.ROOT / "tests" / "gpu").glob("test_*.py"):
        assert f"tests/gpu/{file.name}" in named


def test_the_command_says_what_a_machine_without_a_gpu_is(tmp_path: Path) -> None:
    """``make gpu-lease DEVICE=cpu`` runs all parts, in most of an hour on two cores."""
    done = subprocess.run(
        [sys.executable, "jobs/check/gpu_machine.py", "--device", "cpu", "--only", "machine", "--out", str(tmp_path)],
        cwd=gpu_machine.ROOT, env=os.environ, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    (found,) = json.loads((tmp_path / "check-all.json").read_text())
    assert (found["part"], found["word"]) == ("machine", "passed"), done.stdout[-3000:]
    assert done.returncode == 0
