"""The header of a copy: what its block of memory holds, and what of a stage's state is no tensor. It travels as JSON.

block    | tensors/layer.weight | optimizer/exp_avg/layer.weight | ... | tensors/count |     large elements first
header   stage, step, updates; the table of the block; options and scalars as in a checkpoint's manifest
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

__all__ = ["OPTIMIZER", "TENSORS", "CopyHeader"]

TENSORS, OPTIMIZER = "tensors/", "optimizer/"
"""Before the names of parameters and buffers, and before "key/parameter"."""


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
    """

    stage: int
    step: int
    updates: int
    size_bytes: int
    table: Mapping[str, Any]
    groups: tuple[OptionGroup, ...]
    scalars: Mapping[str, Mapping[str, Any]]
    mark: Mapping[str, Any] | None = None

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
        )
        header.infos()
        return header
