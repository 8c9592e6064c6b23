"""Parts of benchmarks that are kept: measured once, told with their date, and again where something else is asked."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from jobs.lib import records
from jobs.lib.kept_cells import KeptCells

pytestmark = pytest.mark.core


def test_a_cell_is_measured_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def measure() -> dict[str, object]:
        calls.append(1)
        return {"steps": (1.0, 2.0)}

    folder = tmp_path / "cells"
    assert KeptCells(folder).measured("a", [1, "x"], measure) == {"steps": [1.0, 2.0]}
    assert KeptCells(folder).measured("a", [1, "x"], measure) == {"steps": [1.0, 2.0]}
    assert len(calls) == 1
    KeptCells(folder).measured("a", [2, "x"], measure)
    KeptCells(None).measured("a", [2, "x"], measure)
    assert len(calls) == 3


def test_what_fails_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        KeptCells(tmp_path).measured("a", 1, lambda: 1 / 0)
    assert KeptCells(tmp_path).measured("a", 1, lambda: 7) == 7


def test_a_cell_that_does_not_say_what_was_asked_is_measured_again(tmp_path: Path) -> None:
    """As earlier releases of benchmarks left them."""
    (tmp_path / "a.json").write_text(json.dumps({"date": "2026-01-01T00:00:00Z", "figures": {}}))
    assert KeptCells(tmp_path).measured("a", 1, lambda: 7) == 7


def test_a_record_begins_with_the_oldest_cell(tmp_path: Path) -> None:
    asked = argparse.Namespace(began=records.begin())
    own = asked.began
    first = KeptCells(tmp_path)
    first.date(asked)
    first.measured("a", 1, lambda: 7)
    first.date(asked)
    assert asked.began == own  # all of it was measured now
    cell = json.loads((tmp_path / "a.json").read_text())
    cell |= {"date": "2026-01-01T00:00:00Z", "took_s": 90.0, "load": {"before": [9.0] * 3, "after": [1.0] * 3}}
    (tmp_path / "a.json").write_text(json.dumps(cell))
    again = KeptCells(tmp_path)
    again.measured("a", 1, lambda: 8)
    nothing_new = argparse.Namespace(began=own)
    again.date(nothing_new)
    assert nothing_new.began.load_after == [1.0] * 3
    again.measured("b", 1, lambda: 8)
    again.date(asked)
    assert asked.began.load_after is None
    assert (asked.began.date, asked.began.load) == ("2026-01-01T00:00:00Z", [9.0] * 3)
    assert own.clock_s - asked.began.clock_s == 90.0
    assert again.told["a"]["took_s"] == 90.0
    assert "found" not in again.told["a"]


def test_a_record_of_what_is_kept_measures_nothing(tmp_path: Path) -> None:
    KeptCells(tmp_path).measured("a", 1, lambda: 7)
    kept = KeptCells(tmp_path, only_kept=True)
    assert [title for title in ("a", "b") if kept.counts(title)] == ["a"]
    assert kept.measured("a", 1, lambda: 8) == 7
    with pytest.raises(SystemExit, match="measured with other arguments"):
        kept.measured("a", 2, lambda: 8)
    with pytest.raises(SystemExit, match="--folder"):
        KeptCells(None, only_kept=True)
    assert KeptCells(tmp_path).counts("b")
