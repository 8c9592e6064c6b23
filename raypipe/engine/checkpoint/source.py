"""Where the state of a stage comes from, by name: whoever restores need not know who wrote it, or how it was cut.

checkpoint folder    CheckpointSource   parameters, buffers, optimizer
tensors of a user    GivenTensors       parameters and buffers, before any step
object store         runtime/workers/packing.py::StoredTensors, the same from another process
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import torch

from raypipe.engine.checkpoint.find import Checkpoint, read_manifest
from raypipe.engine.checkpoint.manifest import OptionGroup
from raypipe.engine.checkpoint.sliced import whole
from raypipe.engine.checkpoint.tensor_file import TensorFile
from raypipe.engine.checkpoint.tensor_table import TensorInfo
from raypipe.engine.checkpoint.values import decode
from raypipe.engine.replicas.slices import Part
from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError

__all__ = ["CheckpointSource", "GivenTensors", "Kept", "PartSource", "StateSource", "opened", "read_all"]

Kept = dict[str, dict[str, Any]]
"""By parameter, what its optimizer keeps for it: tensors, numbers and texts by key."""


class StateSource(Protocol):
    """Parameters and buffers by name, and what an optimizer keeps.

    Attributes:
        title: of it in messages.
        names: of the parameters and buffers that it has.
        updates: steps that the optimizer has taken; a scheduler takes as many again.
        groups: by parameter, the options of the optimizer; None before any optimizer was made.
    """

    @property
    def title(self) -> str: ...

    @property
    def names(self) -> Collection[str]: ...

    @property
    def updates(self) -> int: ...

    @property
    def groups(self) -> Mapping[str, OptionGroup] | None: ...

    def info(self, name: str) -> TensorInfo:
        """Shape and type of a tensor."""

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """These tensors, one by one, in whatever order is quickest; with memory of their own, but see CopySource."""

    def kept(self, trained: Collection[str]) -> Kept:
        """Of these parameters, where anything was kept; see ``read``."""


@runtime_checkable
class PartSource(Protocol):
    """A source that reads what an optimizer keeps for a part of a parameter without the rest of it."""

    def kept_part(self, part: Part) -> dict[str, Any] | None:
        """With memory of its own; None where the whole has to be read."""


@dataclass(frozen=True, slots=True)
class GivenTensors:
    """Tensors of this process; nobody has trained them yet."""

    tensors: Mapping[str, torch.Tensor]
    title: str = "The initial state"
    updates: int = 0

    @property
    def names(self) -> Collection[str]:
        return self.tensors.keys()

    @property
    def groups(self) -> None:
        return None

    def info(self, name: str) -> TensorInfo:
        tensor = self.tensors[name]
        return TensorInfo(tensor.dtype, tuple(tensor.shape), 0, tensor.nbytes)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self.tensors[name].detach().clone()) for name in names)

    def kept(self, trained: Collection[str]) -> Kept:
        return {}


class CheckpointSource(AbstractContextManager["CheckpointSource"]):
    """A complete checkpoint. Each file is opened when the first tensor of it is asked for, and closed at the end.

    Args:
        checkpoint: that ``find_checkpoint`` found good, or its folder: checksums are not compared again.
    """

    def __init__(self, checkpoint: Checkpoint | Place) -> None:
        if isinstance(checkpoint, Place):
            checkpoint = Checkpoint(checkpoint, read_manifest(checkpoint))
        self._checkpoint = checkpoint
        self._stored = checkpoint.manifest.stored
        self._files = ExitStack()
        self._opened: dict[tuple[int, int], TensorFile] = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    @property
    def title(self) -> str:
        return str(self._checkpoint.place)

    @property
    def names(self) -> Collection[str]:
        return self._stored.keys()

    @property
    def updates(self) -> int:
        return int(self._checkpoint.manifest.position["updates"])

    @property
    def groups(self) -> Mapping[str, OptionGroup]:
        entries = self._checkpoint.manifest.stages
        return {name: group for entry in entries for group in entry.groups for name in group.parameters}

    def info(self, name: str) -> TensorInfo:
        return self._info(self._stored[name], name)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self._read(self._stored[name], name)) for name in names)

    def kept(self, trained: Collection[str]) -> Kept:
        found: Kept = {}
        entries = self._checkpoint.manifest.stages
        stored = [
            (name, partial(self._read, entry.stage, name, number))
            for entry in entries
            for number, shard in enumerate(entry.of_optimizer, 1)
            for name in shard.names
        ]
        for (name, key), value in whole(stored, trained, lambda name: self.info(name).shape).items():
            found.setdefault(name, {})[key] = value
        for entry in entries:
            for name, values in entry.scalars.items():
                if name in trained:
                    decoded = {key: decode(value, f"{key!r} of {name!r}") for key, value in values.items()}
                    found.setdefault(name, {}).update(decoded)
        return found

    def _info(self, stage: int, name: str, number: int = 0) -> TensorInfo:
        found = self._file(stage, number).tensors.get(name)
        if found is None:
            raise CheckpointError(
                f"{self._checkpoint.place}: stage {stage} holds no {name!r}, though its manifest says so. Use an "
                "older checkpoint."
            )
        return found

    def _read(self, stage: int, name: str, number: int = 0) -> torch.Tensor:
        self._info(stage, name, number)
        return self._file(stage, number).read(name)

    def _file(self, stage: int, number: int) -> TensorFile:
        """One of ``StageEntry.shards``."""
        if (stage, number) not in self._opened:
            shard = self._checkpoint.manifest.stages[stage].shards[number]
            file = self._files.enter_context(TensorFile(self._checkpoint.files / shard.file))
            self._opened[stage, number] = file
        return self._opened[stage, number]


def read_all(sources: Iterable[StateSource], names: Collection[str]) -> dict[str, torch.Tensor]:
    """These tensors, each from the first source that has it, with memory of its own.

    Raises:
        CheckpointError: none of them has it.
    """
    found: dict[str, torch.Tensor] = {}
    looked_at = []
    for source in sources:
        here = [name for name in names if name not in found and name in source.names]
        found.update(source.read(here))
        looked_at.append(source.title)
    missing = [name for name in names if name not in found]
    if missing:
        raise CheckpointError(
            f"{' and '.join(looked_at) or 'No source'} lacks {missing[0]!r}, so no stage can hold it."
        )
    return {name: found[name] for name in names}


def opened(source: StateSource | Checkpoint | Place) -> AbstractContextManager[StateSource]:
    """A source, or the checkpoint that one can be opened of."""
    return CheckpointSource(source) if isinstance(source, Checkpoint | Place) else nullcontext(source)
