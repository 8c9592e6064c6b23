"""Pages of the records: as the committed ones, and what a page says of figures, targets and runs."""

from __future__ import annotations

import pytest

from jobs.check import results
from jobs.check.results import Benchmark, benchmarks, figure_tables, met, page, pages, plain, target_table
from jobs.lib.records import begin, run_of

BENCHMARK = Benchmark(
    "x",
    "python jobs/bench/x",
    "What it measures.",
    {"ratio": r"ratio_(\w+)", "seconds": r"seconds_(\w+)"},
    {r"ratio_s\d+": "<= 1.03", r"gain": ">= 2"},
)
FIGURES = {"ratio_s2": 1.01, "ratio_s4": 1.0512, "seconds_s2": 0.25, "count": 3, "gain": 1.5}


def test_the_committed_pages_are_what_the_records_make() -> None:
    stale = [path.name for path, text in pages().items() if not path.exists() or path.read_text("utf-8") != text]
    assert stale == [], "python jobs/check/results.py"
    by_records = {path.stem for path in results.records.FOLDER.glob("*.md") if path.name != results.BY_HAND}
    assert by_records == {path.stem for path in results.records.FOLDER.glob("*.json")}


def test_every_benchmark_is_found_and_every_record_has_one() -> None:
    found = benchmarks()
    assert set(found) >= {path.parent.name for path in results.ROOT.glob("jobs/bench/*/bench.py")} | {"limits", "plans"}
    assert (found["plans"].code, found["limits"].code) == ("", "studies-0.1")
    for benchmark in found.values():
        assert benchmark.measures, benchmark.topic
        for bound in benchmark.targets.values():
            met(bound, 1.0)
    assert {path.stem.partition("-")[0] for path in results.records.FOLDER.glob("*.json")} <= set(found)


def test_a_row_for_each_case_and_bold_for_what_misses_its_target() -> None:
    assert figure_tables(FIGURES, BENCHMARK).splitlines() == [
        "|  | ratio | seconds |",
        "| --- | --- | --- |",
        "| s2 | 1.01 | 0.25 |",
        "| s4 | **1.051** |  |",
        "",
        "| figure | value |",
        "| --- | --- |",
        "| `count` | 3 |",
        "| `gain` | **1.5** |",
    ]


def test_targets() -> None:
    assert [met("<= 1.03", v) for v in (1.03, 1.031)] == [True, False]
    assert [met(">= 1.25", v) for v in (1.24, 1.25)] == [False, True]
    assert [met("0.95 to 1.05", v) for v in (0.94, 0.95, 1.05, 1.06)] == [False, True, True, False]
    with pytest.raises(ValueError, match="'about 1' is no target"):
        met("about 1", 1.0)
    assert target_table(FIGURES, {**BENCHMARK.targets, "other": "<= 1"}).splitlines()[2:] == [
        "| `ratio_s*` | <= 1.03 | 1 of 2 | 1.01 to 1.051 |",
        "| `gain` | >= 2 | 0 of 1 | 1.5 |",
        "| `other` | <= 1 | not measured | -- |",
    ]
    assert plain(r"best_(a|b)_[a-z]+_\d(_emulated)?") == r"`best_(a\|b)_*_*`"


def test_a_page_shows_the_newest_figures_and_what_only_older_runs_have() -> None:
    newest = run_of("python jobs/bench/x", begin(), {"ratio_s2": 1.0}, {"a": 1})
    copied = {**newest, "raw": None, "source": "a page", "note": "On a busy day."}
    older = {**copied, "figures": {"ratio_s2": 2.0, "gain": 4}}
    oldest = {**copied, "figures": {"gain": 3}, "note": "The first of all."}
    text = page("x", {"bench": "bench_x", "runs": [newest, older, oldest]}, BENCHMARK)
    assert "# bench_x\n\nWhat it measures.\n\n`python jobs/bench/x`" in text
    assert "| s2 | 1 |" in text
    assert "| s2 | **2** |" not in text
    assert "## Figures that newer runs do not have" in text
    assert "| `gain` | 4 |" in text
    assert "copied from a page, without raw trials" in text
    assert text.rstrip().endswith("The first of all.")
