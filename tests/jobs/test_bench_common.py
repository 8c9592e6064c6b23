"""The pure parts of the benchmarks: ideal steps, medians, gaps of a traced step, tables and the last line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jobs.lib import common
from tests import processes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("stages", "microbatches", "expected_s"), [(2, 8, 0.27), (4, 16, 0.57), (8, 32, 1.17), (1, 1, 0.03)]
)
def test_ideal_step(stages: int, microbatches: int, expected_s: float) -> None:
    assert common.ideal_seconds(stages, microbatches, 0.01, 0.02) == pytest.approx(expected_s)


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
    with pytest.raises(ValueError, match="JSON"):
        common.final_line("bench_x", {"overhead": float("nan")})


def test_the_file_holds_figures_raw_numbers_and_the_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "raw.json"
    common.finish("bench_x", {"a": 1.5}, {"steps_s": [0.1, 0.2]}, file)
    kept = json.loads(file.read_text())
    assert kept["figures"] == {"a": 1.5}
    assert kept["raw"] == {"steps_s": [0.1, 0.2]}
    assert kept["machine"]["cpus"] >= 1
    assert len(kept["machine"]["load"]) == 3
    assert kept["machine"]["versions"]["python"].startswith("3.")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["bench"] == "bench_x"


def test_arguments() -> None:
    asked = common.arguments("what it is", ["--quick", "--json", "x.json", "--handicap", "0.003"])
    assert (asked.quick, asked.json, asked.handicap) == (True, Path("x.json"), 0.003)
    with pytest.raises(SystemExit):
        common.arguments(None, ["--handicap", "-1"])


def spans(*rows: tuple[str, float, float]) -> list[dict[str, Any]]:
    return [{"action": action, "start_s": start, "end_s": end} for action, start, end in rows]


def test_gaps_of_a_step() -> None:
    found = common.stage_gaps(
        spans(
            ("0F8", 0.0, 1.0), ("0SEND_F8", 1.0, 1.5), ("0F9", 1.75, 2.75), ("0SEND_F9", 2.75, 3.0),
            ("0RECV_B8", 3.0, 5.0), ("0B8", 5.0, 7.0), ("0REDUCE_GRAD9", 7.0, 7.5), ("0STEP9", 7.5, 8.0),
            ("1RECV_F8", 0.0, 1.625), ("1F8", 1.625, 2.625), ("1B8", 2.625, 4.5), ("1SEND_B8", 4.5, 4.75),
            ("1RECV_F9", 4.75, 4.75), ("1F9", 4.75, 5.75),
        )
    )  # fmt: skip
    assert found[0].forwards == [1.0, 1.0]
    assert found[0].backwards == [2.0]
    assert found[0].gaps == [0.75, 2.25]
    assert found[0].sends == [0.5, 0.25]
    assert found[0].latencies == [0.5]  # sent at 4.5, there at 5.0, and stage 0 stood waiting
    assert found[0].tail_s == 1.0
    assert found[1].gaps == [0.0, 0.25]
    assert found[1].latencies == [0.625]  # the second one came early
    assert found[1].num_receives == 2
    shown = common.gap_table({"auto": [found], "torch": []}, 1.0, 2.0)
    assert [line.split()[0] for line in shown.splitlines()[3:]] == ["auto", "auto"]
    with pytest.raises(ValueError, match="no action"):
        common.stage_gaps(spans(("later", 0.0, 1.0)))


def test_a_handicap_must_show_as_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    assert common.handicap_seen("here", 0.003, 1.05, 1.26, 0.2)
    assert "1.2500 predicted, 1.2600 measured: seen" in capsys.readouterr().out
    assert not common.handicap_seen("here", 0.003, 1.05, 1.06, 0.2)


def test_a_table_is_aligned() -> None:
    lines = common.table("title", ("name", "value"), [["a", 1.23456], ["long name", 2]]).splitlines()
    assert lines == ["title", "name       value", "---------  -----", "a          1.235", "long name      2"]


def test_a_lone_process_sleeps_at_least_as_long_as_asked() -> None:
    forwards, backwards = common.lone_sleeps_s((0.001, 0.002), 3)
    assert len(forwards) == len(backwards) == 3
    assert min(forwards) >= 0.001
    assert min(backwards) >= 0.002


def test_it_loads_neither_torch_nor_ray() -> None:
    check = "import sys, jobs.lib.common; print(*sorted({'torch', 'ray', 'raypipe'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout.split()) == (0, [])


POOL = """
import multiprocessing, os, sys, time
from concurrent.futures import ProcessPoolExecutor
from jobs.lib.common import end_with_parent
if __name__ == "__main__":
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=end_with_parent) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        time.sleep(60)
"""


def test_the_processes_of_a_pool_end_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert processes.alive(child)
        parent.send_signal(signal.SIGKILL)
    deadline_s = time.monotonic() + 120
    while processes.alive(child):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
