"""Header of a copy, sent as JSON: the table of the tensors in the copy's block of memory, and state that is no tensor.

block    | tensors/layer.weight | optimizer/exp_avg/layer.weight | ... | tensors/count |     large elements first
header   stage, step, updates; the table of the block; options and scalars as in a checkpoint's manifest

If replicas shard their optimizer's state, a copy of a stage has several pieces, each with its own block and header: a
common piece, equal on all replicas, and one piece per replica, with the state of its slices.

piece 0  | tensors/layer.weight | tensors/count |            piece 1  | optimizer/exp_avg@0/layer.weight | ...
         options                                             piece 2  | optimizer/exp_avg@2048/layer.weight | ...
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from raypipe.engine.io.checkpoint.manifest import OptionGroup
from raypipe.engine.io.checkpoint.snapshot import split_name
from raypipe.engine.io.checkpoint.state_source import Fetch, StatePiece, StoredState
from raypipe.engine.io.checkpoint.tensor_file import TensorInfo, parse_json, read_strictly, read_table
from raypipe.errors import CheckpointError

TENSORS, OPTIMIZER = "tensors/", "optimizer/"
"""Prefixes of names in the table: of parameters and buffers, and of optimizer state ("optimizer/key/parameter")."""
COMMON = 0
"""Number of the piece (part of a stage's copy) that is equal on all replicas: all of it without sharded optimizers."""


@dataclass(frozen=True, slots=True)
class CopyHeader:
    """Header of one copy of a stage's state, or of one piece of a copy.

    A copy has several pieces if the replicas of the stage shard their optimizer's state.

    Attributes:
        stage: number of the stage in the plan under which the copy was taken.
        step: number of optimizer steps done.
        updates: number of scheduler steps done.
        size_bytes: size of the block.
        table: tensors in the block, as in a safetensors header.
        groups, scalars: optimizer options and state that is not in tensors; see StageEntry.
        mark: position in the data stream that the stage reads, as fields of raypipe.data.stream.Mark; None if the stage
            reads no stream.
        piece: number of the piece: COMMON, or 1 + replica for the optimizer state that one replica holds.
        pieces: number of pieces of the copy besides COMMON; 0 without sharded optimizer state.
    """

    stage: int
    step: int
    updates: int
    size_bytes: int
    table: Mapping[str, Any]
    groups: tuple[OptionGroup, ...]
    scalars: Mapping[str, Mapping[str, Any]]
    mark: Mapping[str, Any] | None = None
    piece: int = COMMON
    pieces: int = 0

    def infos(self) -> dict[str, TensorInfo]:
        """Return dtype, shape and position in the block of each tensor, by the tensor's name in the table.

        Raises:
            CheckpointError: the table does not describe the block.
        """
        try:
            return read_table(dict(self.table), self.size_bytes)
        except ValueError as error:
            raise CheckpointError(f"The copy of stage {self.stage} at step {self.step} is broken: {error}.") from None

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), allow_nan=False, separators=(",", ":")).encode()

    @staticmethod
    def from_json(data: bytes) -> CopyHeader:
        """Parse a header that ``to_json`` wrote.

        Raises:
            CheckpointError: ``data`` is no such header; names the field.
        """
        what = "The header of a copy"
        header = read_strictly(CopyHeader, parse_json(data, what), what)
        if min(header.stage, header.step, header.updates, header.piece, header.pieces) < 0:
            raise CheckpointError(f"{what} has a count below 0: {header}.")
        header.infos()
        return header


class CopyPiece(NamedTuple):
    """Copy of a stage's state, or one piece of it: the header, and the function that reads its tensors."""

    header: CopyHeader
    fetch: Fetch


def copy_source(copies: Iterable[CopyPiece]) -> StoredState:
    """Join copies of stages into one source of state.

    A tensor that several copies hold is read from the first of them. Tensors read from a copy in this process are views
    of its memory, which a later copy overwrites, so the caller must clone what is to be kept.

    Args:
        copies: all pieces of each stage's copy, in any order.

    Raises:
        CheckpointError: a copy lacks a piece, pieces of one copy are of different steps, or copies with optimizer state
            are of different numbers of updates.
    """
    by_stage: dict[int, list[CopyPiece]] = {}
    for copy in copies:
        by_stage.setdefault(copy.header.stage, []).append(copy)
    titles, pieces, updates = [], [], dict[str, int]()
    for stage, of_stage in by_stage.items():
        common = next((copy.header for copy in of_stage if copy.header.piece == COMMON), None)
        if common is None:
            raise CheckpointError(f"The copy of stage {stage} lacks its common piece.")
        title = f"The copy of stage {stage} after step {common.step}"
        numbers = sorted(copy.header.piece for copy in of_stage)
        if numbers != list(range(common.pieces + 1)):
            raise CheckpointError(
                f"{title} is in {common.pieces} pieces, and those of replicas "
                f"{[number - 1 for number in numbers if number != COMMON]} are here."
            )
        if any((copy.header.step, copy.header.updates) != (common.step, common.updates) for copy in of_stage):
            raise CheckpointError(f"The pieces of {title[0].lower()}{title[1:]} are of different steps.")
        if common.groups:
            updates[title] = common.updates
        titles.append(title)
        pieces += [_piece(copy, title) for copy in of_stage]
    if len(set(updates.values())) > 1:
        counts = ", ".join(f"{title}: {count}" for title, count in updates.items())
        raise CheckpointError(f"Copies after different numbers of updates cannot be joined ({counts}).")
    most = max((copy.header.updates for of_stage in by_stage.values() for copy in of_stage), default=0)
    return StoredState(" and ".join(titles) or "No copy", most, pieces)


def _piece(copy: CopyPiece, title: str) -> StatePiece:
    """Convert a copy to a StatePiece, whose names lack the prefixes in the copy's table; ``title`` is for errors."""
    header, infos = copy.header, copy.header.infos()
    entries = {}
    for stored in infos:
        if stored.startswith(OPTIMIZER):
            key, _, name = stored.removeprefix(OPTIMIZER).partition("/")
            entries[stored] = split_name(f"{key}/{name}") if header.pieces else (key, None, name)
    return StatePiece(
        header.stage, title, {name.removeprefix(TENSORS): name for name in infos if name.startswith(TENSORS)}, entries,
        lambda: infos, copy.fetch, header.groups, header.scalars,
    )  # fmt: skip


def view_of(block: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    """Return a tensor as a view of ``block``, the uint8 memory of a copy, aligned to 8 bytes."""
    return block[info.begin : info.end].view(info.dtype).view(info.shape)


def views_of(block: torch.Tensor) -> Fetch:
    """Return a function that reads tensors of a copy as views of the copy's memory ``block`` in this process."""
    return lambda infos: (view_of(block, info) for info in infos)
