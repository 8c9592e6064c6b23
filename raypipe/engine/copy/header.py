"""The header of a copy: what its block of memory holds, and what of a stage's state is no tensor. It travels as JSON.

block    | tensors/layer.weight | optimizer/exp_avg/layer.weight | ... | tensors/count |     large elements first
header   stage, step, updates; the table of the block; options and scalars as in a checkpoint's manifest

Where replicas share out the state of their optimizer, a copy of a stage has several pieces, each with a block and a
header of its own: one that all of them have alike, and one of each of them, with its slices.

piece 0  | tensors/layer.weight | tensors/count |            piece 1  | optimizer/exp_avg@0/layer.weight | ...
         options                                             piece 2  | optimizer/exp_avg@2048/layer.weight | ...
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from raypipe.engine.checkpoint.fields import count, fields, items, mapping
from raypipe.engine.checkpoint.manifest import OptionGroup, parse_group
from raypipe.engine.checkpoint.tensor_table import TensorInfo, read_table
from raypipe.engine.checkpoint.values import parse_json
from raypipe.errors import CheckpointError

__all__ = ["COMMON", "OPTIMIZER", "TENSORS", "CopyHeader"]

TENSORS, OPTIMIZER = "tensors/", "optimizer/"
"""Before the names of parameters and buffers, and before "key/parameter"."""
COMMON = 0
"""The piece that all replicas of a stage have alike: the whole copy, where they share nothing out."""


@dataclass(frozen=True, slots=True)
class CopyHeader:
    """Of one copy.

    Attributes:
        stage: that it was taken of, in the plan of that time.
        step: optimizer steps done.
        updates: that the scheduler has followed.
        size_bytes: of the block.
        table: of the block, as in a safetensors header.
        groups, scalars: see StageEntry.
        mark: where the stream goes on that the stage reads, see raypipe.engine.data.stream; None where it reads none.
        piece: of the stage's copy: COMMON, or 1 and more for the slices of replica 0 and further ones.
        pieces: how many with slices make up a whole copy together with COMMON.
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
        """Where each tensor of the block lies.

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
        """Read what ``to_json`` wrote.

        Raises:
            CheckpointError: it is something else; names the field.
        """
        what = "The header of a copy"
        found = mapping(parse_json(data, what), what)
        fields(found, what, CopyHeader.__slots__)
        header = CopyHeader(
            stage=count(found["stage"], f"{what}, stage"),
            step=count(found["step"], f"{what}, step"),
            updates=count(found["updates"], f"{what}, updates"),
            size_bytes=count(found["size_bytes"], f"{what}, size_bytes"),
            table=mapping(found["table"], f"{what}, table"),
            groups=tuple(parse_group(group, f"{what}, groups") for group in items(found["groups"], f"{what}, groups")),
            scalars={
                name: mapping(values, f"{what}, scalars")
                for name, values in mapping(found["scalars"], f"{what}, scalars").items()
            },
            mark=None if found["mark"] is None else mapping(found["mark"], f"{what}, mark"),
            piece=count(found["piece"], f"{what}, piece"),
            pieces=count(found["pieces"], f"{what}, pieces"),
        )
        header.infos()
        return header
