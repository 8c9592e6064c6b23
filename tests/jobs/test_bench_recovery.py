"""What bench/recovery makes of the lines that its peers write, and of parts that were measured one by one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from jobs.bench.recovery import bench
from jobs.bench.recovery.peer_net import Said, steps_said
from jobs.bench.recovery.peers import STEPS_BETWEEN, step_of_both
from jobs.lib import records

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
    file.write_text("".join([*lines, "99.0 1 99 50\n"]))
    assert step_of_both(file) is None


def test_parts_that_are_kept_are_put_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bits were equal where they were in all of them; no record while some are missing."""
    for title, equal in (("sigstop-10", 1.0), ("node-96", 0.0)):
        part: dict[str, Any] = {"date": "2026-01-01T00:00:00Z", "load": [0.0] * 3, "took_s": 1.0, "raw": None}
        figures = {"equal": equal, f"seconds_{title[:4]}": 2.0}
        (tmp_path / f"{title}.json").write_text(json.dumps({**part, "figures": figures}))
    asked = argparse.Namespace(command="", began=records.begin(), json=None, quick=False, no_record=False)
    bench.finish(tmp_path, asked)
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["figures"] == {"equal": 0.0, "seconds_sigs": 2.0, "seconds_node": 2.0}
    assert asked.no_record
