"""The stage that reads a stream is killed: the process in its place goes on where that stood, not at the begin."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.train import FailureConfig

from tests.data.test_stream import Numbers, Resumable
from tests.exactness import unequal
from tests.runs.test_given_data import trainer_of_streams as trainer
from tests.runtime.fleet.test_recovery import ENDLESS, WAIT_S, events, kill, reached, stopped
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("shared_captures")]

KILLED, MINIBATCH, LENGTH = 70, 40, 1_000_000


class Counted(Resumable):
    """Pairs of an endless pass; each process leaves a byte for each of its items."""

    def __init__(self, folder: Path) -> None:
        super().__init__(LENGTH)
        self.folder = str(folder)

    def __iter__(self) -> Iterator[Any]:
        for item in Numbers.__iter__(self):
            self.at += 1
            with Path(self.folder, str(os.getpid())).open("ab") as file:
                file.write(b".")
            yield torch.cat([item["x"].float(), item["drawn"]]) / LENGTH, item["x"][1] % 3


def test_a_stream_goes_on_in_another_process(local_ray: None, tmp_path: Path) -> None:
    """All go back; mini-batches are larger than what a reader used to remember of."""
    pulled = tmp_path / "pulled"
    pulled.mkdir()
    config = {"minibatch_size": MINIBATCH, "checkpoint_interval_steps": 1000}
    made = trainer(tmp_path, "run", Counted(pulled), config)
    made._run = SimpleNamespace(name="run", storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=-1))
    handle = made.start(ENDLESS)
    reached(handle, KILLED)
    before = handle.status().stages[0]["process"]
    kill(handle, 0)
    wait_until(lambda: events(tmp_path / "run", "recovery") != [], WAIT_S)
    reached(handle, handle.status().step + 20)
    steps, checkpoint = stopped(handle)
    after = handle.status().stages[0]["process"]
    assert after != before
    assert (pulled / str(after)).stat().st_size < steps * MINIBATCH  # what it would read from the begin
    alone = trainer(tmp_path, "alone", Counted(pulled), config).fit(steps, local=True, progress=False)
    assert unequal(checkpoint, alone.checkpoint) == []
    assert [record.loss for record in handle.wait().records] == [record.loss for record in alone.records]
