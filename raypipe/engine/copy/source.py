"""A copy as a source of state, and several of them as one: whoever restores asks by name.

JoinedSource            stages after the same step
  CopySource            a copy of a stage
  SlicedSource          one in pieces: what its replicas have alike, and the slices of each
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from raypipe.engine.checkpoint import Kept, StateSource, TensorInfo
from raypipe.engine.checkpoint.manifest import OptionGroup
from raypipe.engine.checkpoint.sliced import split_name, whole
from raypipe.engine.checkpoint.source import PartSource
from raypipe.engine.checkpoint.values import decode
from raypipe.engine.copy.header import COMMON, OPTIMIZER, TENSORS, CopyHeader
from raypipe.engine.replicas.slices import Part
from raypipe.errors import CheckpointError

__all__ = ["CopySource", "Fetch", "JoinedSource", "SlicedSource", "put_together", "view_of", "views_of"]


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
        self._by_parameter: dict[str, list[tuple[str, int | None, TensorInfo]]] = {}
        for stored, info in self._kept.items():
            title, _, name = stored.partition("/")
            key, first, _ = split_name(stored) if header.pieces else (title, None, name)
            self._by_parameter.setdefault(name, []).append((key, first, info))

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
                found.setdefault(name, {}).update(_decoded(name, values))
        return found

    def kept_part(self, part: Part) -> dict[str, Any] | None:
        return part_of([self], part, self._tensors[part.name].shape)

    def fetched(self, name: str, part: Part, shape: Sequence[int]) -> Iterator[tuple[str, int | None, torch.Tensor]]:
        """Of what was kept for a parameter, as (key, place in the part or None where it is no part, tensor).

        Of tensors of its shape, and of slices of these, only the elements of the part are read.
        """
        wanted: list[tuple[str, int | None, TensorInfo]] = []
        for key, first, info in self._by_parameter.get(name, ()):
            if first is None and info.shape != tuple(shape):
                wanted.append((key, None, info))
                continue
            start, size = first or 0, info.size_bytes // info.dtype.itemsize
            begin, end = max(part.first, start), min(part.stop, start + size)
            if begin < end:
                wanted.append((key, begin - part.first, _cut(info, begin - start, end - start)))
        tensors = self._fetch([info for _, _, info in wanted]) if wanted else iter(())
        for (key, at, _), tensor in zip(wanted, tensors, strict=True):
            yield key, at, tensor

    def scalars_of(self, name: str) -> dict[str, Any]:
        """What was kept for a parameter that is no tensor."""
        return _decoded(name, self.header.scalars.get(name, {}))


def _decoded(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: decode(value, f"{key!r} of {name!r}") for key, value in values.items()}


def _cut(info: TensorInfo, begin: int, end: int) -> TensorInfo:
    """Elements of a tensor, in the order of memory."""
    size = info.dtype.itemsize
    return TensorInfo(info.dtype, (end - begin,), info.begin + begin * size, (end - begin) * size)


def part_of(sources: Sequence[CopySource], part: Part, shape: Sequence[int]) -> dict[str, Any]:
    """What was kept for a part of a parameter, whoever has its elements; of other elements nothing is read.

    Args:
        sources: that together have all of the parameter.
        shape: of the parameter.

    Raises:
        CheckpointError: some of the elements are nowhere.
    """
    found: dict[str, Any] = {}
    filled: dict[str, int] = {}
    for source in sources:
        found.update(source.scalars_of(part.name))
        for key, at, tensor in source.fetched(part.name, part, shape):
            if at is None:
                found[key] = tensor.clone()
                continue
            if key not in found:
                found[key] = torch.empty(part.stop - part.first, dtype=tensor.dtype)
            found[key][at : at + tensor.numel()] = tensor
            filled[key] = filled.get(key, 0) + tensor.numel()
    for key, count in filled.items():
        if count != part.stop - part.first:
            raise CheckpointError(
                f"Of elements {part.first} to {part.stop} of {key!r} of {part.name!r} the copies have {count}."
            )
    return found


def in_order(infos: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """As they lie in the block, so that neighbours can be fetched together."""
    return dict(sorted(infos.items(), key=lambda item: item[1].begin))


class SlicedSource:
    """One copy of a stage whose replicas share out the state of their optimizer: in pieces, read as a whole.

    Args:
        common: what all replicas have alike.
        slices: of all of them, in any order.

    Raises:
        CheckpointError: one is missing, or they are not of the same step of training.
    """

    def __init__(self, common: CopySource, slices: Sequence[CopySource]) -> None:
        known, wanted = {one.header.piece for one in slices}, set(range(1, common.header.pieces + 1))
        if known != wanted or len(known) < len(slices):
            raise CheckpointError(
                f"{common.title} is in {len(wanted)} pieces, and those of replicas "
                f"{sorted(piece - 1 for piece in known)} are here."
            )
        if any((one.header.step, one.updates) != (common.header.step, common.updates) for one in slices):
            raise CheckpointError(f"The pieces of {common.title[0].lower()}{common.title[1:]} are of different steps.")
        self._common, self._slices = common, tuple(slices)
        self.header = common.header

    @property
    def title(self) -> str:
        return self._common.title

    @property
    def names(self) -> Collection[str]:
        return self._common.names

    @property
    def updates(self) -> int:
        return self._common.updates

    @property
    def groups(self) -> Mapping[str, OptionGroup]:
        return self._common.groups

    def info(self, name: str) -> TensorInfo:
        return self._common.info(name)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        return self._common.read(names)

    def kept(self, trained: Collection[str]) -> Kept:
        found: Kept = {}
        pieces: list[tuple[str, Callable[[], torch.Tensor]]] = []
        for source in self._slices:
            for name, values in source.kept(trained).items():
                for key, value in values.items():
                    if isinstance(value, torch.Tensor):
                        pieces.append((f"{key}/{name}", partial(_itself, value)))
                    else:
                        found.setdefault(name, {})[key] = value
        for (name, key), tensor in whole(pieces, trained, lambda name: self.info(name).shape).items():
            found.setdefault(name, {})[key] = tensor
        return found

    def kept_part(self, part: Part) -> dict[str, Any] | None:
        return part_of(self._slices, part, self.info(part.name).shape)


def _itself(value: Any) -> Any:
    return value


def put_together(pieces: Iterable[CopySource]) -> list[CopySource | SlicedSource]:
    """Copies of stages, each of all of its pieces, in the order in which stages come first.

    Raises:
        CheckpointError: one lacks a piece.
    """
    by_stage: dict[int, list[CopySource]] = {}
    for piece in pieces:
        by_stage.setdefault(piece.header.stage, []).append(piece)
    found: list[CopySource | SlicedSource] = []
    for stage, of_stage in by_stage.items():
        common = next((one for one in of_stage if one.header.piece == COMMON), None)
        if common is None:
            raise CheckpointError(f"Of the copy of stage {stage} there are only slices.")
        slices = [one for one in of_stage if one is not common]
        found.append(SlicedSource(common, slices) if slices or common.header.pieces else common)
    return found


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

    def kept_part(self, part: Part) -> dict[str, Any] | None:
        source = self._of.get(part.name)
        return source.kept_part(part) if isinstance(source, PartSource) else None

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
