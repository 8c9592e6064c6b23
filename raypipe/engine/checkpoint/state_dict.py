"""Plain tensors by their original names, out of a checkpoint of any number of stages."""

from __future__ import annotations

import os
from typing import Any

import torch

from raypipe.engine.checkpoint.find import Checkpoint, find_for_reading, open_checkpoint
from raypipe.engine.checkpoint.manifest import MANIFEST
from raypipe.engine.checkpoint.snapshot import step_folders
from raypipe.engine.checkpoint.tensor_file import TensorFile
from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError

__all__ = ["load_state_dict"]


def load_state_dict(path: str | os.PathLike[str], *, storage_filesystem: Any = None) -> dict[str, torch.Tensor]:
    """{original name: tensor} of a checkpoint, whatever the number of stages was.

    Args:
        path: a local path or a URI such as s3://bucket/runs/lm of a checkpoint ``step_...``, which must be good, or
            of a run, for its newest good one.
        storage_filesystem: a pyarrow.fs.FileSystem on which ``path`` is.

    Raises:
        CheckpointError: nothing there, incomplete or damaged; names the file.
    """
    checkpoint = _checkpoint(Place.of(path, storage_filesystem))
    state: dict[str, torch.Tensor] = {}
    for entry in checkpoint.manifest.stages:
        with TensorFile(checkpoint.files / entry.tensors.file) as file:
            for name in entry.tensors.names:
                if name not in file.tensors:
                    raise CheckpointError(f"{checkpoint.files / entry.tensors.file} changed while it was read.")
                state.setdefault(name, file.read(name))
    return state | {alias: state[name] for alias, name in checkpoint.manifest.aliases.items()}


def _checkpoint(place: Place) -> Checkpoint:
    if place.exists(MANIFEST) or not step_folders(place):
        return open_checkpoint(place)
    found, refusals = find_for_reading(place)
    if found is None:
        raise CheckpointError(f"{place} holds no complete checkpoint. {refusals[0].reason}")
    return found
