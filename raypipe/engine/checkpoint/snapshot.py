"""A stage between two steps, copied and written: by name, without what other stages own.

take_snapshot    copies in host memory; all that a step waits for
write_snapshot   files with checksums, in the background; returns the stage's entry
commit           the manifest, once every stage has written: from now on it counts
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from raypipe.engine.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    OptionGroup,
    Shard,
    StageEntry,
    file_name,
    from_json,
    to_json,
)
from raypipe.engine.checkpoint.sliced import name_in_file
from raypipe.engine.checkpoint.stream_mark import write_mark
from raypipe.engine.checkpoint.tensor_file import write_tensors
from raypipe.engine.checkpoint.tensor_table import check_storable
from raypipe.engine.checkpoint.values import encode
from raypipe.engine.crossing import Crossing
from raypipe.engine.data.stream import Mark
from raypipe.engine.device import CPU, Crosses
from raypipe.engine.replicas.slices import Part, Slices
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import StageState, owned_tensors
from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError

__all__ = [
    "FOLDER",
    "REFUSED",
    "OptimizerParts",
    "StageSnapshot",
    "checkpoint_name",
    "clear",
    "commit",
    "optimizer_parts",
    "step_folders",
    "take_snapshot",
    "write_snapshot",
]

FOLDER = "checkpoints"
REFUSED = f"{MANIFEST}.refused"
_STEP = re.compile(r"step_([0-9]{7,18})")


@dataclass(frozen=True, slots=True)
class StageSnapshot:
    """Copies of all that a stage owns.

    Attributes:
        tensors: parameters that this stage is the first to hold, and persistent buffers, by name.
        optimizer: tensors by "key/parameter"; None where the stage trains nothing.
        groups, scalars: see StageEntry.
        mark: of the stream that it reads; None where it reads none.
        replica: that wrote it, of those that share out the optimizer's state; the first one speaks for the stage.
    """

    stage: int
    tensors: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor] | None
    groups: tuple[OptionGroup, ...]
    scalars: Mapping[str, Mapping[str, Any]]
    mark: Mark | None = None
    replica: int = 0

    @property
    def size_bytes(self) -> int:
        """Of the copies."""
        held = (*self.tensors.values(), *(self.optimizer or {}).values())
        return sum(tensor.numel() * tensor.dtype.itemsize for tensor in held)


def checkpoint_name(step: int) -> str:
    """Where below the run's folder the checkpoint after ``step`` steps lies."""
    return f"{FOLDER}/step_{step:07d}"


def step_folders(run: Place) -> list[tuple[int, str]]:
    """(step, name below the run's folder) of everything that may be a checkpoint, oldest first."""
    matches = [(_STEP.fullmatch(entry.name), entry) for entry in run.list(FOLDER)]
    return sorted((int(match[1]), f"{FOLDER}/{entry.name}") for match, entry in matches if match and entry.is_folder)


def take_snapshot(
    program: StageProgram,
    state: StageState,
    persistent: frozenset[str],
    crossing: Crossing | None = None,
    mark: Callable[[], Mark | None] = lambda: None,
) -> StageSnapshot:
    """Copy what this stage owns, between two steps.

    Args:
        persistent: names of parameters and buffers that belong to a checkpoint.
        crossing: from the device that computes; None for the CPU.
        mark: where the stream goes on that the stage reads.

    Raises:
        CheckpointError: something of the optimizer's can be neither a tensor nor JSON; names its key.
    """
    replica = 0 if state.slices is None else state.slices.replica
    owned = owned_tensors(program, state, persistent)
    crossing = crossing or Crossing(CPU)
    tensors = _copies(owned, crossing) if not replica else {}
    if state.optimizer is None:
        return StageSnapshot(program.index, tensors, None, (), {}, mark())
    names = {id(parameter): name for name, parameter in state.parameters.items()}
    found = optimizer_parts(state.optimizer, names, owned, state.slices)
    kept = _copies(found.tensors, crossing)
    groups = found.groups if not replica else ()
    return StageSnapshot(program.index, tensors, kept, groups, found.scalars, mark() if not replica else None, replica)


def write_snapshot(place: Place, folder: str, snapshot: StageSnapshot) -> dict[str, Any]:
    """Write one stage's files; returns its entry for ``make_manifest``, which is JSON.

    Args:
        place: the run's folder.
        folder: of the checkpoint, below it; see ``checkpoint_name``.

    Raises:
        CheckpointError: the place is full, forbidden or unreachable.
    """
    stage, target = snapshot.stage, place / folder
    if snapshot.replica:
        assert snapshot.optimizer is not None
        piece = _write(target, file_name(stage, f"optimizer.{snapshot.replica}"), snapshot.optimizer)
        told = {"stage": stage, "replica": snapshot.replica, "scalars": snapshot.scalars}
        return {**told, "optimizer": asdict(piece, dict_factory=_jsonable)}
    tensors = _write(target, file_name(stage, "tensors"), snapshot.tensors)
    optimizer = None
    if snapshot.optimizer is not None:
        optimizer = _write(target, file_name(stage, "optimizer"), snapshot.optimizer)
    if snapshot.mark is not None:
        write_mark(target, stage, snapshot.mark)
    return asdict(StageEntry(stage, tensors, optimizer, snapshot.groups, snapshot.scalars), dict_factory=_jsonable)


