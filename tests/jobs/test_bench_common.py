"""Frame of all benchmarks: command line, medians, records, and cells that are kept."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jobs.lib import common, records
from jobs.lib.common import Bench
from jobs.lib.growth import Growth, Look, growth_of
from jobs.lib.records import begin, keep, problems, read, run_of, text_of

pytestmark = [pytest.mark.core, pytest.mark.slow]


@dataclass(frozen=True)
class Settings:
    rounds: int = 3
    nets: tuple[str, ...] = ("a",)


BENCH = Bench("bench_x", "what it is", settings=Settings(), quick=Settings(1), handicap=True)


def ended(words: list[str], variant: str = "") -> None:
    run = BENCH.begin(words)
    run.figures["a"] = 1.5
    run.raw["steps_s"] = [0.1, 0.2]
    run.end(variant=variant)


def record(**changes: Any) -> dict[str, Any]:
    figures = {"ratio_a": 1.25, "count": 3}
    return {**run_of("python jobs/bench/x", begin(), figures, {"steps_s": [0.123456789, 0.2]}), **changes}


def test_a_quick_run_prints_what_its_file_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "raw.json"
    ended(["--quick", "--json", str(file)])
    kept = json.loads(file.read_text())
    assert problems({"bench": kept.pop("bench"), "runs": [kept]}) == []
    assert kept["figures"] == {"a": 1.5}
    assert kept["raw"] == {"settings": {"rounds": 1, "nets": ["a"]}, "steps_s": [0.1, 0.2]}
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["bench"] == "bench_x"
    with pytest.raises(ValueError, match="JSON"):
        common.final_line("bench_x", {"overhead": float("nan")})


@pytest.mark.parametrize(
    ("words", "variant", "file"),
    [
        ([], "", "x.json"),
        (["--handicap", "0"], "slow", "x-slow.json"),
        (["--quick"], "", None),
        (["--no-record"], "", None),
        (["--handicap", "0.001"], "", None),
    ],
)
def test_only_a_full_run_is_recorded(
    words: list[str], variant: str, file: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    monkeypatch.setattr(common, "ROOT", tmp_path)
    ended(words, variant)
    assert [path.name for path in tmp_path.iterdir()] == ([file] if file else [])


def test_the_newest_run_is_first_and_alone_has_raw_trials(tmp_path: Path) -> None:
    file = tmp_path / "results" / "x.json"
    keep(file, "bench_x", record())
    keep(file, "bench_x", record(figures={"ratio_a": 1.0}))
    newest, before = read(file)["runs"]
    assert (newest["figures"], newest["raw"]) == ({"ratio_a": 1.0}, {"steps_s": [0.123457, 0.2]})
    assert (before["figures"], before["raw"]) == ({"ratio_a": 1.25, "count": 3}, None)
    text = file.read_text()
    assert json.loads(text_of(json.loads(text))) == json.loads(text)
    with pytest.raises(ValueError, match="is a record of bench_x, not of bench_y"):
        keep(file, "bench_y", record())
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"source": "a page", "duration_s": None, "load": {"before": None, "after": None}, "raw": None}, ""),
        ({"figures": {"a": float("nan")}}, "figure a is nan"),
        ({"date": "yesterday"}, "date 'yesterday' is not a date"),
        ({"duration_s": None}, "duration_s is unknown, and no source is named"),
        ({"load": {}}, "load has before and after"),
        ({"raw": {}}, "the newest run has no raw trials"),
        ({"more": 1}, "the fields more are missing or too many"),
    ],
)
def test_problems_of_a_record(changes: dict[str, Any], problem: str) -> None:
    lines = "; ".join(problems({"bench": "bench_x", "runs": [record(**changes)]}))
    assert problem in lines if problem else lines == ""


def test_the_committed_records_are_valid() -> None:
    for file in records.FOLDER.glob("*.json"):
        read(file)


def test_a_leak_has_a_slope_and_a_single_high_look_has_none() -> None:
    def looks(resident_mib: list[float]) -> list[tuple[float, Look]]:
        return [(100.0 * at, Look(int(mib * (1 << 20)), 8, 3)) for at, mib in enumerate(resident_mib)]

    leaks = growth_of(looks([400 + at for at in range(9)]))
    assert leaks == Growth((1 << 20) / 100, 8 << 20, 0, 0)
    assert not leaks.flat
    assert growth_of(looks([400, 400, 404, 400, 400, 400])).flat
    assert not growth_of(looks([400, 406, 400])).flat
