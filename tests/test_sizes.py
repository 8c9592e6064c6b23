"""Limit the length of files: one whole concept a file, which takes 500 lines at most."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_LINES = 500


def test_files_are_small() -> None:
    files = [path for folder in ("raypipe", "jobs") for path in (ROOT / folder).rglob("*.py")]
    lines = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert len(files) > 200
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}, "split them by idea"
