"""What tensors are and where they lie, one after the other in a file or in memory: the table of a safetensors header.

{"layer.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raypipe.engine.checkpoint.dtypes import DTYPES, NAMES
from raypipe.engine.messages.layout import span
from raypipe.errors import CheckpointError

__all__ = ["METADATA", "TensorInfo", "check_storable", "read_table", "table_of"]

METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies, and what it is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.begin + self.size_bytes


def check_storable(name: str, tensor: torch.Tensor) -> None:
    """Refuse what the format cannot hold.

    Raises:
        CheckpointError: names the tensor.
    """
    if tensor.layout is not torch.strided or tensor.dtype not in NAMES or name == METADATA:
        raise CheckpointError(
            f"The tensor {name!r} ({str(tensor.dtype).removeprefix('torch.')}, {tensor.layout}) cannot be saved: a "
            f"checkpoint holds dense tensors of {', '.join(sorted(NAMES.values()))}, under other names than "
            f"{METADATA!r}. Convert it."
        )


def table_of(tensors: Mapping[str, torch.Tensor], begin: int = 0) -> dict[str, Any]:
    """The table of these tensors, in the order in which they lie, as JSON.

    Large elements come first, as the library orders them: then every tensor is aligned to its elements.

    Args:
        begin: where the first of them lies.

    Raises:
        CheckpointError: one of them cannot be stored.
    """
    table = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        tensor = tensors[name]
        check_storable(name, tensor)
        end = begin + tensor.numel() * tensor.dtype.itemsize
        table[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    return table


def read_table(table: Any, size_bytes: int) -> dict[str, TensorInfo]:
    """The tensors of a table, which must fill all of so many bytes.

    Raises:
        ValueError: it is no such table; the message is a reason.
    """
    if not isinstance(table, dict):
        raise ValueError("its header is no object")
    found = {name: _info(name, entry) for name, entry in table.items()}
    at = 0
    for info in sorted(found.values(), key=lambda info: (info.begin, info.size_bytes)):
        if info.begin != at:
            raise ValueError("its tensors overlap or leave gaps")
        at = info.end
    if at != size_bytes:
        raise ValueError(f"its tensors have {size_bytes} bytes, its header describes {at}")
    return found


def _info(name: str, entry: Any) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r} is not described by dtype, shape and offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name!r} has an unknown dtype")
    if not _are_counts(shape) or len(shape) > 64 or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{name!r} has no valid shape and offsets")
    if span(tuple(shape)) * DTYPES[dtype].itemsize >= 1 << 62:
        raise ValueError(f"{name!r} has an impossible shape")
    size_bytes = DTYPES[dtype].itemsize * math.prod(shape)
    if offsets[1] - offsets[0] != size_bytes:
        raise ValueError(f"{name!r} has another number of bytes than its shape")
    return TensorInfo(DTYPES[dtype], tuple(shape), offsets[0], size_bytes)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)
