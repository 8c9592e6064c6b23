"""The checkpoints of a run: find the newest good or the best one, add results to its manifest, delete the surplus.

step_0000100   loss 0.9   deleted           num_to_keep=2, by loss, "min"
step_0000200   loss 0.3   kept: best        best_checkpoint(run, "loss", "min")
step_0000300   loss 0.5   kept: second best
step_0000400   loss 0.8   kept: newest      find_checkpoint(run): every file is read and its checksum compared
step_0000500   no manifest, or a bit has flipped: refused
"""

from __future__ import annotations

import difflib
import hashlib
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from raypipe.engine.io.checkpoint.manifest import MANIFEST, MOST_BYTES, Manifest, Shard, finite, from_json, to_json
from raypipe.engine.io.checkpoint.snapshot import FOLDER, checkpoint_name, clear, step_folders
from raypipe.engine.io.checkpoint.tensor_file import CHUNK_BYTES, TensorFile
from raypipe.engine.io.storage import Place, PlaceError
from raypipe.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Complete checkpoint: its folder ``place``, and its manifest."""

    place: Place
    manifest: Manifest

    @property
    def files(self) -> Place:
        """Folder of the stages' files, which may be below ``place``; see ``files_folder``."""
        return _files(self.place, self.manifest)

    @property
    def folder(self) -> str:
        """Name of the checkpoint's folder, relative to the run's folder."""
        return checkpoint_name(self.manifest.step)


class Refusal(NamedTuple):
    """Folder of a checkpoint that was refused, with the reason. ``name`` is relative to the run's folder."""

    name: str
    reason: str


def find_checkpoint(run: Place) -> tuple[Checkpoint | None, tuple[Refusal, ...]]:
    """Find the newest good checkpoint of a run: all of its files can be read and have the right checksums.

    Returns:
        (the checkpoint, or None; the newer checkpoint folders that were refused).

    Raises:
        PlaceError: storage failed, and no good checkpoint was found.
    """
    refusals = []
    failure: PlaceError | None = None
    for step, name in reversed(step_folders(run)):
        try:
            checkpoint = open_checkpoint(run / name)
            if checkpoint.manifest.step != step:
                raise CheckpointError(f"{run / name} has the manifest of step {checkpoint.manifest.step}.")
        except CheckpointError as error:
            failure = error if isinstance(error, PlaceError) else failure
            refusals.append(Refusal(name, str(error)))
        else:
            return checkpoint, tuple(refusals)
    if failure is not None:
        raise failure
    return None, tuple(refusals)


def find_for_reading(run: Place) -> tuple[Checkpoint | None, tuple[Refusal, ...]]:
    """Return the result of ``find_checkpoint``; warn if checkpoints that are newer than its result are damaged."""
    checkpoint, refusals = find_checkpoint(run)
    damaged = [(name, reason) for name, reason in refusals if (run / name).exists(MANIFEST)]
    if checkpoint is not None and damaged:
        name, reason = damaged[0]
        warnings.warn(f"{run / name} is passed over, and {checkpoint.place} is read instead: {reason}", stacklevel=4)
    return checkpoint, refusals


def newest_step(run: Place) -> int | None:
    """Return the step of the newest checkpoint with a valid manifest; None without one. Other files are not read."""
    for step, name in reversed(step_folders(run)):
        with suppress(CheckpointError):
            if read_manifest(run / name).step == step:
                return step
    return None


def open_checkpoint(place: Place) -> Checkpoint:
    """Open the checkpoint of a folder; all of its files are read, to compare their checksums.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged; names the file.
    """
    manifest = read_manifest(place)
    files = _files(place, manifest)
    shards = [shard for entry in manifest.stages for shard in entry.shards]
    for shard in shards:  # cheap, and finds most damage
        size_bytes = files.size_bytes(shard.file)
        if size_bytes != shard.size_bytes:
            raise _damaged(files / shard.file, f"it has {size_bytes} bytes instead of {shard.size_bytes}")
    for shard in shards:
        _check_shard(files, shard)
    _check_doubles(files, manifest)
    return Checkpoint(place, manifest)


