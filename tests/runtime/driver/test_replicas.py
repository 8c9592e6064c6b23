"""Runs on Ray actors: the bits of threads, with replicas, weight versions and codecs, also after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.runtime.fleet.fleet import Fleet
from tests.exactness import same_bits, unequal
from tests.prepare.test_resume import outcome
from tests.runs import test_asynchronous_life, test_whole_minibatch
from tests.runs.test_replicas import told, trainer
from tests.runtime.on_fleet import start_on
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("shared_captures")]


def test_equal_to_threads_without_replicas(fleet: Fleet, tmp_path: Path) -> None:
    """2-1, 1-2, 3-1 and 2-2, each going on from the checkpoint of the one before."""
    trainer(tmp_path, "one", num_lanes=6).fit(num_steps=8, local=True, progress=False)
    for steps, replicas in ((2, [2, 1]), (4, [1, 2]), (6, [3, 1]), (8, [2, 2])):
        start_on(fleet, trainer(tmp_path, "many", num_replicas=replicas, num_lanes=6), steps).wait()
    (rows, one), (others, many) = told(tmp_path / "one"), told(tmp_path / "many")
    assert rows == others
    assert all(same_bits(tensor, many[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    "given",
    [
        {"schedule": "pipedream", "num_replicas": [2, 1], "update_interval": "per_replica", "loss_reduction": "mean"},
        {"schedule": "2bw", "num_replicas": [1, 2], "codec_forward": "int8", "codec_backward": "bf16"},
        {"schedule": "pipedream", "vertical_sync": True},
    ],
    ids=["per replica", "2bw with codecs", "vertical sync"],
)
def test_asynchronous_schedules_too(fleet: Fleet, tmp_path: Path, given: dict[str, Any]) -> None:
    """Equal to threads, which are equal to an emulator (tests/runs/test_asynchronous)."""
    trainer(tmp_path, "threads", **given).fit(num_steps=7, local=True, progress=False)
    start_on(fleet, trainer(tmp_path, "actors", **given), 7).wait()
    (rows, threads), (others, actors) = told(tmp_path / "threads"), told(tmp_path / "actors")
    assert repr(rows) == repr(others)
    assert all(same_bits(tensor, actors[name]) for name, tensor in threads.items())


@test_whole_minibatch.KINDS
def test_a_loss_over_the_whole_mini_batch(kind: Any, fleet: Fleet, tmp_path: Path) -> None:
    """With two workers of the first stage, then of the last; evaluations, and a stop half way."""
    test_whole_minibatch.trained(tmp_path, "threads", kind=kind, num_lanes=2)
    for steps, replicas in ((2, [2, 1]), (test_whole_minibatch.STEPS, [1, 2])):
        many = test_whole_minibatch.trainer(tmp_path, "actors", kind=kind, num_replicas=replicas, num_lanes=2)
        start_on(fleet, many, steps).wait()
    threads, actors = (test_whole_minibatch.outcome(tmp_path / name) for name in ("threads", "actors"))
    test_whole_minibatch.assert_same(threads, actors)


def test_a_stop_in_the_middle_drains(fleet: Fleet, tmp_path: Path) -> None:
    mode: dict[str, Any] = {"schedule": "pipedream", "samples": 80_000, "checkpoint_interval_steps": 100_000}
    handle = start_on(fleet, test_asynchronous_life.trainer(tmp_path, "run", **mode), 9_000)
    wait_until(lambda: handle.status().step >= 7)
    for _ in range(5):  # an impatient user: what is under way is completed all the same
        handle.stop()
    step = len(handle.wait().records)
    assert 7 <= step < 9_000
    rows, state = outcome(tmp_path / "run")
    assert [row[0] for row in rows] == list(range(step))
    test_asynchronous_life.trainer(tmp_path, "told", **mode).fit(num_steps=step, local=True, progress=False)
    expected_rows, expected = outcome(tmp_path / "told")
    assert rows == expected_rows
    assert unequal(state, expected) == []
