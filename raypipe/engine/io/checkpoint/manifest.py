"""Manifest of a checkpoint: the position of the run, the file of each tensor, and checksums of all files.

    manifest.json   step, position, seed, sizes            position and settings of the run
                    generation, holder                     process that saved the checkpoint
                    stages[i].tensors      {file, size_bytes, sha256, names}     parameters, buffers
                    stages[i].optimizer    likewise, "exp_avg/layer.weight"
                    stages[i].pieces       likewise, optimizer state of further replicas that step slices
                    stages[i].groups       options such as lr, and their parameters
                    stages[i].scalars      optimizer state that is not a tensor
                    sha256                 checksum of the manifest without this field

The manifest is written last, so a folder without a valid manifest is not a checkpoint. File names follow from the
numbers of the stages; other names in a manifest are refused, so that no file outside the folder can be read.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from raypipe.engine.io.checkpoint.tensor_file import parse_json, read_strictly, refuse
from raypipe.errors import CheckpointError

MANIFEST = "manifest.json"
MOST_BYTES = 1 << 28
MOST_STAGES = 4096
"""Maximum number of stages in a manifest; a longer list is refused before its entries are read."""
FORMAT = 3
WITH_PIECES = 4
"""Format of manifests with ``StageEntry.pieces``. Older releases, which do not know the field, refuse this number."""
NEW_IN_3: dict[str, Any] = {"generation": 0, "holder": ""}
POSITION = ("step", "microbatch", "epoch", "offset", "updates")


@dataclass(frozen=True, slots=True)
class Shard:
    """File of tensors: its name, its size, the SHA-256 of its bytes in hexadecimal, and the names of the tensors."""

    file: str
    size_bytes: int
    sha256: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Group of parameters with the same optimizer options.

    Attributes:
        optimizer: class name of the optimizer.
        options: options such as lr, encoded by ``tensor_file.encode``.
        parameters: names of the parameters.
    """

    optimizer: str
    options: Mapping[str, Any]
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageEntry:
    """Files and optimizer options of one stage in a checkpoint.

    Attributes:
        tensors: file of parameters and buffers.
        optimizer: file of the optimizer's state, with names "key/parameter"; None if the stage trains nothing.
        scalars: optimizer state that is not a tensor, as JSON, by parameter and key.
        pieces: optimizer files of all replicas but the first, if replicas shard the optimizer's state.
    """

    stage: int
    tensors: Shard
    optimizer: Shard | None
    groups: tuple[OptionGroup, ...]
    scalars: Mapping[str, Mapping[str, Any]]
    pieces: tuple[Shard, ...] = ()

    @property
    def shards(self) -> tuple[Shard, ...]:
        return (self.tensors, *self.of_optimizer)

    @property
    def of_optimizer(self) -> tuple[Shard, ...]:
        return () if self.optimizer is None else (self.optimizer, *self.pieces)


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """Settings that determine the samples and random keys of every step. They must be equal when a run resumes."""

    seed: int
    minibatch_size: int
    microbatch_size: int
    num_samples: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Description of a checkpoint: position of the run, files of the stages, and names of the tensors in them.

    Attributes:
        step: number of optimizer steps done.
        position: position of the run: the numbers of steps, micro-batches and updates done ("step", "microbatch",
            "updates"), and the next sample (number "offset" of "epoch").
        seed, minibatch_size, microbatch_size, num_samples: see SampleOrder.
        stages: one entry per stage, in order.
        aliases: maps further names of shared tensors to the names under which they are stored.
        metrics: metrics of the last step and of evaluations after it; None for a value that is not finite.
        versions: versions of raypipe and torch.
        generation: number of processes that have trained the run so far, see run.lease; 0 if unknown.
        holder: description of the last of these processes.
    """

    step: int
    position: Mapping[str, int]
    seed: int
    minibatch_size: int
    microbatch_size: int
    num_samples: int
    stages: tuple[StageEntry, ...]
    aliases: Mapping[str, str]
    metrics: Mapping[str, float | None]
    versions: Mapping[str, str]
    generation: int = 0
    holder: str = ""

    @property
    def folder(self) -> str:
        """Folder of the stages' files, relative to the checkpoint's folder; see ``files_folder``."""
        return files_folder(self.generation)

    @property
    def stored(self) -> dict[str, int]:
        """{name of a parameter or buffer: index of the first stage whose file holds it}."""
        return {name: entry.stage for entry in reversed(self.stages) for name in entry.tensors.names}


def file_name(stage: int, kind: str) -> str:
    """Return the name of a stage's file.

    Args:
        kind: "tensors" for stage_0.safetensors; "optimizer" or "optimizer.1" for stage_0.optimizer.1.safetensors.
    """
    return f"stage_{stage}.safetensors" if kind == "tensors" else f"stage_{stage}.{kind}.safetensors"


def files_folder(generation: int) -> str:
    """Return the folder of the stages' files, relative to the checkpoint's folder; "" for a run's first process.

    ``generation`` counts the processes that have trained the run. Each has its own folder, because two may save the
    same step before the older one notices that the newer one has taken over the run.
    """
    return f"generation_{generation}" if generation > 1 else ""


def make_manifest(
    entries: Sequence[Mapping[str, Any]],
    position: Mapping[str, int],
    order: SampleOrder,
    aliases: Mapping[str, str],
    metrics: Mapping[str, float] | None = None,
    *,
    generation: int = 0,
    holder: str = "",
) -> Manifest:
    """Create the manifest of a checkpoint.

    Args:
        entries: results of ``write_snapshot`` of every stage, on all replicas that have ShardWriters, in any order.
        position: see Manifest; ``dataclasses.asdict`` of a planner's Position.
        metrics: metrics of the step, by which ``prune`` compares checkpoints.
        aliases, generation, holder: see Manifest.

    Raises:
        CheckpointError: an entry is missing or does not fit the others.
    """
    from raypipe import __version__

    stages = (read_strictly(StageEntry, entry, "an entry") for entry in together(entries))
    manifest = Manifest(
        step=position["step"],
        position=dict(position),
        **asdict(order),
        stages=tuple(sorted(stages, key=lambda entry: entry.stage)),
        aliases=dict(aliases),
        metrics=finite(metrics or {}),
        versions={"raypipe": __version__, "torch": str(torch.__version__)},
        generation=generation,
        holder=holder,
    )
    return from_json(to_json(manifest), f"The manifest of step {manifest.step}")  # checks that it can be read


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Replace NaN and infinite numbers by None, because strict JSON has neither."""
    return {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}


