"""Choice of test files by what changed, on a small repository and on plain values."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.quick import changed, choose
from tests.sources import reached

REACHES = {
    "tests/test_a.py": {"tests.test_a": 0, "raypipe.a": 1},
    "tests/test_b.py": {"tests.test_b": 0, "raypipe.a": 1, "raypipe.b": 1},
    "tests/test_c.py": {"tests.test_c": 0, "raypipe.c": 1, "raypipe.b": 2, "raypipe.a": 3},
}
SECONDS = {"tests/test_a.py": 30.0, "tests/test_b.py": 10.0, "tests/test_c.py": 1.0}


@pytest.mark.parametrize(
    ("files", "limit_s", "chosen", "left"),
    [
        (["raypipe/a.py"], 41.0, "bac", ""),
        (["raypipe/a.py"], 40.0, "ba", "c"),
        (["raypipe/a.py"], 39.0, "bc", "a"),
        (["raypipe/a.py"], 0.0, "", "bac"),
        (["raypipe/a.py", "tests/test_a.py"], 0.0, "a", "bc"),
        (["README.md", "raypipe/c.py"], 40.0, "c", ""),
        ([], 40.0, "", ""),
    ],
)
def test_what_reaches_a_change_is_chosen_up_to_the_limit(
    files: list[str], limit_s: float, chosen: str, left: str
) -> None:
    names = [[f"tests/test_{letter}.py" for letter in letters] for letters in (chosen, left)]
    assert list(choose(files, REACHES, SECONDS, limit_s)) == names


@pytest.mark.slow
def test_changed_files_are_those_of_the_branch_and_those_not_committed(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, timeout=60)

    git("init", "--initial-branch=main")
    for name in ("kept", "committed", "edited", "elsewhere"):
        (tmp_path / name).write_text("1")
    (tmp_path / ".gitignore").write_text("ignored\n")
    git("add", ".")
    git("commit", "--message=begin")
    git("checkout", "-b", "branch")
    (tmp_path / "committed").write_text("2")
    git("commit", "--all", "--message=change")
    git("checkout", "main")
    (tmp_path / "elsewhere").write_text("2")
    git("commit", "--all", "--message=main")
    git("checkout", "branch")
    for name in ("edited", "new", "ignored"):
        (tmp_path / name).write_text("2")
    assert changed("main", tmp_path) == ["committed", "edited", "new"]
    with pytest.raises(SystemExit, match=r"git merge-base nowhere HEAD: .*Use --base"):
        changed("nowhere", tmp_path)


@pytest.mark.slow
def test_a_test_reaches_what_its_imports_import_and_the_fixtures_of_its_folder() -> None:
    reach = reached("tests.api.test_trainer")
    assert {"raypipe.api.trainer", "raypipe.planner", "raypipe.ir.schedule", "tests.conftest"} <= reach.keys()
    assert "raypipe.doctor.collect" in reached("tests.doctor.test_cluster")
