"""Where a run stood at its copies, kept for another driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.engine.storage import Place
from raypipe.planner.segments import Position
from raypipe.runtime.run.marks import MOST_MARKS, Mark, Marks

pytestmark = pytest.mark.core


def at(step: int) -> Position:
    return Position(step, 4 * step, 1, 8 * step, step)


def test_another_driver_reads_what_was_written(tmp_path: Path) -> None:
    marks = Marks(Place.of(tmp_path))
    for step in range(0, 100, 10):
        marks.add(at(step), step // 20)
    marks.forget_after(80)
    marks.write()
    found = Marks(Place.of(tmp_path))
    found.read()
    assert found.steps == marks.steps == list(range(80 - 10 * (MOST_MARKS - 2), 81, 10))
    assert found[80] == Mark(at(80), 4)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[{}]", b'[{"position": {"steps": 1}, "skipped": 0}]', b"[1]"])
def test_a_file_that_is_damaged_or_missing_gives_none(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "copies.json").write_bytes(content)
    marks = Marks(Place.of(tmp_path))
    marks.read()
    assert marks.steps == []