def to_json(manifest: Manifest) -> bytes:
    """Return the content of manifest.json."""
    body: dict[str, Any] = asdict(manifest)
    pieces = [entry.pop("pieces") for entry in body["stages"] if not entry["pieces"]]
    body = {"format": FORMAT if len(pieces) == len(manifest.stages) else WITH_PIECES, **body}
    return json.dumps({**body, "sha256": _digest(body)}, indent=1, allow_nan=False).encode()


def from_json(data: bytes, what: str) -> Manifest:
    """Parse and check the content of manifest.json; ``what`` names the file in messages.

    Raises:
        CheckpointError: ``to_json`` cannot have written the content; names the field.
    """
    body = parse_json(data, what)
    if not isinstance(body, dict):
        raise refuse(what, "an object", body)
    number = body.get("format")
    if type(number) is not int or number not in (2, FORMAT, WITH_PIECES):
        from raypipe import __version__

        versions = body.get("versions")
        writer = versions.get("raypipe") if isinstance(versions, dict) else None
        wrote = f"raypipe {str(writer)[:40]}" if writer else "the release that wrote it"
        raise CheckpointError(
            f"{what} has format {str(number)[:20]}; this is raypipe {__version__}, which reads up to format "
            f"{WITH_PIECES}. Use {wrote}, or a later one."
        )
    digest = body.pop("sha256", None)
    if digest != _digest(body):
        raise CheckpointError(f"{what} is not what was written: its checksum differs. Use an older checkpoint.")
    body.pop("format")
    if number == 2:
        if NEW_IN_3.keys() & body.keys():
            raise refuse(what, "a manifest of format 2", sorted(body))
        body |= NEW_IN_3
    elif missing := NEW_IN_3.keys() - body.keys():
        raise refuse(what, f"a manifest with the field {min(missing)!r}", sorted(body))
    if isinstance(body.get("stages"), list) and len(body["stages"]) > MOST_STAGES:
        raise refuse(f"{what}, stages", f"a list of at most {MOST_STAGES} stages", f"{len(body['stages'])} entries")
    manifest = read_strictly(Manifest, body, what)
    _check_whole(manifest, what)
    return manifest


