"""Commands in one lane or two: all are carried out, no output is mixed, and statuses and seconds are right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import lanes
from tests.failures import LINES, Failure, counts_of, failures_of, in_words
from tests.lanes import Done, Part, carry_out, environment, seconds_of

ROOT = Path(__file__).parents[1]


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that says its words line by line, each once another one was said, and ends with a status."""
    (tmp_path / "says.py").write_text(
        "import os, pathlib, sys, time\n"
        "*words, status = sys.argv[1:]\n"
        "deadline_s = time.monotonic() + 60\n"
        "for word in words:\n"
        "    awaited, _, word = word.rpartition(':')\n"
        "    while awaited and not pathlib.Path(awaited).exists() and time.monotonic() < deadline_s:\n"
        "        time.sleep(0.01)\n"
        "    print(word, os.nice(0), flush=True)\n"
        "    pathlib.Path(word).touch()\n"
        "sys.exit(int(status))\n"
    )
    monkeypatch.setattr(lanes, "ROOT", tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("says")
def test_two_lanes_run_at_the_same_time_and_print_apart(capfd: pytest.CaptureFixture[str]) -> None:
    """Each waits for the other's last word before it says its next."""
    parts = [
        Part("first", (("says", "a", "b:c", "0"), ("says", "d:e", "3"))),
        Part("second", (("says", "a:b", "c:d", "1"),), beside=True),
    ]
    done = carry_out(parts, 2)
    assert [(one.part.tier, one.statuses) for one in done] == [("first", (0, 3)), ("second", (1,))]
    said = [line for line in capfd.readouterr().out.splitlines() if line and not line.startswith("$")]
    usual = os.nice(0)  # not 0 where this runs in such a lane itself
    low = min(19, usual + lanes.LOW_PRIORITY)
    assert said == ["=== first", f"a {low}", f"c {low}", f"e {low}", "=== second", f"b {usual}", f"d {usual}"]


@pytest.mark.slow
@pytest.mark.usefixtures("says")
def test_a_command_that_dies_before_its_report_runs_once_more(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "raylet.out").write_text("the raylet was killed")
    (tmp_path / "dies.py").write_text("import sys\nsys.exit(int(sys.argv[-1]))\n")
    monkeypatch.setattr(lanes, "RAY_LOGS", tmp_path)
    for report, status, times in (("no.xml", 1, 2), ("no.xml", 3, 1), ("raylet.out", 1, 1)):
        (done,) = carry_out([Part("only", (("dies", f"--junitxml={tmp_path / report}", str(status)),))], 1)
        output = capfd.readouterr().out
        assert (done.statuses, output.count("$ dies")) == ((status,), times)
        assert ("the raylet was killed" in output) is (times == 2)


def test_seconds_of_parts_that_overlap_count_once() -> None:
    part = Part("x", ())
    assert seconds_of([Done(part, (), 5.0, 7.0), Done(part, (), 0.0, 2.0), Done(part, (), 1.0, 3.0)]) == 5.0
    assert seconds_of([Done(part, (), 0.0, 9.0), Done(part, (), 1.0, 3.0)]) == 9.0
    assert seconds_of([]) == 0.0


@pytest.mark.slow
def test_failures_of_a_session_are_its_tests_and_what_it_is_blamed_for(tmp_path: Path) -> None:
    """A real session of pytest, with the options that tiers.py gives."""
    test = """
        import pytest
        class TestOne:
            @pytest.mark.parametrize("n", [1, 2])
            def test_two(self, n): assert n == 1
        @pytest.fixture
        def broken(): yield; raise ValueError("in tear-down")
        def test_three(broken): pass
        def test_four(): import wave
        def test_five(): pytest.skip("not here")
    """
    (tmp_path / "test_a.py").write_text("\n".join(line[8:] for line in test.splitlines()))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    report, complaints = tmp_path / "r.xml", tmp_path / "c.txt"
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "--forbid=wave",
        "-o", "junit_family=xunit1", f"--junitxml={report}", f"--complaints={complaints}", str(tmp_path),
    ]  # fmt: skip
    bare = {**environment(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=bare, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert counts_of(report) == (5, 1)
    failed, broken, blamed = failures_of("core", report, complaints)
    assert (failed.test, failed.error) == ("test_a.py::TestOne::test_two[2]", "assert 2 == 1")
    assert (broken.test, broken.error) == ("test_a.py::test_three", "ValueError: in tear-down")
    assert blamed.test == ""
    assert blamed.error.startswith("wave was imported in a session that forbids it")


def test_of_a_long_failure_the_end_is_told() -> None:
    text = "\n".join(map(str, range(500)))
    lines = in_words([Failure("ray", "a", text), Failure("core", "b", "E   why")])
    assert lines[:2] == ["=== the first failure: ray a", f"[{500 - LINES} lines before these]"]
    assert lines[2 : 2 + LINES] == [str(n) for n in range(500 - LINES, 500)]
    assert lines[-4:] == ["ray: a", "    0", "core: b", "    why"]