def read_manifest(place: Place) -> Manifest:
    """Read and check the manifest of a checkpoint; its files are not read.

    Raises:
        CheckpointError: the manifest is missing or damaged.
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
            raise _damaged(file, "its names differ from those in the manifest")


def _check_doubles(place: Place, manifest: Manifest) -> None:
    """Raise CheckpointError if a tensor that several stages have saved differs between their files."""
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


def _rank(manifest: Manifest, metric: str | None, mode: str) -> float:
    """Return a sort key: the best checkpoint comes last; checkpoints without the metric come first, and are equal."""
    score = manifest.metrics.get(metric) if metric else None
    if score is None:
        return float("-inf")
    return score if mode == "max" else -score


def best_checkpoint(run: Place, metric: str, mode: str) -> str:
    """Return the address of the best checkpoint of a run; of the newest one if several are equally good.

    Args:
        metric: "loss", "grad_norm", "eval_loss" or "eval_<name>" of a metric.
        mode: "max" or "min".

    Raises:
        ConfigError: ``mode`` is another text, or no checkpoint has the metric; names the metrics that exist.
        CheckpointError: the run has no checkpoint.
    """
    if mode not in ("max", "min"):
        raise ConfigError(f"mode={mode!r} is not possible: give 'max' or 'min'.")
    manifests = _manifests(run).values()
    if not manifests:
        raise CheckpointError(f"{run} has no complete checkpoint. Give the folder of a run that has saved one.")
    scored = [(name, manifest) for name, manifest in manifests if metric in _numbers(manifest)]
    if not scored:
        known = sorted({name for _, manifest in manifests for name in _numbers(manifest)})
        close = difflib.get_close_matches(metric, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"they have {', '.join(known)}."
        raise ConfigError(
            f"No checkpoint of {run} has a number {metric!r}: {hint} A checkpoint has the numbers of an evaluation at "
            "its step: let eval_interval_steps and checkpoint_interval_steps meet, or name the number in "
            "CheckpointConfig(checkpoint_score_attribute=...)."
        )
    return str(run / max(scored, key=lambda pair: (_rank(pair[1], metric, mode), pair[1].step))[0])


def _manifests(run: Place) -> dict[int, tuple[str, Manifest]]:
    """Read the valid manifests of a run, as {step: (name, manifest)}, oldest first."""
    manifests = {}
    for step, name in step_folders(run):
        with suppress(CheckpointError):  # unfinished, or damaged
            manifests[step] = name, read_manifest(run / name)
    return manifests


def _numbers(manifest: Manifest) -> dict[str, float]:
    return {name: value for name, value in manifest.metrics.items() if value is not None}


def prune(
    run: Place,
    num_to_keep: int | None,
    score_attribute: str | None = None,
    score_order: Literal["max", "min"] = "max",
) -> list[str]:
    """Delete all checkpoints but the newest one and the best ``num_to_keep``; return the names of the deleted ones.

    Folders without a manifest that are older than the newest checkpoint are deleted too: an interrupted save or
    deletion has left them. Checkpoints with a damaged manifest are kept.

    Args:
        num_to_keep: number of the best checkpoints to keep; None keeps all.
        score_attribute: metric in the manifests by which checkpoints are compared. Checkpoints without it are the
            worst. None prefers newer checkpoints.
        score_order: "max" or "min", the better value of the metric.

    Raises:
        ConfigError: num_to_keep is below 1, or score_order is another text.
        CheckpointError: storage failed.
    """
    if num_to_keep is None:
        return []
    if type(num_to_keep) is not int or num_to_keep < 1:
        raise ConfigError(f"num_to_keep={num_to_keep!r} is not possible: give an integer of at least 1, or None.")
    if score_order not in ("max", "min"):
        raise ConfigError(f"checkpoint_score_order={score_order!r} is not possible: give 'max' or 'min'.")
    complete = _manifests(run)
    if not complete:
        return []
    newest = max(complete)
    ranks = {step: _rank(manifest, score_attribute, score_order) for step, (_, manifest) in complete.items()}
    keep = {newest, *sorted(complete, key=lambda step: (ranks[step], step))[-num_to_keep:]}
    surplus = [name for step, (name, _) in complete.items() if step not in keep]
    surplus += [name for step, name in step_folders(run) if step < newest and not (run / name).exists(MANIFEST)]
    for name in sorted(surplus):
        clear(run, name)
    return sorted(surplus)


def score(checkpoint: Place, metrics: Mapping[str, float]) -> bool:
    """Add the results of an evaluation to the manifest of a checkpoint; return False if it already had them.

    Raises:
        CheckpointError: the manifest is damaged, or the place is full, forbidden or unreachable.
    """
    manifest = read_manifest(checkpoint)
    known = {**manifest.metrics, **finite(metrics)}
    if known == manifest.metrics:
        return False
    checkpoint.write_bytes(MANIFEST, to_json(replace(manifest, metrics=known)))
    return True


def checkpoint_at(place: Place, nor: str = "") -> Checkpoint:
    """Open the checkpoint in the folder ``place``, or the newest good one if ``place`` is a run's folder.

    Args:
        nor: text for the error message about other files that the caller did not find there.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged; names the file.
    """
    if place.exists(MANIFEST) or not (nor or step_folders(place)):
        return open_checkpoint(place)
    checkpoint, refusals = find_for_reading(place)
    if checkpoint is None:
        reason = f" {refusals[0].reason}" if refusals else ""
        raise CheckpointError(
            f"{place} holds no complete checkpoint{nor}.{reason} Give a run folder, or one of its checkpoints."
        )
    return checkpoint
