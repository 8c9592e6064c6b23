"""What bench/recovery makes of the lines that its peers write, and of parts that were measured one by one."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from jobs.bench.recovery import bench
from jobs.bench.recovery.peer_net import Said, steps_said
from jobs.bench.recovery.peers import STEPS_BETWEEN, step_of_both

pytestmark = pytest.mark.ray


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    file = tmp_path / "steps"
    assert steps_said(file) == []
    file.write_text("1.5 0 77 3\n2.5 1 7")
    assert steps_said(file) == [Said(1.5, 0, 77, 3)]


def test_two_workers_train_when_both_have_done_some_steps_in_the_same_processes(tmp_path: Path) -> None:
    file = tmp_path / "steps"
    lines = [f"{step / 2} {rank} {70 + rank} {step}\n" for step in range(2 * STEPS_BETWEEN) for rank in (0, 1)]
    file.write_text("".join(lines[:STEPS_BETWEEN]))
    assert step_of_both(file) is None
    file.write_text("".join(lines))
    assert step_of_both(file) == 0.5
    assert step_of_both(file, {99}) == 0.5
    assert step_of_both(file, {71, 99}) is None, "lines of one that was killed are no news"
    file.write_text("".join([*lines, "99.0 1 99 50\n"]))
    assert step_of_both(file) is None


def test_parts_are_put_together_and_some_of_them_make_no_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits were equal where they were in all of them; a part that is kept is not measured again."""
    measured = []

    def measure(name: str, equal: float, trials: int) -> bench.Found:
        measured.append(name)
        return bench.Found({"equal": equal, "lost_steps": 0.0, f"seconds_{name}": float(trials)}, [])

    made = [bench.Part(name, 96, "", partial(measure, name, equal)) for name, equal in (("node", 0.0), ("resize", 1.0))]
    monkeypatch.setattr(bench, "parts", lambda: [*made, bench.Part("sigkill", 10, "warm", partial(measure, "no", 1.0))])
    words = ["bench", "--part", "node", "resize", "--trials", "3", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    for _ in range(2):
        bench.main()
        said = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert said["figures"] == {"equal": 0.0, "lost_steps": 0.0, "seconds_node": 3.0, "seconds_resize": 3.0}
    assert measured == ["node", "resize"]
