"""Goodput on a test's own clock, and the positions of copies for another driver."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from raypipe.engine.io.storage import Place
from raypipe.ir.report import StepRecord
from raypipe.planner.segments import Position
from raypipe.run.position import MOST_COPIES, CopyPosition, CopyPositions, Goodput
from raypipe.run.status import RunStatus

pytestmark = pytest.mark.engine


class Run:
    """Steps of a second each."""

    def __init__(self, first: int = 0) -> None:
        self.now_s = 100.0
        self.goodput = Goodput(lambda: self.now_s)
        self.goodput.begin(first)

    def step(self, step: int, *, skipped: bool = False) -> float:
        self.now_s += 1.0
        return self.goodput.done(StepRecord(step, 8, 0.5, 1.0, 1.0, 0.1, 0.0, 2, skipped=skipped))


def test_pauses_and_steps_that_are_done_again_do_not_count() -> None:
    run = Run(10)
    for step in range(10, 14):
        run.step(step)
    run.now_s += 2.0  # a recovery, which goes back to step 12
    run.goodput.roll_back(12)
    assert run.step(12) == pytest.approx(3 / 7)
    assert run.step(13) == pytest.approx(4 / 8)
    run.now_s += 2.0  # an evaluation
    assert run.step(14) == pytest.approx(5 / 11)


def test_a_run_that_goes_back_behind_its_begin_has_nothing() -> None:
    run = Run(10)
    run.step(10)
    run.goodput.roll_back(8)
    assert [run.step(8), run.step(9), run.step(10)] == pytest.approx([1 / 2, 2 / 3, 3 / 4])
    run.goodput.roll_back(9)
    assert run.step(9) == pytest.approx(2 / 5)


def test_a_step_that_is_left_out_is_no_step_further() -> None:
    run = Run()
    assert [run.step(0), run.step(1, skipped=True), run.step(2)] == pytest.approx([1.0, 1 / 2, 2 / 3])


def test_a_status_shows_no_goodput_that_is_not_known() -> None:
    record = StepRecord(3, 8, 0.5, 1.0, 0.25, 0.1, 64.0, 2)
    assert "goodput" not in str(RunStatus("run", "", "running").after(record, ()))
    assert "goodput 75%" in str(RunStatus("run", "", "running").after(replace(record, goodput=0.75), ()))


def at(step: int) -> Position:
    return Position(step, 4 * step, 1, 8 * step, step)


def test_another_driver_reads_what_was_written(tmp_path: Path) -> None:
    copies = CopyPositions(Place.of(tmp_path))
    for step in range(0, 100, 10):
        copies.add(at(step), step // 20)
    copies.forget_after(80)
    copies.write()
    found = CopyPositions(Place.of(tmp_path))
    found.read()
    assert found.steps == copies.steps == list(range(80 - 10 * (MOST_COPIES - 2), 81, 10))
    assert found[80] == CopyPosition(at(80), 4)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[{}]", b'[{"position": {"steps": 1}, "skipped": 0}]', b"[1]"])
def test_a_file_that_is_damaged_or_missing_gives_none(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "copies.json").write_bytes(content)
    copies = CopyPositions(Place.of(tmp_path))
    copies.read()
    assert copies.steps == []
