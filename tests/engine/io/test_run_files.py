"""Files of a run: metrics in parts, whole at every moment, and every whole line of its events."""

from __future__ import annotations

import errno
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raypipe.engine.io import run_files as metrics
from raypipe.engine.io.run_files import (
    EVENTS,
    MetricsWriter,
    RunFolder,
    part_before,
    parts_of,
    read_events,
    records_of,
    steps_written,
    table_of,
    table_read,
)
from raypipe.engine.io.storage import Place
from raypipe.errors import CheckpointError
from raypipe.ir.report import StepRecord
from tests.checkpoints import memory_places
from tests.engine.io.checkpoint.test_crash import MemoryRun

pytestmark = pytest.mark.engine

KINDS = memory_places()
PART = 4


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "PART_STEPS", PART)


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with KINDS[request.param](tmp_path) as made:
        yield made / "run"


def record(step: int, loss: float = 0.5) -> StepRecord:
    return StepRecord(step, 8, loss, 1.0 / 3, 0.25, 0.1, 1e6, 2, "1f1b", skipped=not math.isfinite(loss))


def written(place: Place, steps: range, loss: float = 0.5) -> MetricsWriter:
    writer = MetricsWriter(place)
    writer.go_back(steps.start)
    for step in steps:
        writer.append(record(step, loss))
        writer.write()
    return writer


def stored(place: Place) -> list[tuple[int, float]]:
    """Step and loss of every row, part after part."""
    tables = [table_read(place.read_bytes(part.name), part.name) for part in parts_of(place)]
    return [(r.step, r.loss) for table in tables for r in records_of(table)]


class TestEveryPlace:
    def test_records_are_appended(self, place: Place) -> None:
        writer = written(place, range(11))
        assert stored(place) == [(step, 0.5) for step in range(11)]
        assert [part.first for part in parts_of(place)] == [0, 4, 8]
        assert [r.step for r in writer.recent] == [8, 9, 10], "the rest is not in memory"
        assert steps_written(place) == 11
        assert [entry.name for entry in place.list()] == ["metrics.parquet"], "nothing unfinished is left"

    @pytest.mark.parametrize("step", range(12))
    def test_a_run_goes_on_from_any_step(self, place: Place, step: int) -> None:
        written(place, range(11))
        again = written(place, range(step, step + 3), loss=0.25)
        known = min(step, 11)
        expected = [(s, 0.5) for s in range(known)] + [(s, 0.25) for s in range(step, step + 3)]
        assert stored(place) == expected
        again.go_back(step)
        again.append(record(step, 0.125))
        again.write()
        assert stored(place) == [*expected[:known], (step, 0.125)], "the same writer goes back too"

    def test_the_one_file_of_an_old_release_becomes_parts(self, place: Place) -> None:
        sink = pa.BufferOutputStream()
        rows = [asdict(record(step)) for step in range(10)]
        pq.write_table(pa.Table.from_pylist(rows).drop_columns(["skipped"]), sink)
        place.write_bytes("metrics.parquet", sink.getvalue())
        assert steps_written(place) == 10
        writer = MetricsWriter(place)
        writer.go_back(6)
        assert [r.step for r in writer.recent] == [4, 5]
        assert not writer.recent[0].skipped
        writer.append(record(6, 0.25))
        writer.write()
        assert stored(place) == [*((step, 0.5) for step in range(6)), (6, 0.25)]
        assert [entry.name for entry in place.list()] == ["metrics.parquet"]

    def test_parts_are_read_from_the_newest_to_the_oldest(self, place: Place) -> None:
        assert part_before(place, 5) is None
        written(place, range(11))
        for before, steps in {99: [8, 9, 10], 9: [8, 9, 10], 8: [4, 5, 6, 7], 4: [0, 1, 2, 3]}.items():
            part = part_before(place, before)
            assert part is not None
            assert [r.step for r in records_of(table_read(part, ""))] == steps
        assert part_before(place, 0) is None


@pytest.mark.parametrize("read", [pandas.read_parquet, lambda path: pq.read_table(path).to_pandas()])
def test_a_folder_is_read_as_one_table(tmp_path: Path, read: Any) -> None:
    written(Place.of(tmp_path), range(11))
    written(Place.of(tmp_path), range(9, 14), loss=math.nan)
    table = read(tmp_path / "metrics.parquet")
    assert table["step"].tolist() == list(range(14))
    assert table["skipped"].tolist() == [False] * 9 + [True] * 5
    assert table["loss"][:9].tolist() == [0.5] * 9
    assert table["loss"][9:].isna().all()


def test_numbers_come_back_to_the_bit() -> None:
    records = [record(0, 1 / 3), record(1, 5e-324), record(2, -0.0), record(1 << 40, math.inf)]
    assert list(map(repr, records_of(table_of(records)))) == list(map(repr, records))
    assert table_of([]).num_rows == 0


