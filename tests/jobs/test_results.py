"""Pages of the records: as the committed ones, and what a page says of figures, targets and runs."""

from __future__ import annotations

from jobs.check import results
from jobs.check.results import benchmarks, met, pages


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
