"""Asynchronous schedules and codecs on Ray actors: the same bits as in threads, stopped and gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.runtime.fleet.fleet import Fleet
from tests.prepare.test_resume import outcome
from tests.runs.test_asynchronous_life import same, trainer
from tests.runtime.on_fleet import start_on
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("shared_captures")]

STEPS = 8


@pytest.mark.parametrize(
    "mode",
    [
        {"schedule": "pipedream", "vertical_sync": True},
        {"schedule": "2bw", "max_grad_norm": 0.1, "codec_forward": "int8", "codec_backward": "bf16"},
    ],
    ids=["vertical sync", "2bw with codecs"],
)
def test_equal_to_threads(fleet: Fleet, mode: dict[str, Any], tmp_path: Path) -> None:
    trainer(tmp_path, "threads", **mode).fit(num_steps=STEPS, local=True, progress=False)
    start_on(fleet, trainer(tmp_path, "actors", **mode), STEPS).wait()
    rows, state = outcome(tmp_path / "actors")
    expected_rows, expected = outcome(tmp_path / "threads")
    assert rows == expected_rows
    assert same(state, expected)


def test_a_stop_in_the_middle_drains(fleet: Fleet, tmp_path: Path) -> None:
    mode: dict[str, Any] = {"schedule": "pipedream", "samples": 80_000, "checkpoint_interval_steps": 100_000}
    handle = start_on(fleet, trainer(tmp_path, "run", **mode), 9_000)
    wait_until(lambda: handle.status().step >= 7)
    for _ in range(5):  # an impatient user: what is under way is completed all the same
        handle.stop()
    step = len(handle.wait().records)
    assert 7 <= step < 9_000
    rows, state = outcome(tmp_path / "run")
    assert [row[0] for row in rows] == list(range(step))
    trainer(tmp_path, "told", **mode).fit(num_steps=step, local=True, progress=False)
    expected_rows, expected = outcome(tmp_path / "told")
    assert rows == expected_rows
    assert same(state, expected)
