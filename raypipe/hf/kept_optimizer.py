"""State of the optimizer between two calls of ``train``, which Trainer keeps.

    first train()                 second train()
    raypipe/checkpoints/  ----->  raypipe-before/  --optimizer state--> raypipe/checkpoints/step_0000000
      step_0000040                model in this process --weights-------->

The second run begins with a checkpoint of step 0, which its stages restore, also after a failure before another
checkpoint. Of the options it has the loss scale only: the others, such as the learning rate, are those of the second
call.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch

from raypipe.engine.io.checkpoint import SampleOrder, checkpoint_name, commit, open_checkpoint
from raypipe.engine.io.checkpoint.manifest import Shard, StageEntry
from raypipe.engine.io.checkpoint.tensor_file import TensorFile, write_tensors
from raypipe.engine.io.storage import Place
from raypipe.engine.optim.state import LOSS_SCALE_OPTIONS
from raypipe.errors import CheckpointError, ConfigError
from raypipe.planner.segments import Position


def begin_with(saved: Path, run: Path, weights: Mapping[str, torch.Tensor], order: SampleOrder) -> None:
    """Write the checkpoint of step 0 of a new run.

    Args:
        saved: checkpoint with the state of the optimizer.
        run: folder of the new run.
        weights: weights of the model by name, which may have changed since.
        order: settings of the new run.

    Raises:
        ConfigError: the checkpoint is gone or damaged.
    """
    try:
        checkpoint = open_checkpoint(Place.of(str(saved)))
    except CheckpointError as error:
        raise ConfigError(
            f"The state of the optimizer after the last train() cannot be read. {error} Set trainer.optimizer = None "
            "to begin with a new optimizer."
        ) from None
    place, folder = Place.of(str(run), written=True), checkpoint_name(0)
    (run / folder).mkdir(parents=True)
    files = saved / checkpoint.manifest.folder
    entries = []
    for entry in checkpoint.manifest.stages:
        for shard in entry.of_optimizer:
            shutil.copy(files / shard.file, run / folder / shard.file)
        groups = tuple(
            replace(group, options={name: x for name, x in group.options.items() if name in LOSS_SCALE_OPTIONS})
            for group in entry.groups
        )
        tensors = _with_weights(checkpoint.files, entry, place / folder, weights)
        entries.append(replace(entry, tensors=tensors, groups=groups))
    manifest = replace(
        checkpoint.manifest, step=0, position=asdict(Position()), **asdict(order), stages=tuple(entries), metrics={},
        generation=0, holder="",
    )  # fmt: skip
    commit(place, folder, manifest)


def _with_weights(files: Place, entry: StageEntry, target: Place, weights: Mapping[str, torch.Tensor]) -> Shard:
    """Write a stage's file of tensors, with the present weights in place of the saved ones."""
    with TensorFile(files / entry.tensors.file) as saved:
        tensors = {name: weights[name] if name in weights else saved.read(name) for name in entry.tensors.names}
    with target.writer(entry.tensors.file) as write:
        size_bytes, digest = write_tensors(write, tensors)
    return Shard(entry.tensors.file, size_bytes, digest, entry.tensors.names)
