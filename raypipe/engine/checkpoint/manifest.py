"""The manifest: what a checkpoint is, where each tensor lies, and a checksum of everything.

    manifest.json   step, position, seed, sizes            what the run was
                    generation, holder                     who trained it then
                    stages[i].tensors      {file, size_bytes, sha256, names}     parameters, buffers
                    stages[i].optimizer    likewise, "exp_avg/layer.weight"
                    stages[i].pieces       likewise, of further replicas that hold slices of it (``sliced``)
                    stages[i].groups       options such as lr, and whose they are
                    stages[i].scalars      optimizer state that is no tensor
                    sha256                 of all the rest

It is written last, so a folder without a valid one is not a checkpoint. Files are named by their stage's
number, never by what the manifest says, so nothing outside the folder can be read.
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

from raypipe.engine.checkpoint.fields import count, fields, items, mapping, names, refuse, text
from raypipe.engine.checkpoint.sliced import together
from raypipe.engine.checkpoint.values import parse_json
from raypipe.errors import CheckpointError

__all__ = [
    "MANIFEST", "Manifest", "OptionGroup", "Shard", "StageEntry", "check_position", "file_name", "files_folder",
    "finite", "from_json", "make_manifest", "parse_entry", "parse_group", "to_json",
]  # fmt: skip

MANIFEST = "manifest.json"
MOST_BYTES = 1 << 28
MOST_STAGES = 4096
"""No pipeline has more; a manifest that says so is refused before it is looked at any further."""
FORMAT = 3
WITH_PIECES = 4
"""Releases that know nothing of pieces would read a part of the state for all of it."""
NEW_IN_3: dict[str, Any] = {"generation": 0, "holder": ""}
POSITION = ("step", "microbatch", "epoch", "offset", "updates")


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of tensors: its size, the SHA-256 of its bytes, the names of the tensors."""

    file: str
    size_bytes: int
    sha256: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """Parameters with the same options.

    Attributes:
        optimizer: name of its class.
        options: lr and the like, as JSON (see ``values``).
    """

    optimizer: str
    options: Mapping[str, Any]
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageEntry:
    """What one stage wrote.

    Attributes:
        optimizer: its state, by "key/parameter"; None where nothing is trained.
        scalars: state that is no tensor, as JSON, by parameter and key.
        pieces: files of further replicas, where replicas share out the state of the optimizer.
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
class Manifest:
    """A whole checkpoint.

    Attributes:
        step: optimizer steps done.
        position: where the run stands: step, microbatch, updates (all done so far), and the next sample is number
            ``offset`` of ``epoch``.
        seed, minibatch_size, microbatch_size, num_samples: what the position means something with only.
        stages: one entry each.
        aliases: further names of shared tensors -> the names that they are stored under.
        metrics: of the last step; None where a number was not finite.
        versions: of raypipe and torch.
        generation: how many processes had trained the run one after the other, see runtime.lease; 0 where nobody knows.
        holder: the last of them, in words.
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
        """Where the files are, below the checkpoint's own folder; see ``files_folder``."""
        return files_folder(self.generation)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def stored(self) -> dict[str, int]:
        """The stage whose file holds each parameter and buffer; the first, where several hold a constant buffer."""
        return {name: entry.stage for entry in reversed(self.stages) for name in entry.tensors.names}


def file_name(stage: int, kind: str) -> str:
    """stage_0.safetensors for "tensors", stage_0.optimizer.safetensors for "optimizer", "optimizer.1" of replica 1."""
    return f"stage_{stage}.safetensors" if kind == "tensors" else f"stage_{stage}.{kind}.safetensors"


def files_folder(generation: int) -> str:
    """Below the checkpoint's folder; empty for the first holder of a run.

    Two holders that save the same step, one of which has lost the run and does not know it yet, must not write into
    each other's files.
    """
    return f"generation_{generation}" if generation > 1 else ""


