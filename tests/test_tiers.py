"""Every test belongs to exactly one tier, and no tier is left out unseen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiers
from tests.lanes import Done, Part

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


@pytest.fixture
def does(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Part]]:
    """Lets every tier end with a status that is told here, and 0 else; the list gets what would have been run."""

    def do(**statuses: int) -> list[Part]:
        carried: list[Part] = []

        def carry_out(parts: list[Part], lanes: int) -> list[Done]:
            carried.extend(parts)
            for part in parts:
                _report(part, failed=statuses.get(part.tier, 0) == 1, skipped=statuses.get(part.tier, 0) == 5)
            done = [statuses.get(part.tier, 0) for part in parts]
            return [
                Done(part, (status,) * len(part.commands), 0.0, 1.0) for part, status in zip(parts, done, strict=True)
            ]

        monkeypatch.setattr(tiers, "carry_out", carry_out)
        return carried

    return do


def _report(part: Part, failed: bool, skipped: bool) -> None:
    """What pytest writes of one test."""
    for word in part.commands[0]:
        if word.startswith("--junitxml="):
            told = '<failure message="E">def test():\n&gt;   assert 1 == 2\nE   assert 1 == 2\n\nx.py:2</failure>'
            Path(word.partition("=")[2]).write_text(
                f'<testsuites><testsuite tests="1" skipped="{int(skipped)}"><testcase classname="tests.test_x.TestY" '
                f'file="tests/test_x.py" name="test_z">{told if failed else ""}</testcase></testsuite></testsuites>'
            )


def test_a_failure_fails_the_run_and_is_told_again_at_the_end(
    does: Callable[..., list[Part]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "has_gpu", lambda: True)
    does(core=1)
    assert tiers.main([]) == 1
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in out[-7:-1]] == [
        ["lint", "passed"],
        ["core", "FAILED"],
        ["laws", "passed"],
        ["engine", "passed"],
        ["ray", "passed"],
        ["gpu", "passed"],
    ]
    begin = out.index("=== the first failure: core tests/test_x.py::TestY::test_z")
    assert out[begin + 1 : begin + 9] == [
        "def test():",
        ">   assert 1 == 2",
        "E   assert 1 == 2",
        "",
        "x.py:2",
        "",
        "=== all that failed: 1",
        "core: tests/test_x.py::TestY::test_z",
    ]
    assert out[begin + 9] == "    assert 1 == 2"


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


def test_what_must_run_is_told_to_every_test(does: Callable[..., list[Part]]) -> None:
    """A test that would skip for want of rights then fails, also in a tier of which others ran."""
    carried = does()
    assert tiers.main(["ray"]) == tiers.main(["ray", "--must-run"]) == 0
    assert [("--must-run" in part.commands[0]) for part in carried] == [False, False, True, True]


def test_a_tier_s_parts_are_all_its_files_and_only_what_watches_links_runs_beside_the_rest(tmp_path: Path) -> None:
    for tier in tiers.TIERS[1:5]:
        parts = tiers.parts_of(tier, tmp_path)
        files = [Path(word) for part in parts for word in part.commands[0] if word.endswith(".py")]
        assert sorted(files) == sorted(tiers.files_of(tier))
        assert [part.beside for part in parts] == ([True, False] if tier.name == "ray" else [False])


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
