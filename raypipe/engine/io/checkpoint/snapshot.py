"""Snapshots of the tensors that a stage owns, taken between two steps, and their files.

take_snapshot    copies tensors to host memory; the next step waits for this only
write_snapshot   writes files with checksums, in the background; returns the stage's entry
commit           writes the manifest after all stages have written their files: the checkpoint is complete

    compute   step 99 | snapshot | step 100 | step 101 | ...
    writer              [---- stage_0.safetensors ----]  entry for the manifest

Optimizer state that replicas shard is written by slice; the number after "@" is the first element of the slice:

    replica 0   stage_0.optimizer.safetensors     exp_avg@0/weight       elements 0 to 2048
    replica 1   stage_0.optimizer.1.safetensors   exp_avg@2048/weight    the rest

If a stage reads a data stream, stage_0.stream.json has its mark: the position in the stream. A run resumes from the
mark, without reading the stream from its beginning. If it is missing, resuming takes longer, but gives the same data.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from raypipe.data.stream import Mark
from raypipe.engine.device.device import CPU, TransferKind
from raypipe.engine.io.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    OptionGroup,
    Shard,
    StageEntry,
    file_name,
    from_json,
    to_json,
)
from raypipe.engine.io.checkpoint.tensor_file import check_storable, encode, write_tensors
from raypipe.engine.io.storage import Place
from raypipe.engine.messages.transfer import DeviceTransfer
from raypipe.engine.optim.slices import ParameterSlice, Slices
from raypipe.engine.optim.state import StageState, owned_tensors
from raypipe.engine.stage.stage import StageProgram
from raypipe.errors import CheckpointError

FOLDER = "checkpoints"
REFUSED = f"{MANIFEST}.refused"
_STEP = re.compile(r"step_([0-9]{7,18})")


@dataclass(frozen=True, slots=True)
class StageSnapshot:
    """Copies of what one stage, or one replica of it, writes into a checkpoint.

    Attributes:
        tensors: parameters that no earlier stage holds, and persistent buffers, by name.
        optimizer: tensors of the optimizer's state by "key/parameter"; None if the stage trains nothing.
        groups, scalars: see StageEntry.
        mark: position in the data stream that the stage reads; None if it reads no stream.
        replica: index of this replica if replicas shard the optimizer's state, else 0. Replicas other than 0 have
            optimizer state only.
    """

    stage: int
    tensors: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor] | None
    groups: tuple[OptionGroup, ...]
    scalars: Mapping[str, Mapping[str, Any]]
    mark: Mark | None = None
    replica: int = 0


def checkpoint_name(step: int) -> str:
    """Return the folder of the checkpoint after ``step`` steps, relative to the run's folder."""
    return f"{FOLDER}/step_{step:07d}"


def step_folders(run: Place) -> list[tuple[int, str]]:
    """List (step, name relative to the run's folder) of all checkpoint folders, complete or not, oldest first."""
    matches = [(_STEP.fullmatch(entry.name), entry) for entry in run.list(FOLDER)]
    return sorted((int(match[1]), f"{FOLDER}/{entry.name}") for match, entry in matches if match and entry.is_folder)


def take_snapshot(
    program: StageProgram,
    state: StageState,
    persistent: frozenset[str],
    crossing: DeviceTransfer | None = None,
    mark: Callable[[], Mark | None] = lambda: None,
) -> StageSnapshot:
    """Copy the tensors and optimizer state that this stage owns, between two steps.

    Args:
        persistent: names of the parameters and buffers that a checkpoint contains.
        crossing: transfer from the device that holds the state; None for the CPU.
        mark: returns the position in the data stream that the stage reads; None if it reads no stream.

    Raises:
        CheckpointError: the optimizer has state that is neither a tensor nor JSON; names its key.
    """
    replica = 0 if state.slices is None else state.slices.replica
    owned = owned_tensors(program, state, persistent)
    crossing = crossing or DeviceTransfer(CPU)
    tensors = _copies(owned, crossing) if not replica else {}
    if state.optimizer is None:
        return StageSnapshot(program.index, tensors, None, (), {}, mark())
    names = {id(parameter): name for name, parameter in state.parameters.items()}
    parts = optimizer_parts(state.optimizer, names, owned, state.slices)
    kept = _copies(parts.tensors, crossing)
    groups = parts.groups if not replica else ()
    return StageSnapshot(program.index, tensors, kept, groups, parts.scalars, mark() if not replica else None, replica)


