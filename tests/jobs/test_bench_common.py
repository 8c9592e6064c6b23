"""What the benchmarks share: their command line, medians, tables, and how they end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs.lib import common, records

ROOT = Path(__file__).parents[2]


def test_medians_and_quantiles() -> None:
    assert common.median([5.0, 1.0, 3.0]) == 3.0
    assert common.median([4.0, 1.0, 2.0, 3.0]) == 2.5
    values = [float(v) for v in range(10, 0, -1)]
    assert [common.quantile(values, share) for share in (0.0, 0.1, 0.5, 0.9, 0.91, 1.0)] == [1, 1, 5, 9, 10, 10]
    assert common.quantile([7.0], 0.9) == 7.0


def test_the_last_line_is_json_and_refuses_what_is_no_number() -> None:
    line = common.final_line("bench_x", {"overhead": 1.0345678})
    assert json.loads(line) == {"bench": "bench_x", "figures": {"overhead": 1.0346}}
    assert "\n" not in line
    for missed in ([], ["overhead"]):
        assert json.loads(common.final_line("check_x", {"overhead": 2.0}, missed))["missed"] == missed
    with pytest.raises(ValueError, match="JSON"):
        common.final_line("bench_x", {"overhead": float("nan")})


def test_json_holds_what_a_record_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "raw.json"
    asked = common.arguments("what it is", ["--quick", "--json", str(file)])
    common.finish("bench_x", {"a": 1.5}, {"steps_s": [0.1, 0.2]}, asked)
    kept = json.loads(file.read_text())
    assert records.problems({"bench": kept.pop("bench"), "runs": [kept]}) == []
    assert (kept["figures"], kept["raw"]) == ({"a": 1.5}, {"steps_s": [0.1, 0.2]})
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["bench"] == "bench_x"


@pytest.mark.parametrize(
    ("given", "variant", "file"),
    [
        ([], "", "x.json"),
        (["--handicap", "0"], "slow", "x-slow.json"),
        (["--quick"], "", None),
        (["--no-record"], "", None),
        (["--handicap", "0.001"], "", None),
    ],
)
def test_a_full_run_is_recorded_and_no_other(
    given: list[str], variant: str, file: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    monkeypatch.setattr(common, "ROOT", tmp_path)
    common.finish("bench_x", {"a": 1.5}, {"steps_s": [0.1]}, common.arguments(None, given, handicap=True), variant)
    assert [path.name for path in tmp_path.iterdir()] == ([file] if file else [])


def test_what_cannot_be_recorded_is_printed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(records, "FOLDER", tmp_path / "file")
    common.finish("bench_x", {"a": 1.5}, {"steps_s": [0.1]}, common.arguments(None, []))
    said = capsys.readouterr().out.splitlines()
    assert said[-2].startswith("not recorded: ")
    assert json.loads(said[-1])["figures"] == {"a": 1.5}


def test_arguments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", [str(ROOT / "jobs/bench/links/__main__.py")])
    options: dict[str, dict[str, Any]] = {
        "--emulated": {"action": "store_true"},
        "--nets": {"nargs": "+", "default": ["a"]},
        "--rounds": {"type": int, "default": 3},
        "--plot": {"type": Path},
    }
    given = ["--quick", "--json", "x.json", "--emulated", "--nets", "b", "c", "--plot", "/here"]
    asked = common.arguments("what it is", given, options=options)
    assert (asked.quick, asked.json, asked.emulated, asked.rounds) == (True, Path("x.json"), True, 3)
    assert asked.command == "python jobs/bench/links --emulated --nets b c", "what changes figures, and no path"
    assert common.arguments(None, ["--handicap", "0.003"], handicap=True).handicap == 0.003
    for refused in ("-1", "nan"):
        with pytest.raises(SystemExit):
            common.arguments(None, ["--handicap", refused], handicap=True)
    with pytest.raises(SystemExit):
        common.arguments(None, ["--handicap", "0.003"])
    assert "--handicap" in capsys.readouterr().err


def test_a_handicap_must_show_as_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    assert common.handicap_seen("here", 0.003, 1.05, 1.26, 0.2)
    assert "1.2500 predicted, 1.2600 measured: seen" in capsys.readouterr().out
    assert not common.handicap_seen("here", 0.003, 1.05, 1.06, 0.2)


def test_a_table_is_aligned() -> None:
    lines = common.table("title", ("name", "value"), [["a", 1.23456], ["long name", 2]]).splitlines()
    assert lines == ["title", "name       value", "---------  -----", "a          1.235", "long name      2"]


def test_it_loads_neither_torch_nor_ray() -> None:
    check = (
        "import sys, jobs.lib.common, jobs.lib.processes\n"
        "print(*sorted({'torch', 'ray', 'raypipe'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout.split()) == (0, [])
