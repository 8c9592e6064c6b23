"""Every test belongs to exactly one tier, and no tier is left out unseen."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import durations, tiers
from tests.lanes import Done, Part
from tests.sources import FILES, module_of, reached

TESTS = Path(__file__).parent
BY_NAME = {tier.name: tier for tier in tiers.TIERS}


@pytest.mark.slow
def test_every_test_file_is_in_one_tier() -> None:
    counts = Counter(path for tier in tiers.TIERS if not tier.of for path in tiers.files_of(tier))
    assert set(counts) == set(TESTS.rglob("test_*.py"))
    assert set(counts.values()) == {1}


def test_every_file_that_a_tier_names_exists() -> None:
    named = [pattern for tier in tiers.TIERS for pattern in (*tier.long, *tier.patient, *tier.first)]
    assert [pattern for pattern in named if not list(TESTS.glob(pattern))] == []
    assert [folder for folder in tiers.FOLDERS if not (TESTS / folder).is_dir() and folder != "gpu"] == []


@pytest.mark.parametrize(
    ("file", "text", "tier"),
    [
        ("test_a.py", "import pytest", "core"),
        ("planner/controller/test_a.py", "", "core"),
        ("engine/test_a.py", "pytestmark = pytest.mark.slow", "engine"),
        ("run/test_a.py", "pytestmark = [pytest.mark.slow, pytest.mark.engine]", "engine"),
        ("api/test_a.py", "pytestmark = pytest.mark.ray\n", "ray"),
        ("planner/test_a.py", "@pytest.mark.ray\ndef test(): ...\npytestmark = ()", "core"),
    ],
)
def test_a_file_is_in_the_tier_of_its_mark_or_of_its_folder(tmp_path: Path, file: str, text: str, tier: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert tiers.tier_of(path, tmp_path) == tier


@pytest.fixture
def does(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Part]]:
    """Lets every tier end with a status that is told here, and 0 else; the list gets what would have been run."""

    def do(**statuses: int) -> list[Part]:
        carried: list[Part] = []

        def carry_out(parts: list[Part], lanes: int) -> list[Done]:
            carried.extend(parts)
            for word in (word for part in parts for word in part.commands[0] if word.startswith("--junitxml=")):
                skipped = any(f"/{name}-" in word for name, status in statuses.items() if status == 5)
                Path(word.partition("=")[2]).write_text(f'<testsuite tests="1" skipped="{int(skipped)}"></testsuite>')
            done = [statuses.get(part.tier, 0) for part in parts]
            return [
                Done(part, (status,) * len(part.commands), 0.0, 1.0, 3.0)
                for part, status in zip(parts, done, strict=True)
            ]

        monkeypatch.setattr(tiers, "carry_out", carry_out)
        return carried

    return do


def test_a_failed_tier_fails_the_run(does: Callable[..., list[Part]], capsys: pytest.CaptureFixture[str]) -> None:
    does(core=1)
    assert tiers.main([]) == 1
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if " CPU s " in line]
    words = {"core": "FAILED"} if tiers.has_gpu() else {"core": "FAILED", "gpu": "SKIPPED"}
    assert rows == [[tier.name, words.get(tier.name, "passed")] for tier in tiers.TIERS]


def test_a_skipped_tier_fails_only_where_it_could_run(
    does: Callable[..., list[Part]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tiers, "has_gpu", lambda: False)
    does()
    assert tiers.main(["--must-run"]) == 0
    assert "gpu     SKIPPED" in capsys.readouterr().out
    does(ray=5)
    assert tiers.main([]) == 0
    assert tiers.main(["--must-run"]) == 1
    assert "<- must run on this machine" in capsys.readouterr().out


def test_a_tier_without_long_tests_does_not_fail_the_long_run() -> None:
    laws = BY_NAME["laws"]
    assert tiers.judge(laws, 5, ran=0, skipped=0).could_run
    assert not tiers.judge(laws, 5, ran=0, skipped=0, long=True).could_run
    assert tiers.judge(laws, 5, ran=0, skipped=2, long=True).could_run


def test_every_file_of_a_tier_runs_and_only_what_watches_links_runs_beside_the_rest(tmp_path: Path) -> None:
    for tier in tiers.TIERS[1:5]:
        parts, long = tiers.parts_of(tier, tmp_path), tiers.parts_of(tier, tmp_path, long=True)
        assert files_in(parts) | files_in(long) == set(tiers.files_of(tier))
        assert all(tiers.all_long(file) for file in files_in(long) - files_in(parts))
        assert [part.beside for part in parts] == ([True, False] if tier.name == "ray" else [False])


def files_in(parts: list[Part]) -> set[Path]:
    return {Path(word) for part in parts for word in part.commands[0] if word.endswith(".py")}


def test_a_tier_over_its_budget_of_cpu_seconds_is_named(
    does: Callable[..., list[Part]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    does()
    assert tiers.main(["core"]) == 0
    monkeypatch.setattr(tiers, "TIERS", (dataclasses.replace(BY_NAME["core"], cpu_s=2.0),))
    assert tiers.main(["core"]) == 0
    assert "1 ran, 0 skipped; 3 CPU seconds exceed its budget of 2: make its slowest" in capsys.readouterr().out
    assert tiers.main(["core", "--long"]) == 0
    assert "exceed" not in capsys.readouterr().out


def test_each_test_is_in_one_part() -> None:
    def collected(*options: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options, __file__]
        done = subprocess.run(command, cwd=tiers.ROOT, capture_output=True, text=True, timeout=120, check=True)
        return [line for line in done.stdout.splitlines() if "::" in line]

    parts = [collected(f"--part={part}/2") for part in (1, 2)]
    assert all(parts)
    assert sorted(parts[0] + parts[1]) == sorted(collected())


def test_the_most_expensive_tests_are_long_until_the_others_fit() -> None:
    seconds = {"a.py": 5.0, "a.py::one": 3.0, "a.py::two": 9.0, "b.py::one": 4.0, "c.py::one": 90.0}
    assert durations.long_of(["a.py", "b.py"], seconds, 21.0) == frozenset()
    assert durations.long_of(["a.py", "b.py"], seconds, 20.0) == {"a.py::two"}
    assert durations.long_of(["a.py", "b.py"], seconds, 8.0) == {"a.py::two", "b.py::one"}
    assert durations.long_of(["a.py", "b.py"], seconds, 1.0) == {"a.py::two", "b.py::one", "a.py::one"}
    assert durations.seconds_of_file("a.py", seconds) == 17.0
    assert durations.seconds_of_file("a.py", seconds, frozenset({"a.py::two"})) == 8.0


def test_reports_give_seconds_of_tests_and_sums_of_what_is_cheap(tmp_path: Path) -> None:
    case = '<testcase classname="t.test_x" file="t/test_x.py" name="{}" time="9"><properties>{}</properties></testcase>'
    cpu = '<property name="cpu_s" value="{}" />'
    cases = [
        case.format("a[1]", cpu.format(1.5)),
        case.format("b", cpu.format(0.25)),
        case.format("c", cpu.format(0.5)),
    ]
    report = tmp_path / "x.xml"
    report.write_text(f"<testsuites><testsuite>{''.join([*cases, case.format('d', '')])}</testsuite></testsuites>")
    assert durations.measured([report]) == {"t/test_x.py::a[1]": 1.5, "t/test_x.py": 0.75, "t/test_x.py::d": 9.0}


@pytest.mark.slow
def test_every_module_is_reached_by_a_test_that_is_not_long() -> None:
    files = [path for path in TESTS.rglob("test_*.py") if not tiers.all_long(path)]
    reaches = {module for path in files for module in reached(module_of(path))}
    assert {module_of(path) for path in FILES} - reaches == set()