def write_snapshot(place: Place, folder: str, snapshot: StageSnapshot) -> dict[str, Any]:
    """Write one stage's files; return its entry for ``make_manifest``, as JSON values.

    Args:
        place: folder of the run.
        folder: folder of the checkpoint's files, relative to the run's; see ``checkpoint_name`` and ``files_folder``.

    Raises:
        CheckpointError: storage is full, forbidden or unreachable.
    """
    stage, target = snapshot.stage, place / folder
    if snapshot.replica:
        assert snapshot.optimizer is not None
        piece = _write(target, file_name(stage, f"optimizer.{snapshot.replica}"), snapshot.optimizer)
        shard = asdict(piece, dict_factory=_jsonable)
        return {"stage": stage, "replica": snapshot.replica, "scalars": snapshot.scalars, "optimizer": shard}
    tensors = _write(target, file_name(stage, "tensors"), snapshot.tensors)
    optimizer = None
    if snapshot.optimizer is not None:
        optimizer = _write(target, file_name(stage, "optimizer"), snapshot.optimizer)
    if snapshot.mark is not None:
        write_mark(target, stage, snapshot.mark)
    return asdict(StageEntry(stage, tensors, optimizer, snapshot.groups, snapshot.scalars), dict_factory=_jsonable)


def commit(place: Place, folder: str, manifest: Manifest) -> None:
    """Complete a checkpoint by writing its manifest, after ``write_snapshot`` on every stage.

    Manifests of later steps are renamed, because the run has refused their checkpoints. So neither ``find_checkpoint``
    nor ``prune`` selects such a checkpoint as the newest.

    Raises:
        CheckpointError: storage is full, forbidden or unreachable; the checkpoint then stays incomplete.
    """
    data = to_json(manifest)
    from_json(data, f"The manifest of {place / folder}")
    (place / folder).write_bytes(MANIFEST, data)
    for step, name in step_folders(place):
        if step > manifest.step and (place / name).exists(MANIFEST):
            (place / name).rename(MANIFEST, REFUSED)


def clear(place: Place, folder: str) -> None:
    """Delete a checkpoint, complete or not. The manifest is deleted first, so that the rest never seems complete."""
    target = place / folder
    target.delete(MANIFEST)
    target.delete()


def discard(place: Place, folder: str, files: str) -> None:
    """Delete the files of a failed checkpoint, unless its folder has a manifest, from an earlier save of the step.

    Args:
        files: folder to which the stages wrote: ``folder``, or one below it, as in ``files_folder``.

    Raises:
        CheckpointError: the place is forbidden or unreachable.
    """
    if (place / folder).exists(MANIFEST):
        return
    (place / files).delete()
    if not place.list(folder):
        (place / folder).delete()


def _write(target: Place, file: str, tensors: Mapping[str, torch.Tensor]) -> Shard:
    with target.writer(file) as write:
        size_bytes, digest = write_tensors(write, tensors)
    return Shard(file, size_bytes, digest, tuple(tensors))


def _jsonable(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in pairs}


def _copies(tensors: Mapping[str, torch.Tensor], crossing: DeviceTransfer) -> dict[str, torch.Tensor]:
    for name, tensor in tensors.items():
        check_storable(name, tensor)
    return crossing.copied(tensors, TransferKind.SNAPSHOT)


