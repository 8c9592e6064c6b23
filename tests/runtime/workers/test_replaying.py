"""A stage in the middle is killed: another process does its steps again alone, and the others do not go back."""

from __future__ import annotations

import os
import socket
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from raypipe.runtime.links import socket_channel
from tests.runtime.workers.test_recovery import as_undisturbed, events, kill, reached, surviving

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("shared_captures")]

STEPS, WAIT_S = 120, 120.0


def test_the_middle_stage_is_replayed_and_nobody_goes_back(local_ray: None, tmp_path: Path) -> None:
    """With a codec, and clipping by the norm of the whole model."""
    told = {"num_stages": 3, "codec_forward": "int8", "codec_backward": "bf16", "max_grad_norm": 0.5}
    handle = surviving(tmp_path, "replayed", "noisy", **told).start(STEPS)
    reached(handle, 30)
    before = [stage["process"] for stage in handle.status().stages]
    kill(handle, 1)
    reached(handle, 60)
    status = handle.status()
    assert status.recovery == "replay", events(tmp_path / "replayed", "recovery")
    result = handle.wait(timeout_s=WAIT_S)
    after = [stage["process"] for stage in status.stages]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]
    (recovery,) = events(tmp_path / "replayed", "recovery")
    assert (recovery["kind"], recovery["redone_steps"], recovery["replaced"]) == ("replay", 0, ["Stage 1"])
    assert as_undisturbed(tmp_path, result.checkpoint, "noisy", **told) == []
    same_records(tmp_path, "replayed")


def same_records(folder: Path, run: str) -> None:
    """As the run in threads that nobody disturbed."""
    columns = ["step", "loss", "grad_norm", "lr"]
    ours, theirs = (pq.read_table(folder / name / "metrics.parquet", columns=columns) for name in (run, "alone"))
    assert ours.num_rows == STEPS
    assert ours.equals(theirs)


class Breaking:
    """Takes the place of ``_send_all`` in a stage's process: one connection breaks, once in the run."""

    def __init__(self, folder: Path) -> None:
        self._send_all, self._left, self._folder = socket_channel._send_all, 300, folder
        socket_channel._send_all = self.send

    def send(self, sock: Any, buffers: deque[memoryview]) -> None:
        self._left -= 1
        if self._left == 0:
            try:
                (self._folder / "broken").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                sock.shutdown(socket.SHUT_RDWR)
        self._send_all(sock, buffers)


def breaking_adamw(parameters: Any, *, folder: Path, here: int) -> torch.optim.Optimizer:
    """AdamW, which every stage makes in its process."""
    if os.getpid() != here and not isinstance(getattr(socket_channel._send_all, "__self__", None), Breaking):
        Breaking(folder)
    return torch.optim.AdamW(parameters, lr=1e-2)


def test_where_a_link_breaks_nobody_goes_back_and_nobody_is_replaced(local_ray: None, tmp_path: Path) -> None:
    made = surviving(tmp_path, "broken-link", "noisy", retune_interval_steps=0)
    optimizer = partial(breaking_adamw, folder=tmp_path, here=os.getpid())
    made._arguments = made._arguments._replace(optimizer=optimizer)
    result = made.start(STEPS).wait(timeout_s=WAIT_S)
    assert (tmp_path / "broken").exists()
    (recovery,) = events(tmp_path / "broken-link", "recovery")
    assert (recovery["kind"], recovery["redone_steps"], recovery["replaced"]) == ("replay", 0, []), recovery
    assert recovery["reason"] == "only links are new"
    assert as_undisturbed(tmp_path, result.checkpoint, "noisy", STEPS) == []
    same_records(tmp_path, "broken-link")