LONG = """
import sys
from pathlib import Path
from raypipe.engine.io.run_files import MetricsWriter
from raypipe.engine.io.storage import Place
from raypipe.ir.report import StepRecord

def resident_kib():
    return int(next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS")).split()[1])

writer = MetricsWriter(Place.of(sys.argv[1]))
writer.go_back(0)
for step in range(4000):
    writer.append(StepRecord(step, 8, step / 3, step / 7, step / 9, 0.1, step / 11, 2, "1f1b", goodput=step / 13))
    if step % 250 == 249:
        writer.write()
    if step == 999:
        early = resident_kib()
print(resident_kib() - early)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_a_process_does_not_grow_while_a_part_fills_up(tmp_path: Path) -> None:
    """Arrow's pool keeps what it freed: before it was told not to, it grew by 7 MiB between these steps."""
    done = subprocess.run([sys.executable, "-c", LONG, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 4 << 10


def test_when_it_writes(tmp_path: Path) -> None:
    now_s = 0.0
    writer = MetricsWriter(Place.of(tmp_path), clock=lambda: now_s)
    now_s = 100.0
    assert not writer.due, "there is nothing to write"
    writer.append(record(0))
    assert writer.due
    writer.write()
    for step in range(1, metrics.WRITE_STEPS):
        writer.append(record(step))
        assert not writer.due
    writer.append(record(metrics.WRITE_STEPS))
    assert writer.due, "after so many steps, however quick they are"
    writer.write()
    writer.append(record(metrics.WRITE_STEPS + 1))
    now_s += metrics.WRITE_S - 0.1
    assert not writer.due
    now_s += 0.1
    assert writer.due


def test_a_full_disk_loses_nothing_that_comes_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    writer = written(Place.of(tmp_path), range(3))
    whole = Place.write_bytes

    def full(self: Place, name: str, data: bytes, partial: str = "") -> None:
        raise CheckpointError(f"{errno.ENOSPC}: no room for {name}")

    monkeypatch.setattr(Place, "write_bytes", full)
    for step in range(3, 10):
        writer.append(record(step))
        with pytest.raises(CheckpointError, match="no room"):
            writer.write()
    assert [step for step, _ in stored(Place.of(tmp_path))] == [0, 1, 2]
    monkeypatch.setattr(Place, "write_bytes", whole)
    writer.write()
    assert [step for step, _ in stored(Place.of(tmp_path))] == list(range(10))
    assert [r.step for r in writer.recent] == [8, 9]


def old_file(place: Place) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(table_of([record(step) for step in range(10)]), sink)
    place.write_bytes("metrics.parquet", sink.getvalue())


@pytest.mark.parametrize(
    ("begin", "act"),
    [
        (lambda place: written(place, range(9)), lambda place: written(place, range(5, 10), loss=0.25)),
        (old_file, lambda place: MetricsWriter(place).go_back(6)),
    ],
    ids=["goes on", "the one file of an old release"],
)
def test_whenever_the_power_goes_no_step_is_lost_or_twice(begin: Any, act: Any) -> None:
    """A run that goes on after step 5 dies at each of its changes to the disk."""
    done, changes = False, -1
    while not done:
        run, changes = MemoryRun(), changes + 1
        begin(run.place)
        run.handler.left = changes
        try:
            act(run.place)
            done = True
        except CheckpointError:
            assert changes < 40
        run.handler.left = float("inf")
        writer = MetricsWriter(run.place)
        writer.go_back(5)
        writer.write()
        assert stored(run.place) == [(step, 0.5) for step in range(5)], changes
    assert changes > 5


def test_a_damaged_part_says_what_to_do(tmp_path: Path) -> None:
    place = Place.of(tmp_path)
    written(place, range(6))
    part = tmp_path / parts_of(place)[-1].name
    part.write_bytes(part.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"steps_0000000004.parquet cannot be read .* delete it to go on without"):
        MetricsWriter(place).go_back(6)
    part.unlink()
    MetricsWriter(place).go_back(6)
    shutil.rmtree(tmp_path / "metrics.parquet")
    assert steps_written(place) == 0


@pytest.mark.parametrize("kept", [0, 1, 12, 40])
def test_a_line_that_was_cut_short_takes_no_other_with_it(kept: int, tmp_path: Path) -> None:
    run = RunFolder(Place.of(tmp_path))
    run.event("start", 'says {"time": 3}', num_steps=7)
    whole = (tmp_path / EVENTS).read_bytes()
    run.event("stop", "somebody asked")
    cut = (tmp_path / EVENTS).read_bytes()[: len(whole) + kept]
    (tmp_path / EVENTS).write_bytes(cut)
    run.event("finish", "all steps done", step=7)
    (tmp_path / EVENTS).write_bytes((tmp_path / EVENTS).read_bytes() + b'17\n"text"\n\n{"reason": ""}\n')
    events = read_events(run.place)
    assert [(event["decision"], event["reason"]) for event in events] == [
        ("start", 'says {"time": 3}'),
        ("finish", "all steps done"),
    ]