class OptimizerParts(NamedTuple):
    """Optimizer state and options of one stage, in the form of a checkpoint.

    Attributes:
        tensors: tensors by "key/parameter"; not copied, so the next step changes them.
        groups, scalars: see StageEntry.
    """

    tensors: dict[str, torch.Tensor]
    groups: tuple[OptionGroup, ...]
    scalars: dict[str, dict[str, Any]]


def optimizer_parts(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], owned: Collection[str], slices: Slices | None = None
) -> OptimizerParts:
    """Collect the optimizer's state and options for the parameters named in ``owned``.

    Args:
        names: names of the stage's parameters, by the id of the parameter object.
        slices: slices of parameters that this replica's optimizer steps; None without sharded optimizer state. State
            with the shape of a slice is collected by slice. Other state of the parameter, as a step count, is collected
            only on the replica that steps the first element.

    Raises:
        CheckpointError: the optimizer has state that is neither a tensor nor JSON; names its key.
    """
    title = type(optimizer).__name__
    state_dict = optimizer.state_dict()
    if state_dict.keys() != {"state", "param_groups"}:
        raise CheckpointError(
            f"{title}.state_dict() has the keys {', '.join(sorted(map(repr, state_dict)))} instead of 'state' and "
            "'param_groups'. A checkpoint keeps an optimizer's state by the names of parameters, so that any number of "
            f"stages can go on from it. Let {title} keep all of it in self.state[parameter], and inherit state_dict() "
            "and load_state_dict() from torch.optim.Optimizer; or hold optimizers of torch, each with its own part of "
            "the parameters, in its attributes (docs/checkpoints.md shows Muon with AdamW)."
        )
    parts = {} if slices is None else slices.part_of()
    by_number: dict[Any, str | ParameterSlice] = {}
    groups = []
    for at, (group, packed) in enumerate(zip(optimizer.param_groups, state_dict["param_groups"], strict=True)):
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
    for number, entries in state_dict["state"].items():
        if number not in by_number:
            raise CheckpointError(
                f"{title} keeps {number!r} for no parameter, so no stage can own it. Use an optimizer that keeps its "
                "state by parameter."
            )
        whose = by_number[number]
        part, name = (whose, whose.name) if isinstance(whose, ParameterSlice) else (None, whose)
        if slices is not None and part is None and slices.replica:
            continue  # the first replica keeps the same for it
        for key, value in entries.items() if name in owned else ():
            _keep(title, name, key, value, tensors, scalars, part)
    return OptimizerParts(tensors, tuple(groups), scalars)


def _keep(
    title: str, name: str, key: Any, value: Any,
    tensors: dict[str, torch.Tensor], scalars: dict[str, dict[str, Any]], part: ParameterSlice | None,
) -> None:  # fmt: skip
    """Add one entry of a parameter's optimizer state to ``tensors`` or ``scalars``.

    ``part`` is the slice to which the entry belongs; None for a whole parameter.
    """
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


MARK = "@"
"""Separator between a key of the optimizer state and the first element of a slice."""


def name_in_file(key: str, part: ParameterSlice) -> str:
    """Return the name of one slice's optimizer state in a checkpoint file, such as "exp_avg@2048/weight".

    Args:
        key: key of the state, such as "exp_avg".

    Raises:
        CheckpointError: the key contains MARK.
    """
    if MARK in key:
        raise CheckpointError(
            f"The optimizer keeps {key!r} for {part.name!r}: with shard_optimizer=True a key must have no {MARK!r}."
        )
    return f"{key}{MARK}{part.first}/{part.name}"


def split_name(stored: str) -> tuple[str, int | None, str]:
    """Split a name in a file, as "exp_avg@2048/weight", into (state key, first element of the slice, parameter name).

    The first element is None for the state of a whole parameter, as "exp_avg/weight".
    """
    title, _, name = stored.partition("/")
    key, _, first = title.rpartition(MARK)
    return (key, int(first), name) if first.isdecimal() and key else (title, None, name)


