"""Records of benchmarks: what one holds, what a new run does to those before it, and what is no record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.lib import records
from jobs.lib.records import begin, keep, problems, read, run_of, text_of


def run(**changes: Any) -> dict[str, Any]:
    figures = {"ratio_a": 1.25, "count": 3}
    return {**run_of("python jobs/bench/x", begin(), figures, {"steps_s": [0.123456789, 0.2]}), **changes}


def test_a_run_knows_where_and_when_it_was() -> None:
    found = run()
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["memory_bytes"] > 1 << 28
    assert found["hardware"]["cpu"]
    assert found["versions"]["python"].startswith("3.")
    assert [len(found["load"][when]) for when in ("before", "after")] == [3, 3]
    assert found["duration_s"] >= 0
    assert problems({"bench": "bench_x", "runs": [found]}) == []


def test_the_newest_is_first_and_alone_has_raw_trials(tmp_path: Path) -> None:
    file = tmp_path / "results" / "x.json"
    keep(file, "bench_x", run())
    keep(file, "bench_x", run(figures={"ratio_a": 1.0}))
    newest, before = read(file)["runs"]
    assert (newest["figures"], newest["raw"]) == ({"ratio_a": 1.0}, {"steps_s": [0.123457, 0.2]})
    assert (before["figures"], before["raw"]) == ({"ratio_a": 1.25, "count": 3}, None)


def test_a_record_of_another_benchmark_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    keep(file, "bench_x", run())
    text = file.read_text()
    with pytest.raises(ValueError, match="is a record of bench_x, not of bench_y"):
        keep(file, "bench_y", run())
    assert file.read_text() == text


def test_every_figure_has_a_line(tmp_path: Path) -> None:
    record = {"bench": "bench_x", "runs": [run(), run(raw=None)]}
    text = text_of(record)
    assert json.loads(text) == record
    assert text.splitlines().count('  "ratio_a": 1.25,') == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"figures": {"a": float("nan")}}, "figure a is nan"),
        ({"figures": {"a": "1.2"}}, "figure a is '1.2'"),
        ({"date": "yesterday"}, "date 'yesterday' is none"),
        ({"duration_s": None}, "duration_s is unknown, and no source is named"),
        ({"date": None}, "date is unknown, and no source is named"),
        ({"load": {"before": None, "after": None}}, "before is unknown"),
        ({"load": {}}, "load has before and after"),
        ({"dirty": "no"}, "dirty is 'no'"),
        ({"raw": {}}, "the newest run has no raw trials"),
        ({"more": 1}, "the fields more are missing or too many"),
    ],
)
def test_what_is_no_record(changes: dict[str, Any], said: str) -> None:
    assert said in "; ".join(problems({"bench": "bench_x", "runs": [run(**changes)]}))


def test_more_that_is_no_record() -> None:
    assert problems({"bench": "bench_x"}) == ["a record has the fields bench and runs"]
    assert problems({"bench": "bench_x", "runs": []}) == ["there is no run"]
    assert problems({"bench": "bench_x", "runs": [run(), run()]}) == ["only the newest run keeps its raw trials"]
    copied = run(source="a page", duration_s=None, load={"before": None, "after": None}, raw=None)
    assert problems({"bench": "bench_x", "runs": [copied]}) == []


def test_the_committed_records_are_records() -> None:
    for file in records.FOLDER.glob("*.json"):
        read(file)
