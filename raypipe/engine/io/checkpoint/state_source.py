"""Sources of state: a stage reads its state from them by tensor name, whatever the stages that wrote it.

files of a checkpoint, in-memory copies   StoredState     parameters, buffers, optimizer
tensors of a user                         GivenTensors    parameters and buffers, before any step
safetensors files, initialisers           engine/initial  parameters and buffers, before any step
object store                              runtime/worker/packing.py::StoredTensors, from another process
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from raypipe.engine.io.checkpoint.find_checkpoint import Checkpoint, checkpoint_at, read_manifest
from raypipe.engine.io.checkpoint.manifest import OptionGroup
from raypipe.engine.io.checkpoint.snapshot import split_name
from raypipe.engine.io.checkpoint.tensor_file import TensorFile, TensorInfo, decode
from raypipe.engine.io.storage import Place
from raypipe.engine.optim.slices import ParameterSlice
from raypipe.errors import CheckpointError

T = TypeVar("T")
Kept = dict[str, dict[str, Any]]
"""Optimizer state as {parameter name: {key, as "exp_avg": tensor, number or text}}."""
Fetch = Callable[[Sequence[TensorInfo]], Iterator[torch.Tensor]]
"""Function that reads the tensors at given positions of a file or of memory, in their order.

Tensors may be views of memory that changes later, so a caller that keeps them must clone them.
"""


class StateSource(Protocol):
    """Source of parameters and buffers by name.

    Attributes:
        title: name of the source, for error messages.
        names: names of the parameters and buffers in the source.
        updates: number of scheduler steps that the run had made; a restored scheduler makes as many.
    """

    @property
    def title(self) -> str: ...

    @property
    def names(self) -> Collection[str]: ...

    @property
    def updates(self) -> int: ...

    def info(self, name: str) -> TensorInfo:
        """Return dtype and shape of a tensor by its name."""

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) in any order; tensors may be views of memory that changes later, see Fetch."""


@dataclass(frozen=True, slots=True)
class GivenTensors:
    """Source of state from tensors in this process; ``read`` clones them. No scheduler steps have been made."""

    tensors: Mapping[str, torch.Tensor]
    title: str = "The initial state"
    updates: int = 0

    @property
    def names(self) -> Collection[str]:
        return self.tensors.keys()

    def info(self, name: str) -> TensorInfo:
        tensor = self.tensors[name]
        return TensorInfo(tensor.dtype, tuple(tensor.shape), 0, tensor.nbytes)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self.tensors[name].detach().clone()) for name in names)


@dataclass(frozen=True)
class StatePiece:
    """Part of the stored state of one stage: a file of a checkpoint, or the memory of an in-memory copy.

    The table of the file or memory has the dtype, shape and position of each tensor, by the stored name.

    Attributes:
        title: name of the piece, for error messages.
        tensors: maps the names of parameters and buffers to their names in the table.
        optimizer: maps names in the table to (key of the optimizer state, first element of a slice or None for a whole
            parameter, parameter).
        table: function that reads the table.
        fetch: function that reads tensors at given positions.
        groups, scalars: see StageEntry.
    """

    stage: int
    title: str
    tensors: Mapping[str, str]
    optimizer: Mapping[str, tuple[str, int | None, str]]
    table: Callable[[], Mapping[str, TensorInfo]]
    fetch: Fetch
    groups: Sequence[OptionGroup] = ()
    scalars: Mapping[str, Mapping[str, Any]] | None = None

    def info(self, stored: str) -> TensorInfo:
        """Return dtype, shape and position of a tensor by its stored name.

        Raises:
            CheckpointError: the table has no such tensor.
        """
        info = self.table().get(stored)
        if info is None:
            raise CheckpointError(
                f"{self.title}: stage {self.stage} lacks {stored!r}, which its manifest lists. Use an older checkpoint."
            )
        return info


class _Entry(NamedTuple):
    """Tensor of a parameter's optimizer state in a piece.

    Attributes:
        key: key of the state, such as "exp_avg".
        first: first element of the slice to which the tensor belongs; None for the state of a whole parameter.
        stored: name of the tensor in the piece.
    """

    piece: StatePiece
    key: str
    first: int | None
    stored: str