ENDING = ".stream.json"
MOST_BYTES = 1 << 26


def write_mark(folder: Place, stage: int, mark: Mark) -> None:
    """Write a stage's position in its data stream to a file next to the stage's other files.

    Raises:
        CheckpointError: the place is full, forbidden or unreachable.
    """
    content = mark._asdict()
    folder.write_bytes(f"stage_{stage}{ENDING}", json.dumps({**content, "sha256": _digest(content)}).encode())


def read_mark(checkpoint: Place) -> Mark | None:
    """Read the position in the data stream from the first valid file of any stage in a checkpoint; None without one."""
    try:
        entries = checkpoint.list()
        folders = [checkpoint, *(checkpoint / entry.name for entry in entries if entry.is_folder)]
        files = [(folder, entry.name) for folder in folders for entry in folder.list() if entry.name.endswith(ENDING)]
    except CheckpointError:
        return None
    marks = (_read(folder, name) for folder, name in files)
    return next((mark for mark in marks if mark is not None), None)


def _read(folder: Place, name: str) -> Mark | None:
    try:
        content = json.loads(folder.read_bytes(name, MOST_BYTES))
        if content.pop("sha256") != _digest(content):
            return None
        return Mark.of(content)
    except (CheckpointError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class ShardWriter:
    """Writer of one stage's snapshots, in the background.

    Args:
        run: folder of the run.
        snapshot: function that takes a snapshot of the stage; called between two steps.
    """

    def __init__(self, run: Place, snapshot: Callable[[], StageSnapshot]) -> None:
        self._run = run
        self._snapshot = snapshot
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="raypipe-save")
        self._entries: dict[str, Future[dict[str, Any]]] = {}
        self._last: Future[dict[str, Any]] | None = None

    def begin(self, folder: str) -> None:
        """Take a snapshot now, and write it in the background to ``folder``, a path below the run's folder.

        First waits until the previous snapshot is written.
        """
        if self._last is not None:
            self._last.exception()  # waits for the one before; ``entry`` raises its error
        snapshot = self._snapshot()
        self._last = self._entries[folder] = self._pool.submit(self._write, folder, snapshot)

    def wait(self, folder: str, wait_s: float) -> bool:
        """Wait until the write to ``folder`` ends or fails; return False on timeout, or if there is no such write."""
        future = self._entries.get(folder)
        return future is not None and not wait([future], wait_s).not_done

    def entry(self, folder: str, wait_s: float) -> dict[str, Any] | None:
        """Wait until the snapshot in ``folder`` is written, and return this stage's entry for the manifest.

        Returns None if the files are not written within ``wait_s`` seconds, if ``begin`` was not called for this
        folder, or if the entry was returned before.

        Raises:
            CheckpointError: the files could not be written.
        """
        return self._entries.pop(folder).result() if self.wait(folder, wait_s) else None

    def close(self) -> None:
        """Wait until the snapshot in progress is written, and end the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _write(self, folder: str, snapshot: StageSnapshot) -> dict[str, Any]:
        try:
            return write_snapshot(self._run, folder, snapshot)
        except CheckpointError as error:
            failure = type(error)(str(error))
        except Exception as error:  # noqa: BLE001  (``entry`` raises it)
            failure = CheckpointError(f"{folder} could not be written: {type(error).__name__}: {error}")
        # The future keeps the error; the traceback of the first one would keep a copy of the stage's state.
        del snapshot
        raise failure


def entries_of(writers: Sequence[ShardWriter], folder: str, wait_s: float) -> list[dict[str, Any] | None]:
    """Return the result of ``ShardWriter.entry`` of each writer, waiting up to ``wait_s`` seconds for each.

    Raises:
        CheckpointError: a writer has failed. All writers are waited for, and then the first failure is raised.
    """
    entries, failure = [], None
    for writer in writers:
        try:
            entries.append(writer.entry(folder, wait_s))
        except CheckpointError as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return entries