def make_manifest(
    step: int,
    entries: Sequence[Mapping[str, Any]],
    *,
    position: Mapping[str, int],
    seed: int,
    minibatch_size: int,
    microbatch_size: int,
    num_samples: int,
    aliases: Mapping[str, str],
    metrics: Mapping[str, float] | None = None,
    generation: int = 0,
    holder: str = "",
) -> Manifest:
    """The manifest of what all stages wrote.

    Args:
        entries: of ``write_snapshot`` on every stage, and on all replicas that hold slices, in any order.
        position: see Manifest; ``dataclasses.asdict`` of a planner's Position.
        metrics: of the step, for ``prune``.
        generation, holder: see Manifest.

    Raises:
        CheckpointError: an entry is missing or does not fit the others.
    """
    from raypipe import __version__

    manifest = Manifest(
        step=step,
        position=dict(position),
        seed=seed,
        minibatch_size=minibatch_size,
        microbatch_size=microbatch_size,
        num_samples=num_samples,
        stages=tuple(sorted((parse_entry(e, "an entry") for e in together(entries)), key=lambda entry: entry.stage)),
        aliases=dict(aliases),
        metrics=finite(metrics or {}),
        versions={"raypipe": __version__, "torch": str(torch.__version__)},
        generation=generation,
        holder=holder,
    )
    return from_json(to_json(manifest), f"The manifest of step {step}")  # what is written can be read


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """As a manifest holds them: JSON has no number that is not finite."""
    return {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}


def to_json(manifest: Manifest) -> bytes:
    """The file's content."""
    body: dict[str, Any] = asdict(manifest)
    pieces = [entry.pop("pieces") for entry in body["stages"] if not entry["pieces"]]
    body = {"format": FORMAT if len(pieces) == len(manifest.stages) else WITH_PIECES, **body}
    return json.dumps({**body, "sha256": _digest(body)}, indent=1, allow_nan=False).encode()


def from_json(data: bytes, what: str) -> Manifest:
    """Read a file's content.

    Args:
        what: is read, for the message.

    Raises:
        CheckpointError: it is not what ``to_json`` wrote; names the field.
    """
    found = mapping(parse_json(data, what), what)
    number = found.get("format")
    if type(number) is not int or number not in (2, FORMAT, WITH_PIECES):
        shown = str(found.get("format"))[:20]
        reads = f"this release reads {WITH_PIECES}"
        raise CheckpointError(f"{what} has format {shown}; {reads}. Use the release that wrote it.")
    digest = found.pop("sha256", None)
    if digest != _digest(found):
        raise CheckpointError(f"{what} is not what was written: its checksum differs. Use an older checkpoint.")
    added = NEW_IN_3 if number == 2 else {}
    fields(found, what, ("format", *(name for name in Manifest.__slots__ if name not in added)))
    found |= added
    manifest = Manifest(
        step=count(found["step"], f"{what}, step"),
        position=_position(found["position"], what),
        seed=count(found["seed"], f"{what}, seed", least=None),
        minibatch_size=count(found["minibatch_size"], f"{what}, minibatch_size", least=1),
        microbatch_size=count(found["microbatch_size"], f"{what}, microbatch_size", least=1),
        num_samples=count(found["num_samples"], f"{what}, num_samples", least=1),
        stages=_stages(found["stages"], f"{what}, stages"),
        aliases=_texts(found["aliases"], f"{what}, aliases"),
        metrics=_metrics(found["metrics"], f"{what}, metrics"),
        versions=_texts(found["versions"], f"{what}, versions"),
        generation=count(found["generation"], f"{what}, generation"),
        holder=text(found["holder"], f"{what}, holder"),
    )
    _check_whole(manifest, what)
    return manifest


