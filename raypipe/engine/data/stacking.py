"""From items of a dataset to columns: what stacks, and how that is refused which does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from raypipe.engine.user_lines import short
from raypipe.errors import DataError

__all__ = ["is_plain", "key_of", "parts_of", "stacked"]


def stacked(name: str, column: Any, values: list[Any], rows: list[int]) -> torch.Tensor:
    """Values of one column, shape (len(values), ...).

    Args:
        name: of the dataset, for messages.
        rows: numbers of the items, for messages.
    """
    kinds = [_kind(value) for value in values]
    odd = next((at for at, found in enumerate(kinds) if found != kinds[0]), None)
    if odd is not None:
        raise DataError(
            f"Item {rows[odd]} of {name} has {kinds[odd]} in column {column!r}, but item {rows[0]} has "
            f"{kinds[0]}, and a batch needs equal ones. Pad, cut or convert the items to one shape and kind, as "
            "collate_fn=raypipe.data.Pad(length) does with lists."
        )
    try:
        found = _tensors(name, column, values)
    except (TypeError, ValueError, RuntimeError) as error:  # a number too large, or a byte order that torch has not
        for row, value in zip(rows, values, strict=True) if len(rows) > 1 else ():
            stacked(name, column, [value], [row])  # which of them it is
        raise DataError(
            f"Column {column!r} of item {rows[0]} of {name} cannot become a tensor: {short(error)} Convert it in the "
            "dataset, to numbers of a type that torch has."
        ) from None
    if not is_plain(found):
        raise DataError(
            f"Column {column!r} of {name} holds tensors that are sparse, nested or on the meta device, which no batch "
            "can be cut from. Return ordinary ones, as to_dense() and Pad make them."
        )
    return found


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has numbers, and memory that rows can be cut from."""
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def _tensors(name: str, column: Any, values: list[Any]) -> torch.Tensor:
    kind = values[0]
    if isinstance(kind, torch.Tensor):
        tensors = [torch.as_tensor(value) for value in values]
    elif isinstance(kind, bool | int | float):
        return torch.tensor(values)
    elif isinstance(kind, list) and _numbers(kind):
        tensors = [torch.tensor(value) for value in values]
    elif isinstance(kind, np.ndarray | np.generic) and kind.dtype.kind in "biuf":
        tensors = [torch.from_numpy(np.array(value)) for value in values]
    else:
        raise DataError(
            f"Column {column!r} of {name} holds a {type(kind).__name__}, which cannot become a tensor. "
            "Return tensors, numbers or numpy arrays of numbers from __getitem__, give a collate_fn that makes tensors "
            "of items, or leave the column out (remove_columns of datasets, drop_columns of ray.data)."
        )
    return torch.stack(tensors)


def parts_of(item: Any) -> dict[Any, Any]:
    """The parts of an item or batch by column: the keys of a dict, fields of a dataclass, places of a tuple, else 0."""
    if isinstance(item, Mapping):
        return dict(item)
    if is_dataclass(item) and not isinstance(item, type):
        return {field.name: getattr(item, field.name) for field in fields(item)}
    return dict(enumerate(item if isinstance(item, tuple | list) else (item,)))


def _kind(value: Any) -> str:
    """What must be equal for values to stack, in words: numbers of any type do."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return f"shape {tuple(value.shape)} and type {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, list) and _numbers(value):
        return f"a list of shape {np.asarray(value).shape}"
    return "a number" if isinstance(value, bool | int | float) else f"a {type(value).__name__}"


def _numbers(value: list[Any]) -> bool:
    """Whether it is a list of numbers, or lists of them of equal lengths, as datasets of Hugging Face give them."""
    try:
        return np.asarray(value).dtype.kind in "biuf"
    except ValueError:  # ragged within
        return False


def key_of(name: str, columns: Sequence[Any], column: Any) -> Any:
    """The name of a column; a dict's columns also go by number, in the order of its keys.

    Args:
        name: of the data, for messages.

    Raises:
        DataError: there is no such column.
    """
    if column in columns:
        return column
    if isinstance(column, int) and 0 <= column < len(columns):
        return columns[column]
    raise DataError(f"Items of {name} have no column {column!r}. They have {', '.join(map(repr, columns))}.")
