"""Every test belongs to exactly one tier, and no tier is left out unseen."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests import tiers

TESTS = Path(__file__).parent
BY_NAME = {tier.name: tier for tier in tiers.TIERS}


@pytest.mark.slow
def test_every_test_file_is_in_one_tier() -> None:
    counts = Counter(path for tier in tiers.TIERS if not tier.of for path in tiers.files_of(tier))
    assert set(counts) == set(TESTS.rglob("test_*.py"))
    assert set(counts.values()) == {1}


def test_what_core_leaves_out_is_in_laws() -> None:
    core, laws = BY_NAME["core"], BY_NAME["laws"]
    assert tiers.files_of(core) == tiers.files_of(laws)
    assert (core.options[-2:], laws.options[-2:]) == (("-m", "not slow"), ("-m", "slow"))


def test_every_file_that_a_tier_names_exists() -> None:
    named = [pattern for tier in tiers.TIERS for pattern in (*tier.long, *tier.patient)]
    assert [pattern for pattern in named if not list(TESTS.glob(pattern))] == []
    assert [folder for folder in tiers.FOLDERS if not (TESTS / folder).is_dir() and folder != "gpu"] == []


@pytest.mark.parametrize(
    ("file", "text", "tier"),
    [
        ("test_a.py", "import pytest", "core"),
        ("planner/control/test_a.py", "", "core"),
        ("engine/test_a.py", "pytestmark = pytest.mark.slow", "engine"),
        ("runtime/run/test_a.py", "pytestmark = [pytest.mark.slow, pytest.mark.engine]", "engine"),
        ("api/test_a.py", "pytestmark = pytest.mark.ray\n", "ray"),
        ("planner/test_a.py", "@pytest.mark.ray\ndef test(): ...\npytestmark = ()", "core"),
    ],
)
def test_a_file_is_in_the_tier_of_its_mark_or_of_its_folder(tmp_path: Path, file: str, text: str, tier: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert tiers.tier_of(path, tmp_path) == tier


@pytest.mark.parametrize(
    ("name", "status", "ran", "skipped", "word", "could_run"),
    [
        ("core", 0, 5, 1, "passed", True),
        ("core", 1, 5, 0, "FAILED", True),
        ("core", 2, 0, 0, "FAILED", True),
        ("ray", 0, 0, 7, "SKIPPED", True),
        ("ray", 5, 0, 0, "SKIPPED", True),
    ],
)
def test_outcomes(name: str, status: int, ran: int, skipped: int, word: str, could_run: bool) -> None:
    outcome = tiers.judge(BY_NAME[name], status, ran, skipped)
    assert (outcome.word, outcome.could_run) == (word, could_run)


def outcomes(monkeypatch: pytest.MonkeyPatch, **by_name: tiers.Outcome) -> None:
    passed = tiers.Outcome("passed", "fine")
    monkeypatch.setattr(tiers, "run", lambda tier: by_name.get(tier.name, passed))


def test_a_failure_fails_the_run_and_later_tiers_still_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes(monkeypatch, core=tiers.Outcome("FAILED", "2 ran"))
    assert tiers.main([]) == 1
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[-6:]] == [
        ["lint", "passed"],
        ["core", "FAILED"],
        ["laws", "passed"],
        ["engine", "passed"],
        ["ray", "passed"],
        ["gpu", "passed"],
    ]


def test_a_skipped_tier_fails_only_where_it_could_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes(monkeypatch, gpu=tiers.Outcome("SKIPPED", "no NVIDIA device on this machine", could_run=False))
    assert tiers.main(["--must-run"]) == 0
    assert "gpu     SKIPPED" in capsys.readouterr().out
    outcomes(monkeypatch, ray=tiers.Outcome("SKIPPED", "no test ran, 7 skipped"))
    assert tiers.main([]) == 0
    assert tiers.main(["--must-run"]) == 1
    assert "<- must run on this machine" in capsys.readouterr().out


def test_what_must_run_is_told_to_every_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that would skip for want of rights then fails, also in a tier of which others ran."""
    options: list[tuple[str, ...]] = []

    def run(tier: tiers.Tier) -> tiers.Outcome:
        options.append(tier.options)
        return tiers.Outcome("passed", "fine")

    monkeypatch.setattr(tiers, "run", run)
    assert tiers.main(["ray"]) == tiers.main(["ray", "--must-run"]) == 0
    assert [("--must-run" in found) for found in options] == [False, True]


def test_every_process_need_not_compile_all_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("KEPT", "yes")
    given = tiers._environment()
    assert "PYTHONDONTWRITEBYTECODE" not in given
    assert given["KEPT"] == "yes"


def test_devices_are_seen(tmp_path: Path) -> None:
    assert not tiers.has_gpu(tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert not tiers.has_gpu(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert tiers.has_gpu(tmp_path)


def test_an_unknown_tier_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tiers.main(["cores"])
    assert "no tier 'cores'" in capsys.readouterr().err
