"""What users see of a run is the same however many steps it has: the last from memory, the others from its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.api import handle
from raypipe.api.handle import RunHandle
from raypipe.api.result import BLOCK, Records
from raypipe.engine.io import run_files as metrics
from raypipe.engine.io.run_files import MetricsWriter, part_before, table_of
from raypipe.engine.io.storage import Place
from raypipe.errors import StageError
from raypipe.ir.report import StepRecord
from raypipe.ir.timeline import Timeline
from raypipe.run import journal
from raypipe.run.journal import Journal, News
from raypipe.run.spec import Outcome

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

KEPT = 6


def record(step: int, loss: float = 0.5) -> StepRecord:
    return StepRecord(step, 8, loss, 1.0, 0.25, 0.1, 0.0, 2)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and parts of a few steps."""
    monkeypatch.setattr(metrics, "PART_STEPS", 4)
    monkeypatch.setattr(metrics, "WRITE_STEPS", 3)
    monkeypatch.setattr(journal, "KEPT_RECORDS", KEPT)
    monkeypatch.setattr(handle, "KEPT_RECORDS", KEPT)


class Run:
    """A run by hand: its journal, its folder, and a connection to both.

    Attributes:
        asked: parts that were asked for.
    """

    def __init__(self, folder: Path) -> None:
        self.place = Place.of(folder)
        self.journal = Journal("by-hand", str(self.place))
        self.writer = MetricsWriter(self.place)
        self.gone = False
        self.asked = 0

    def step(self, step: int, loss: float = 0.5) -> None:
        self.writer.append(record(step, loss))
        self.journal.step(record(step, loss), (), ())
        if self.writer.due:
            self.writer.write()

    def news(self, since: int, wait_s: float) -> News:
        return self.journal.news(since, wait_s)

    def part_before(self, step: int) -> bytes | None:
        self.asked += 1
        if self.gone:
            raise StageError("the driver is gone")
        return part_before(self.place, step)

    def stop(self, reason: str) -> None: ...

    def checkpoint(self) -> None: ...

    def predicted(self) -> Timeline | None:
        return None

    def close(self) -> None:
        self.gone = True


def test_records_are_a_sequence() -> None:
    made = [record(step, step / 3) for step in range(2 * BLOCK + 5)]
    records = Records(table_of(made))
    assert (len(records), records[0], records[-1], records[BLOCK]) == (len(made), made[0], made[-1], made[BLOCK])
    assert list(records) == made
    assert records == tuple(made)
    assert records[BLOCK - 2 : BLOCK + 2] == tuple(made[BLOCK - 2 : BLOCK + 2])
    assert records[2:-1] == tuple(made[2:-1])
    assert records[::-4096] == tuple(made[::-4096])
    assert made[7] in records
    assert repr(records) == "<records of 8197 steps>"
    assert not Records(table_of([]))
    with pytest.raises(IndexError):
        records[len(made)]


@pytest.mark.usefixtures("small")
class TestHandle:
    def test_old_steps_come_from_the_folder(self, tmp_path: Path) -> None:
        run = Run(tmp_path)
        seen = RunHandle("by-hand", run)
        for step in range(KEPT):
            run.step(step)
        assert seen.metrics()["step"].tolist() == list(range(KEPT))
        assert run.asked == 0, "nothing is read that is in memory"
        for step in range(KEPT, 30):
            run.step(step)
            seen.status()
        assert seen.metrics()["step"].tolist() == list(range(30))
        assert RunHandle("by-hand", run).metrics()["step"].tolist() == list(range(30)), (
            "who attaches late sees the same"
        )

    @pytest.mark.parametrize("back", [28, 25, 17, 0])
    def test_a_run_that_goes_back_shows_every_step_once(self, tmp_path: Path, back: int) -> None:
        run = Run(tmp_path)
        early, late = RunHandle("by-hand", run), RunHandle("by-hand", run)
        for step in range(30):
            run.step(step)
            early.status()
        run.writer.go_back(back)
        for step in range(back, 32):
            run.step(step, loss=0.25)
        expected = [0.5] * back + [0.25] * (32 - back)
        for seen in (early, late):
            assert seen.metrics()["step"].tolist() == list(range(32))
            assert seen.metrics()["loss"].tolist() == expected

    @pytest.mark.parametrize("let_go", [False, True])
    def test_the_result_has_every_step(self, tmp_path: Path, let_go: bool) -> None:
        run = Run(tmp_path)
        for step in range(30):
            run.step(step)
        run.writer.write()
        run.journal.end(Outcome((), "", 30), None)
        run.gone = let_go
        result = RunHandle("by-hand", run).wait(timeout_s=10.0)
        (tmp_path / "metrics.parquet").rename(tmp_path / "elsewhere")
        assert [r.step for r in result.records] == list(range(30))
        assert result.metrics["step"] == 30
        assert (result.metrics["tokens"], result.metrics["tokens_per_s"], result.metrics["goodput"]) == (None,) * 3
        assert result.metrics_dataframe["loss"].tolist() == [0.5] * 30
