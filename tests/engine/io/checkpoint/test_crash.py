"""Complete or absent: whenever the power goes while checkpoints are written or deleted, a good one is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsspec
import pyarrow.fs
import pytest

from raypipe.engine.io.checkpoint import checkpoint_name, find_checkpoint, prune
from raypipe.engine.io.storage import Place
from raypipe.errors import CheckpointError
from tests.checkpoints import small_checkpoint


class FailingHandler(pyarrow.fs.FSSpecHandler):
    """A file system in memory that stops for good after so many changes; the last write is torn.

    Attributes:
        left: changes that still succeed.
    """

    left: float = float("inf")

    def _change(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError("the power is gone")

    def create_dir(self, path: str, recursive: bool) -> None:
        super().create_dir(path, recursive)  # changes nothing that anybody reads

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        try:
            self._change()
        except OSError:
            if self.left == -1:  # some of the bytes are there
                with self.fs.open(path, "wb") as file:
                    file.write(b"torn")
            raise
        return super().open_output_stream(path, metadata)

    def move(self, src: str, dest: str) -> None:
        self._change()
        super().move(src, dest)

    def delete_file(self, path: str) -> None:
        self._change()
        super().delete_file(path)

    def delete_dir(self, path: str) -> None:
        """File by file, as most places do."""
        for name in self.fs.find(path):
            self.delete_file(name)
        super().delete_dir(path)


class MemoryRun:
    """A run in a memory of its own.

    Attributes:
        place: with a failing disk below it.
    """

    def __init__(self) -> None:
        filesystem = fsspec.filesystem("memory", skip_instance_cache=True)
        filesystem.store, filesystem.pseudo_dirs = {}, [""]
        self.handler = FailingHandler(filesystem)
        self.place = Place.of("/run", pyarrow.fs.PyFileSystem(self.handler))

    def newest(self) -> int:
        self.handler.left = float("inf")
        checkpoint, _ = find_checkpoint(self.place)
        assert checkpoint is not None
        return checkpoint.manifest.step


def after_every_change(prepare: Callable[[Place], None], act: Callable[[Place], None]) -> list[int]:
    """The newest good checkpoint if the power goes after 0, 1, 2, ... changes of ``act``, until it ends."""
    found = []
    for changes in range(100):
        run = MemoryRun()
        prepare(run.place)
        run.handler.left = changes
        try:
            act(run.place)
        except CheckpointError:
            found.append(run.newest())
        else:
            return [*found, run.newest()]
    raise AssertionError("it never ends")


def save(*steps: int) -> Callable[[Place], None]:
    def act(place: Place) -> None:
        for step in steps:
            small_checkpoint(place, step, scale=float(step))

    return act


@pytest.mark.slow
def test_while_saving() -> None:
    steps = after_every_change(save(1), save(2))
    assert steps == sorted(steps)
    assert len(steps) == 11  # four shards and a manifest, each written and moved
    assert (steps.count(1), steps[-1]) == (10, 2)


@pytest.mark.slow
def test_while_saving_over_one_that_was_refused() -> None:
    def torn(place: Place) -> None:
        save(1, 3)(place)
        (place / checkpoint_name(3)).write_bytes("stage_0.safetensors", b"torn")

    assert set(after_every_change(torn, save(3))) == {1, 3}
    assert set(after_every_change(torn, save(2))) == {1, 2}


@pytest.mark.slow
def test_while_deleting() -> None:
    def remove(place: Place) -> None:
        prune(place, 1)

    steps = after_every_change(save(1, 2, 3), remove)
    assert set(steps) == {3}
    assert len(steps) > 10
