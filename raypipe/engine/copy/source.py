"""A copy as a source of state, and several of them as one: whoever restores asks by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch

from raypipe.engine.checkpoint import Kept, StateSource, TensorInfo
from raypipe.engine.checkpoint.manifest import OptionGroup
from raypipe.engine.checkpoint.values import decode
from raypipe.engine.copy.header import OPTIMIZER, TENSORS, CopyHeader
from raypipe.errors import CheckpointError

__all__ = ["CopySource", "Fetch", "JoinedSource", "view_of", "views_of"]


Fetch = Callable[[Sequence[TensorInfo]], Iterator[torch.Tensor]]
"""Places in a block -> the tensors that lie there, in the same order; they may be the block's memory."""


class CopySource:
    """One copy; see StateSource. No tensor is made of it before it is asked for.

    What is read of a copy in this process is its own memory, which a later copy overwrites: fill other tensors with it.

    Attributes:
        header: of it.
    """

    def __init__(self, header: CopyHeader, fetch: Fetch) -> None:
        infos = header.infos()
        self.header = header
        self._fetch = fetch
        self._tensors = {name.removeprefix(TENSORS): info for name, info in infos.items() if name.startswith(TENSORS)}
        self._kept = {name.removeprefix(OPTIMIZER): i for name, i in infos.items() if name.startswith(OPTIMIZER)}
        self._groups = {name: group for group in header.groups for name in group.parameters}

    @property
    def title(self) -> str:
        return f"The copy of stage {self.header.stage} after step {self.header.step}"

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    @property
    def updates(self) -> int:
        return self.header.updates

    @property
    def groups(self) -> Mapping[str, OptionGroup]:
        return self._groups

    def info(self, name: str) -> TensorInfo:
        return self._tensors[name]

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        wanted = in_order({name: self._tensors[name] for name in names})
        return zip(wanted, self._fetch(list(wanted.values())), strict=True)

    def kept(self, trained: Collection[str]) -> Kept:
        found: Kept = {}
        wanted = in_order({stored: i for stored, i in self._kept.items() if stored.partition("/")[2] in trained})
        for stored, tensor in zip(wanted, self._fetch(list(wanted.values())), strict=True):
            key, _, name = stored.partition("/")
            found.setdefault(name, {})[key] = tensor
        for name, values in self.header.scalars.items():
            if name in trained:
                decoded = {key: decode(value, f"{key!r} of {name!r}") for key, value in values.items()}
                found.setdefault(name, {}).update(decoded)
        return found


def in_order(infos: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """As they lie in the block, so that neighbours can be fetched together."""
    return dict(sorted(infos.items(), key=lambda item: item[1].begin))


class JoinedSource:
    """Copies of several stages after the same step; what stages share is read from the first that has it.

    Raises:
        CheckpointError: they are not of the same step of training.
    """

    def __init__(self, sources: Sequence[StateSource]) -> None:
        counts = {source.title: source.updates for source in sources if source.groups}
        if len(set(counts.values())) > 1:
            told = ", ".join(f"{title}: {count}" for title, count in counts.items())
            raise CheckpointError(f"Copies of different numbers of updates make no state together ({told}).")
        self._sources = tuple(sources)
        self._of: dict[str, StateSource] = {}
        self._groups: dict[str, OptionGroup] = {}
        for source in sources:
            for name in source.names:
                self._of.setdefault(name, source)
            for name, group in (source.groups or {}).items():
                self._groups.setdefault(name, group)

    @property
    def title(self) -> str:
        return " and ".join(source.title for source in self._sources) or "No copy"

    @property
    def names(self) -> Collection[str]:
        return self._of.keys()

    @property
    def updates(self) -> int:
        return max((source.updates for source in self._sources), default=0)

    @property
    def groups(self) -> Mapping[str, OptionGroup]:
        return self._groups

    def info(self, name: str) -> TensorInfo:
        return self._of[name].info(name)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for source, here in self._by_source(names):
            yield from source.read(here)

    def kept(self, trained: Collection[str]) -> Kept:
        found: Kept = {}
        for source, here in self._by_source(trained):
            found.update(source.kept(here))
        return found

    def _by_source(self, names: Iterable[str]) -> list[tuple[StateSource, list[str]]]:
        wanted = list(names)
        return [
            (source, here)
            for source in self._sources
            if (here := [name for name in wanted if self._of.get(name) is source])
        ]


def view_of(block: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """The tensor that lies there; shares the block's memory.

    Args:
        block: of uint8, aligned to 8 bytes.
    """
    return block[info.begin : info.end].view(info.dtype).view(info.shape)


def views_of(block: torch.Tensor) -> Fetch:
    """How tensors are fetched of a block in this process: as they lie there."""
    return lambda infos: (view_of(block, info) for info in infos)