def commit(place: Place, folder: str, manifest: Manifest) -> None:
    """Complete a checkpoint. Every stage's ``write_snapshot`` has returned.

    Checkpoints of later steps are set aside by renaming their manifests: the run did not go on from them, because
    they were refused, so neither ``find_checkpoint`` nor ``prune`` may take one of them for the newest.

    Raises:
        CheckpointError: the place is full, forbidden or unreachable; the checkpoint is absent then.
    """
    data = to_json(manifest)
    from_json(data, f"The manifest of {place / folder}")
    (place / folder).write_bytes(MANIFEST, data)
    for step, name in step_folders(place):
        if step > manifest.step and (place / name).exists(MANIFEST):
            (place / name).rename(MANIFEST, REFUSED)


def clear(place: Place, folder: str) -> None:
    """Remove a checkpoint, or what an earlier attempt left of it; the manifest first, so it is never half."""
    target = place / folder
    target.delete(MANIFEST)
    target.delete()


def _write(target: Place, file: str, tensors: Mapping[str, torch.Tensor]) -> Shard:
    with target.writer(file) as write:
        size_bytes, digest = write_tensors(write, tensors)
    return Shard(file, size_bytes, digest, tuple(tensors))


def _jsonable(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in pairs}


def _copies(tensors: Mapping[str, torch.Tensor], crossing: Crossing) -> dict[str, torch.Tensor]:
    for name, tensor in tensors.items():
        check_storable(name, tensor)
    return crossing.copied(tensors, Crosses.SNAPSHOT)


class OptimizerParts(NamedTuple):
    """What an optimizer holds.

    Attributes:
        tensors: by "key/parameter", those of the optimizer itself: a step changes them.
        groups, scalars: see StageEntry; of this moment.
    """

    tensors: dict[str, torch.Tensor]
    groups: tuple[OptionGroup, ...]
    scalars: dict[str, dict[str, Any]]


def optimizer_parts(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], owned: Collection[str], slices: Slices | None = None
) -> OptimizerParts:
    """What it keeps for the owned parameters.

    Args:
        names: of the stage's parameters, by id.
        slices: of these that it steps, where replicas share out its state: what it keeps for a slice is named as such,
            and what is no slice it has where it steps the beginning of the parameter.

    Raises:
        CheckpointError: something can be neither a tensor nor JSON; names its key.
    """
    title = type(optimizer).__name__
    found = optimizer.state_dict()
    if found.keys() != {"state", "param_groups"}:
        extra = sorted(map(str, found.keys() ^ {"state", "param_groups"}))
        raise CheckpointError(f"{title}.state_dict() has or lacks {extra[0]!r}, which no parameter's name can carry.")
    parts = {} if slices is None else slices.part_of()
    by_number: dict[Any, str | Part] = {}
    groups = []
    for at, (group, packed) in enumerate(zip(optimizer.param_groups, found["param_groups"], strict=True)):
        for parameter, number in zip(group["params"], packed["params"], strict=True):
            if id(parameter) not in names and id(parameter) not in parts:
                raise CheckpointError(f"{title} holds a tensor that is no parameter of the model; leave it out.")
            by_number[number] = parts.get(id(parameter)) or names[id(parameter)]
        listed = [names[id(x)] for x in group["params"]] if slices is None else slices.groups[at]
        mine = tuple(name for name in listed if name in owned)
        options = {
            key: encode(value, f"The option {key!r} of {title}")
            for key, value in packed.items()
            if key not in ("params", "param_names")
        }
        if mine:
            groups.append(OptionGroup(title, options, mine))
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    for number, entries in found["state"].items():
        if number not in by_number:
            raise CheckpointError(f"{title} keeps {number!r} for no parameter, so no stage can own it. Use another.")
        whose = by_number[number]
        part, name = (whose, whose.name) if isinstance(whose, Part) else (None, whose)
        if slices is not None and part is None and slices.replica:
            continue  # the first replica keeps the same for it
        for key, value in entries.items() if name in owned else ():
            _keep(title, name, key, value, tensors, scalars, part)
    return OptimizerParts(tensors, tuple(groups), scalars)


def _keep(
    title: str, name: str, key: Any, value: Any,
    tensors: dict[str, torch.Tensor], scalars: dict[str, dict[str, Any]], part: Part | None,
) -> None:  # fmt: skip
    """Put one entry of the optimizer's state where it belongs."""
    if not isinstance(key, str) or "/" in key:
        raise CheckpointError(f"{title} keeps {key!r} for {name!r}: a key must be a text without a slash.")
    if part is not None and isinstance(value, torch.Tensor) and value.shape == (part.stop - part.first,):
        tensors[name_in_file(key, part)] = value
    elif part is not None and part.first:
        return
    elif isinstance(value, torch.Tensor):
        tensors[f"{key}/{name}"] = value
    elif isinstance(value, (list, tuple)):
        raise CheckpointError(
            f"{title} keeps a {type(value).__name__} under {key!r} for {name!r}, which a checkpoint cannot hold: only "
            "tensors and numbers. Use an optimizer that keeps its state in tensors and numbers."
        )
    else:
        scalars.setdefault(name, {})[key] = encode(value, f"{key!r}, which {title} keeps for {name!r},")