class StoredState(AbstractContextManager["StoredState"]):
    """Stored state of several stages, as a StateSource with optimizer state; a context manager.

    A tensor that several stages hold is read from the first of ``pieces`` that has it.

    Args:
        files: files that pieces have opened; closed when the context ends.

    Attributes:
        groups: optimizer options by parameter name.
    """

    def __init__(self, title: str, updates: int, pieces: Sequence[StatePiece], files: ExitStack | None = None) -> None:
        self.title, self.updates, self._files = title, updates, files or ExitStack()
        self.groups: dict[str, OptionGroup] = {}
        self._tensors: dict[str, tuple[StatePiece, str]] = {}
        self._entries: dict[str, list[_Entry]] = {}
        self._scalars: dict[str, dict[str, Any]] = {}
        for piece in pieces:
            for name, stored in piece.tensors.items():
                self._tensors.setdefault(name, (piece, stored))
            for group in piece.groups:
                for name in group.parameters:
                    self.groups.setdefault(name, group)
        for piece in pieces:
            own = {name for name, (first, _) in self._tensors.items() if first.stage == piece.stage}
            for stored, (key, begin, name) in piece.optimizer.items():
                if name in own:
                    self._entries.setdefault(name, []).append(_Entry(piece, key, begin, stored))
            for name in own & (piece.scalars or {}).keys():
                self._scalars.setdefault(name, {}).update((piece.scalars or {})[name])

    def __exit__(self, *error: object) -> None:
        self._files.close()

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def info(self, name: str) -> TensorInfo:
        piece, stored = self._tensors[name]
        return piece.info(stored)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        wanted = [(self._tensors[name][0], self.info(name), name) for name in names]
        return ((name, tensor) for name, _, tensor in _fetched(wanted))

    def kept(self, trained: Collection[str]) -> Kept:
        """Read the optimizer state of whole parameters, joining slices. Parameters without state are left out.

        Raises:
            CheckpointError: a slice is missing.
        """
        entries = [(entry, name) for name in trained for entry in self._entries.get(name, ())]
        states = {name: self._decoded(name) for name in trained if name in self._scalars}
        filled: dict[tuple[str, str], int] = {}
        wanted = [(entry.piece, entry.piece.info(entry.stored), (name, entry)) for entry, name in entries]
        for (name, entry), _, tensor in _fetched(wanted):
            state, key = states.setdefault(name, {}), entry.key
            if entry.first is None:
                state[key] = tensor
                continue
            if key not in state:
                state[key] = torch.empty(self.info(name).shape, dtype=tensor.dtype)
            state[key].view(-1)[entry.first : entry.first + tensor.numel()] = tensor
            filled[name, key] = filled.get((name, key), 0) + tensor.numel()
        for (name, key), elements in filled.items():
            self._check_filled(key, name, 0, states[name][key].numel(), elements)
        return states

    def kept_part(self, part: ParameterSlice) -> dict[str, Any]:
        """Read the optimizer state of one slice of a parameter into new memory. Only the slice's elements are read.

        Raises:
            CheckpointError: elements of the slice are missing.
        """
        state, filled = self._decoded(part.name), dict[str, int]()
        shape = self.info(part.name).shape
        wanted: list[tuple[StatePiece, TensorInfo, tuple[str, int | None]]] = []
        for piece, key, first, stored in self._entries.get(part.name, ()):
            info = piece.info(stored)
            if first is None and info.shape != shape:
                wanted.append((piece, info, (key, None)))
                continue
            start, size = first or 0, info.dtype.itemsize
            begin, end = max(part.first, start), min(part.stop, start + info.size_bytes // size)
            if begin < end:
                cut = TensorInfo(
                    info.dtype, (end - begin,), info.begin + (begin - start) * size, (end - begin) * size
                )  # fmt: skip
                wanted.append((piece, cut, (key, begin - part.first)))
        for (key, at), _, tensor in _fetched(wanted):
            if at is None:
                state[key] = tensor.clone()
                continue
            if key not in state:
                state[key] = torch.empty(part.stop - part.first, dtype=tensor.dtype)
            state[key][at : at + tensor.numel()] = tensor
            filled[key] = filled.get(key, 0) + tensor.numel()
        for key, elements in filled.items():
            self._check_filled(key, part.name, part.first, part.stop, elements)
        return state

    def _decoded(self, name: str) -> dict[str, Any]:
        return {key: decode(value, f"{key!r} of {name!r}") for key, value in self._scalars.get(name, {}).items()}

    def _check_filled(self, key: str, name: str, first: int, stop: int, elements: int) -> None:
        if elements != stop - first:
            raise CheckpointError(
                f"{self.title} has {elements} of the elements {first} to {stop} of {key!r} of {name!r}. Use an older "
                "checkpoint."
            )


def _fetched(wanted: Iterable[tuple[StatePiece, TensorInfo, T]]) -> Iterator[tuple[T, TensorInfo, torch.Tensor]]:
    """Read tensors of several pieces, in each piece by increasing position.

    Args:
        wanted: (piece, position, label) of each tensor.

    Yields:
        (label, position, tensor).
    """
    by_piece: dict[int, list[tuple[StatePiece, TensorInfo, T]]] = {}
    for one in wanted:
        by_piece.setdefault(id(one[0]), []).append(one)
    for listed in by_piece.values():
        listed.sort(key=lambda one: one[1].begin)
        for (_, info, label), tensor in zip(listed, listed[0][0].fetch([i for _, i, _ in listed]), strict=True):
            yield label, info, tensor


def checkpoint_source(checkpoint: Checkpoint | Place) -> StoredState:
    """Create the source of state of a checkpoint. Files are opened when first read, and closed with the source.

    Args:
        checkpoint: result of ``find_checkpoint``; or the folder of a checkpoint, whose checksums are not compared.
    """
    if isinstance(checkpoint, Place):
        checkpoint = Checkpoint(checkpoint, read_manifest(checkpoint))
    files, pieces = ExitStack(), []
    for entry in checkpoint.manifest.stages:
        for shard in entry.shards:
            file = _LazyFile(checkpoint.files / shard.file, files)
            own = shard is entry.tensors
            pieces.append(
                StatePiece(
                    entry.stage, str(checkpoint.place),
                    {name: name for name in shard.names} if own else {},
                    {} if own else {name: split_name(name) for name in shard.names},
                    file.table, file.fetch, entry.groups if own else (), entry.scalars if own else None,
                )
            )  # fmt: skip
    return StoredState(str(checkpoint.place), int(checkpoint.manifest.position["updates"]), pieces, files)


class _LazyFile:
    """safetensors file that is opened when ``table`` or ``fetch`` is first called, and closed with ``files``."""

    def __init__(self, place: Place, files: ExitStack) -> None:
        self._place, self._files = place, files
        self._file: TensorFile | None = None

    def table(self) -> Mapping[str, TensorInfo]:
        return self._open().tensors

    def fetch(self, infos: Sequence[TensorInfo]) -> Iterator[torch.Tensor]:
        return map(self._open().read_at, infos)

    def _open(self) -> TensorFile:
        if self._file is None:
            self._file = self._files.enter_context(TensorFile(self._place))
        return self._file


def load_state_dict(path: str | os.PathLike[str], *, storage_filesystem: Any = None) -> dict[str, torch.Tensor]:
    """Read parameters and persistent buffers of a checkpoint, by the names in the user's model.

    The checkpoint may have any number of stages.

    Args:
        path: local path or URI, such as s3://bucket/runs/lm: the folder of a run, for its newest good checkpoint, or
            the folder ``step_...`` of a checkpoint.
        storage_filesystem: a pyarrow.fs.FileSystem on which ``path`` is; None selects it by the URI.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged; names the file.
    """
    checkpoint = checkpoint_at(Place.of(path, storage_filesystem))
    with checkpoint_source(checkpoint) as source:
        tensors = dict(source.read(source.names))
    state = {name: tensors[name] for name in source.names}
    return state | {alias: state[name] for alias, name in checkpoint.manifest.aliases.items()}


def read_all(sources: Iterable[StateSource], names: Collection[str]) -> dict[str, torch.Tensor]:
    """Read tensors by name, each from the first source that has it.

    Raises:
        CheckpointError: a name is in no source.
    """
    tensors: dict[str, torch.Tensor] = {}
    titles = []
    for source in sources:
        tensors.update(source.read([name for name in names if name not in tensors and name in source.names]))
        titles.append(source.title)
    missing = [name for name in names if name not in tensors]
    if missing:
        raise CheckpointError(f"{' and '.join(titles) or 'No source'} lacks {missing[0]!r}, so no stage can hold it.")
    return {name: tensors[name] for name in names}


def opened(source: StateSource | Checkpoint | Place) -> AbstractContextManager[StateSource]:
    """Return a context that gives a source of state: ``source`` itself, or a checkpoint's files, closed at the end."""
    return checkpoint_source(source) if isinstance(source, Checkpoint | Place) else nullcontext(source)