def check_position(
    manifest: Manifest, *, seed: int, minibatch_size: int, microbatch_size: int, num_samples: int
) -> None:
    """Refuse to go on where the samples or their random keys would be others than in one run without a break.

    Raises:
        CheckpointError: names the field and both values.
    """
    now = {
        "seed": seed,
        "minibatch_size": minibatch_size,
        "microbatch_size": microbatch_size,
        "num_samples": num_samples,
    }
    for name, value in now.items():
        before = getattr(manifest, name)
        if before != value:
            raise CheckpointError(
                f"{name} was {before} when the checkpoint after {manifest.step} steps was saved and is {value} now, so "
                f"the run would not go on where it stood. Set it to {before}, or give the run another name."
            )


def parse_entry(found: Any, what: str) -> StageEntry:
    """One stage's entry from its JSON.

    Raises:
        CheckpointError: names the field.
    """
    found = {"pieces": [], **mapping(found, what)}
    fields(found, what, StageEntry.__slots__)
    stage = count(found["stage"], f"{what}, stage")
    what = f"{what}, stage {stage}"
    tensors = _shard(found["tensors"], f"{what}, tensors", file_name(stage, "tensors"))
    given = found["optimizer"]
    optimizer = None if given is None else _shard(given, f"{what}, optimizer", file_name(stage, "optimizer"))
    groups = tuple(parse_group(group, f"{what}, groups") for group in items(found["groups"], f"{what}, groups"))
    scalars = {
        name: mapping(values, f"{what}, scalars")
        for name, values in mapping(found["scalars"], f"{what}, scalars").items()
    }
    trained = [name for group in groups for name in group.parameters]
    if len(set(trained)) < len(trained) or not set(trained) <= set(tensors.names):
        raise refuse(f"{what}, groups", "parameters of this stage, each once", trained)
    pieces = tuple(
        _shard(piece, f"{what}, pieces", file_name(stage, f"optimizer.{replica}"))
        for replica, piece in enumerate(items(found["pieces"], f"{what}, pieces"), 1)
    )
    entry = StageEntry(stage, tensors, optimizer, groups, scalars, pieces)
    kept = {name.partition("/")[2] for shard in entry.of_optimizer for name in shard.names} | scalars.keys()
    if not kept <= set(trained):
        raise refuse(f"{what}, optimizer", "state of trained parameters", sorted(kept - set(trained)))
    return entry


def _stages(found: Any, what: str) -> tuple[StageEntry, ...]:
    entries = items(found, what)
    if len(entries) > MOST_STAGES:
        raise refuse(what, f"a list of at most {MOST_STAGES} stages", f"{len(entries)} entries")
    return tuple(parse_entry(entry, what) for entry in entries)


def _check_whole(manifest: Manifest, what: str) -> None:
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
    if manifest.position["step"] != manifest.step:
        raise refuse(f"{what}, position", f"that of step {manifest.step}", manifest.position)


def _shard(found: Any, what: str, file: str) -> Shard:
    fields(found, what, Shard.__slots__)
    if found["file"] != file:
        raise refuse(f"{what}, file", repr(file), found["file"])
    digest = text(found["sha256"], f"{what}, sha256")
    return Shard(file, count(found["size_bytes"], f"{what}, size_bytes"), digest, names(found["names"], what))


def parse_group(found: Any, what: str) -> OptionGroup:
    """One group from its JSON.

    Raises:
        CheckpointError: names the field.
    """
    fields(found, what, OptionGroup.__slots__)
    optimizer = text(found["optimizer"], f"{what}, optimizer")
    return OptionGroup(optimizer, mapping(found["options"], f"{what}, options"), names(found["parameters"], what))


def _position(found: Any, what: str) -> dict[str, int]:
    fields(found, f"{what}, position", POSITION)
    return {name: count(found[name], f"{what}, position, {name}") for name in POSITION}


def _texts(found: Any, what: str) -> dict[str, str]:
    return {name: text(value, what) for name, value in mapping(found, what).items()}


def _metrics(found: Any, what: str) -> dict[str, float | None]:
    values = mapping(found, what)
    for value in values.values():
        if value is not None and type(value) not in (int, float):
            raise refuse(what, "numbers", value)
    return values


def _digest(body: Mapping[str, Any]) -> str:
    """Of the content, not of its spelling: keys in order, no spaces."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
