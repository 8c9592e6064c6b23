"""A stage's part of a checkpoint is written behind its back, and nothing of it stays in memory."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from raypipe.engine.io.checkpoint.snapshot import ShardWriter, StageSnapshot
from raypipe.engine.io.storage import Place, PlaceError
from raypipe.errors import CheckpointError

pytestmark = pytest.mark.engine


class Snapshots:
    """Takes snapshots, and knows which tensors of theirs are alive."""

    def __init__(self) -> None:
        self.alive: list[weakref.ref[torch.Tensor]] = []

    def __call__(self) -> StageSnapshot:
        tensor = torch.ones(4)
        self.alive.append(weakref.ref(tensor))
        return StageSnapshot(0, {"weight": tensor}, None, (), {})


@pytest.mark.parametrize("fails", [False, True])
def test_no_snapshot_outlives_its_file(tmp_path: Path, fails: bool) -> None:
    snapshots = Snapshots()
    if fails:
        (tmp_path / "run").write_text("a file, so that nothing can be written below it")
    writer = ShardWriter(Place.of(tmp_path / "run"), snapshots)
    writer.begin("step_1")
    writer.begin("step_2")
    assert writer.wait("step_2", 10.0)
    gc.collect()
    assert [ref() for ref in snapshots.alive] == [None, None], "also before anybody has asked for the entries"
    for folder in ("step_1", "step_2"):
        if fails:
            with pytest.raises(PlaceError, match=f"{folder}.* failed"):
                writer.entry(folder, 10.0)
        else:
            assert writer.entry(folder, 10.0)
        assert writer.entry(folder, 0.0) is None, "an entry is told once"
    writer.close()


def test_an_error_that_is_not_of_the_place_is_told_with_the_folder(tmp_path: Path) -> None:
    writer = ShardWriter(Place.of(tmp_path), lambda: StageSnapshot(0, {"weight": "no tensor"}, None, (), {}))  # type: ignore[dict-item]
    writer.begin("step_1")
    with pytest.raises(CheckpointError, match="step_1 could not be written: "):
        writer.entry("step_1", 10.0)
    writer.close()
