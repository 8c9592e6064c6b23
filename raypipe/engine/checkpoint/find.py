"""Finds the newest checkpoint that is what was written; a torn or changed one is refused by name.

checkpoints/step_0000300   no manifest         refused
            step_0000200   a bit has flipped   refused
            step_0000100   good                taken
"""

from __future__ import annotations

import hashlib
import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from raypipe.engine.checkpoint.manifest import MANIFEST, MOST_BYTES, Manifest, Shard, from_json
from raypipe.engine.checkpoint.snapshot import FOLDER, checkpoint_name, step_folders
from raypipe.engine.checkpoint.tensor_file import CHUNK_BYTES, TensorFile
from raypipe.engine.storage import Place, PlaceError
from raypipe.errors import CheckpointError

__all__ = [
    "Checkpoint", "Refusal", "find_checkpoint", "find_for_reading", "newest_step", "open_checkpoint", "read_manifest",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A good checkpoint.

    Attributes:
        place: its folder.
    """

    place: Place
    manifest: Manifest

    @property
    def files(self) -> Place:
        """The folder of its files."""
        return _files(self.place, self.manifest)

    @property
    def folder(self) -> str:
        """Below the run's folder."""
        return checkpoint_name(self.manifest.step)


class Refusal(NamedTuple):
    """A folder that is not taken, and why."""

    name: str
    reason: str


def find_checkpoint(run: Place) -> tuple[Checkpoint | None, tuple[Refusal, ...]]:
    """The newest good checkpoint of a run by step, every file of which was read and compared with its checksum.

    Returns:
        The checkpoint, None where there is no good one; and the newer ones that were refused.

    Raises:
        PlaceError: nothing good was found and the place itself failed, so that nobody can tell.
    """
    refusals = []
    failure: PlaceError | None = None
    for step, name in reversed(step_folders(run)):
        try:
            found = open_checkpoint(run / name)
            if found.manifest.step != step:
                raise CheckpointError(f"{run / name} has the manifest of step {found.manifest.step}.")
        except CheckpointError as error:
            failure = error if isinstance(error, PlaceError) else failure
            refusals.append(Refusal(name, str(error)))
        else:
            return found, tuple(refusals)
    if failure is not None:
        raise failure
    return None, tuple(refusals)


def find_for_reading(run: Place) -> tuple[Checkpoint | None, tuple[Refusal, ...]]:
    """As ``find_checkpoint``, for who wants the newest weights: warns where damage makes that an older checkpoint."""
    found, refusals = find_checkpoint(run)
    damaged = [(name, reason) for name, reason in refusals if (run / name).exists(MANIFEST)]
    if found is not None and damaged:
        name, reason = damaged[0]
        warnings.warn(f"{run / name} is passed over, and {found.place} is read instead: {reason}", stacklevel=4)
    return found, refusals


def newest_step(run: Place) -> int | None:
    """Steps of the newest checkpoint by its manifest alone, whose files are not looked at; None without one."""
    for step, name in reversed(step_folders(run)):
        with suppress(CheckpointError):
            if read_manifest(run / name).step == step:
                return step
    return None


def open_checkpoint(place: Place) -> Checkpoint:
    """The checkpoint in this folder, read once from end to end.

    Raises:
        CheckpointError: it is incomplete or not what was written; names the file.
    """
    manifest = read_manifest(place)
    files = _files(place, manifest)
    shards = [shard for entry in manifest.stages for shard in entry.shards]
    for shard in shards:  # cheap, and finds most of what can be wrong
        size_bytes = files.size_bytes(shard.file)
        if size_bytes != shard.size_bytes:
            raise _damaged(files / shard.file, f"it has {size_bytes} bytes instead of {shard.size_bytes}")
    for shard in shards:
        _check_shard(files, shard)
    _check_doubles(files, manifest)
    return Checkpoint(place, manifest)


def read_manifest(place: Place) -> Manifest:
    """The manifest of a checkpoint's folder, itself checked; the files are not looked at.

    Raises:
        CheckpointError: there is none, or it is not what was written.
    """
    if place.size_bytes(MANIFEST) is None:
        raise CheckpointError(
            f"{place} holds no complete checkpoint: it has no {MANIFEST}. Give a run folder or one of its "
            f"{FOLDER}/step_* folders."
        )
    return from_json(place.read_bytes(MANIFEST, MOST_BYTES), str(place / MANIFEST))


def _files(place: Place, manifest: Manifest) -> Place:
    return place / manifest.folder if manifest.folder else place


def _check_shard(place: Place, shard: Shard) -> None:
    file = place / shard.file
    digest, size_bytes = hashlib.sha256(), 0
    with file.open_input() as opened, file.reading():
        while size_bytes <= shard.size_bytes and (piece := opened.read(CHUNK_BYTES)):
            digest.update(piece)
            size_bytes += len(piece)
    if size_bytes != shard.size_bytes or digest.hexdigest() != shard.sha256:
        raise _damaged(file, "its checksum differs")
    with TensorFile(file) as tensors:
        if tensors.tensors.keys() != set(shard.names):
            raise _damaged(file, "it holds other names than its manifest says")


def _check_doubles(place: Place, manifest: Manifest) -> None:
    """Stages may each hold a buffer that nobody changes; then all of them hold the same."""
    stored = manifest.stored
    for entry in manifest.stages:
        for name in entry.tensors.names:
            if stored[name] == entry.stage:
                continue
            with (
                TensorFile(place / entry.tensors.file) as file,
                TensorFile(place / manifest.stages[stored[name]].tensors.file) as other,
            ):
                one, two = file.read(name), other.read(name)
            same = one.dtype == two.dtype and one.shape == two.shape
            if not same or not torch.equal(one.reshape(-1).view(torch.uint8), two.reshape(-1).view(torch.uint8)):
                raise _damaged(place / entry.tensors.file, f"its {name!r} is not that of stage {stored[name]}")


def _damaged(file: Place, reason: str) -> CheckpointError:
    return CheckpointError(f"{file} is not what was written: {reason}. Use an older checkpoint.")
