"""Checkpoints that cannot be saved are told when the first one fails, and to whoever waits for one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from raypipe.api.handle import RunHandle
from raypipe.errors import CheckpointError
from tests.runtime.run.test_planning import trainer
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]


def said(handle: RunHandle, words: str) -> Any:
    """Whether the run says so at this moment; what it says is gone with the next step, so it is to be slow."""
    return lambda: words in handle.status().message


def test_a_place_that_is_blocked_is_told_at_once_and_so_is_its_coming_back(tmp_path: Path) -> None:
    handle = trainer(tmp_path, "run", "mlp", 0.02, checkpoint_interval_steps=8).start(10**6, local=True)
    wait_until(lambda: handle.status().step > 0)
    blocked = tmp_path / "run" / "checkpoints"
    blocked.write_text("no folder")
    wait_until(said(handle, "The checkpoint after 8 steps was not saved"))
    assert handle.status().message.endswith("Training goes on.")
    wait_until(lambda: "after 16 steps" in handle.status().checkpoint_error)
    with pytest.raises(CheckpointError, match=r"The checkpoint after \d+ steps was not saved: "):
        handle.checkpoint(timeout_s=60.0)
    blocked.unlink()
    wait_until(said(handle, "Checkpoints are saved again"))
    assert handle.status().checkpoint_error == ""
    assert handle.checkpoint(timeout_s=60.0)
    handle.stop()
    assert Path(handle.wait(timeout_s=60.0).checkpoint).is_dir()
    shutil.rmtree(blocked)