def check_position(manifest: Manifest, order: SampleOrder) -> None:
    """Check that a resumed run has the settings on which samples and random keys depend.

    Raises:
        CheckpointError: a setting differs; names the field and both values.
    """
    for name, value in asdict(order).items():
        before = getattr(manifest, name)
        if before != value:
            raise CheckpointError(
                f"{name} was {before} when the checkpoint after {manifest.step} steps was saved and is {value} now, so "
                f"the run would not resume at its position. Set it to {before}, or give the run another name."
            )


def _check_entry(entry: StageEntry, what: str) -> None:
    """Check a stage's file names, and that it has options and optimizer state only of parameters in its file."""
    what = f"{what}, stage {entry.stage}"
    kinds = ["tensors", "optimizer", *(f"optimizer.{replica}" for replica in range(1, 1 + len(entry.pieces)))]
    for kind, shard in zip(kinds, (entry.tensors, entry.optimizer, *entry.pieces), strict=True):
        if shard is None:
            continue
        if shard.file != file_name(entry.stage, kind):
            raise refuse(f"{what}, {kind}, file", repr(file_name(entry.stage, kind)), shard.file)
        if len(set(shard.names)) < len(shard.names):
            raise refuse(f"{what}, {kind}, names", "free of doubles", shard.names)
    trained = [name for group in entry.groups for name in group.parameters]
    if len(set(trained)) < len(trained) or not set(trained) <= set(entry.tensors.names):
        raise refuse(f"{what}, groups", "parameters of this stage, each once", trained)
    kept = {name.partition("/")[2] for shard in entry.of_optimizer for name in shard.names} | entry.scalars.keys()
    if not kept <= set(trained):
        raise refuse(f"{what}, optimizer", "state of trained parameters", sorted(kept - set(trained)))


def _check_whole(manifest: Manifest, what: str) -> None:
    for entry in manifest.stages:
        _check_entry(entry, what)
    numbers = [entry.stage for entry in manifest.stages]
    if not numbers or numbers != list(range(len(numbers))):
        raise refuse(f"{what}, stages", "an entry for every stage from 0", numbers)
    trained = [name for entry in manifest.stages for group in entry.groups for name in group.parameters]
    if len(set(trained)) < len(trained):
        doubles = [name for name, times in Counter(trained).items() if times > 1]
        raise refuse(f"{what}, groups", "every parameter once", doubles)
    stored = manifest.stored
    if not set(manifest.aliases.values()) <= stored.keys() or stored.keys() & manifest.aliases.keys():
        raise refuse(f"{what}, aliases", "further names of stored tensors", manifest.aliases)
    if manifest.position.keys() != set(POSITION) or manifest.position["step"] != manifest.step:
        raise refuse(f"{what}, position", f"that of step {manifest.step}", manifest.position)
    counts = {"minibatch_size": 1, "microbatch_size": 1, "num_samples": 1, "generation": 0}
    low = {name: getattr(manifest, name) for name, least in counts.items() if getattr(manifest, name) < least}
    low |= {f"position, {name}": count for name, count in manifest.position.items() if count < 0}
    for name, count in low.items():
        raise refuse(f"{what}, {name}", "a count", count)


def _digest(body: Mapping[str, Any]) -> str:
    """Compute the SHA-256 of JSON content, written with sorted keys and without spaces, in hexadecimal."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def together(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge the entries of a stage's replicas into the entry of the first replica; return one entry per stage.

    Args:
        entries: results of ``write_snapshot`` on every stage and replica, in any order.

    Raises:
        CheckpointError: the first replica of a stage has no entry.
    """
    leading = [dict(entry) for entry in entries if not entry.get("replica")]
    by_stage = {entry.get("stage"): entry for entry in leading}
    further = [entry for entry in entries if entry.get("replica")]
    for entry in sorted(further, key=lambda entry: (entry["stage"], entry["replica"])):
        of_stage = by_stage.get(entry["stage"])
        if of_stage is None:
            raise CheckpointError(
                f"Replica {entry['replica']} of stage {entry['stage']} wrote its part, and the first one did not."
            )
        of_stage["pieces"] = [*of_stage.get("pieces", ()), entry["optimizer"]]
        of_stage["scalars"] = {**of_stage["scalars"], **entry["scalars"]}
    for entry in leading:
        entry.pop("replica", None)
    return leading
