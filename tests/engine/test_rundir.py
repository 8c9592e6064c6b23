"""A run's events: every whole line is read, whatever lies between."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.engine.rundir import EVENTS, RunFolder, read_events
from raypipe.engine.storage import Place

pytestmark = pytest.mark.engine


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
    found = read_events(run.place)
    assert [(event["decision"], event["reason"]) for event in found] == [
        ("start", 'says {"time": 3}'),
        ("finish", "all steps done"),
    ]
