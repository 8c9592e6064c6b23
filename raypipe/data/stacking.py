"""Batches of items: stack the items of a dataset by column, or let the user's collate function make the columns.

A collate function gets all samples of a mini-batch, not of a micro-batch, so that its result, such as the length to pad
to, does not depend on the number of micro-batches. Every stage calls it and takes its own columns. A collate function
may draw random numbers: the global generators are seeded by (seed, epoch, first row) before each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from raypipe.data.item_randomness import own_generators, seed_generators
from raypipe.errors import DataError
from raypipe.user_lines import LEAVING, cure_of, quoted, short


def stacked(name: str, column: Any, values: list[Any], rows: Sequence[int]) -> torch.Tensor:
    """Stack the values of one column to a tensor of shape (len(values), ...).

    Args:
        name, column: names of the dataset and the column, for messages.
        rows: indices in the dataset of the items that have these values, for messages.

    Raises:
        DataError: the values have different shapes or types, or cannot become a dense tensor.
    """
    kinds = [_kind(value) for value in values]
    odd = next((index for index, kind in enumerate(kinds) if kind != kinds[0]), None)
    if odd is not None:
        raise DataError(
            f"Item {rows[odd]} of {name} has {kinds[odd]} in column {column!r}, but item {rows[0]} has "
            f"{kinds[0]}, and a batch needs equal ones. Pad, cut or convert the items to one shape and kind, as "
            "collate_fn=raypipe.data.Pad(length) does with lists."
        )
    try:
        tensor = _tensors(name, column, values)
    except (TypeError, ValueError, RuntimeError) as error:  # a number too large, or an unknown byte order
        for row, value in zip(rows, values, strict=True) if len(rows) > 1 else ():
            stacked(name, column, [value], [row])  # which of them it is
        raise DataError(
            f"Column {column!r} of item {rows[0]} of {name} cannot become a tensor: {short(error)} Convert it in the "
            "dataset, to numbers of a type that torch has."
        ) from None
    if not is_plain(tensor):
        raise DataError(
            f"Column {column!r} of {name} holds tensors that are sparse, nested or on the meta device, which no batch "
            "can be cut from. Return dense ones, as to_dense() and Pad make them."
        )
    return tensor


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is dense and in memory, so that it can be split into rows."""
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
            "of items, or leave the column out (remove_columns of datasets, drop_columns of ray.data, to_tuple of "
            "webdataset)."
        )
    return torch.stack(tensors)


def parts_of(item: Any) -> dict[Any, Any]:
    """Split an item or batch into columns: a dict by its keys, a dataclass by its fields, a tuple or list by index.

    Any other value becomes the column 0.
    """
    if isinstance(item, Mapping):
        return dict(item)
    if is_dataclass(item) and not isinstance(item, type):
        return {field.name: getattr(item, field.name) for field in fields(item)}
    return dict(enumerate(item if isinstance(item, tuple | list) else (item,)))


def _kind(value: Any) -> str:
    """Describe a value's shape and type; values are stacked only if their descriptions are equal."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return f"shape {tuple(value.shape)} and type {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, list) and _numbers(value):
        return f"a list of shape {np.asarray(value).shape}"
    return "a number" if isinstance(value, bool | int | float) else f"a {type(value).__name__}"


def _numbers(value: list[Any]) -> bool:
    """Return True for a list of numbers, or of nested lists of equal lengths, as datasets of Hugging Face return."""
    try:
        return np.asarray(value).dtype.kind in "biuf"
    except ValueError:  # ragged within
        return False


def key_of(name: str, columns: Sequence[Any], column: Any) -> Any:
    """Return the key of ``column``, which is one of ``columns`` or an index into ``columns``.

    Raises:
        DataError: the data ``name`` has no such column.
    """
    if column in columns:
        return column
    if isinstance(column, int) and 0 <= column < len(columns):
        return columns[column]
    raise DataError(f"Items of {name} have no column {column!r}. They have {', '.join(map(repr, columns))}.")


Collate = Callable[[list[Any]], Any]
COLLATING = 1 << 40
"""Offset of the row index in the key of a collate function's random numbers, so that the row's own are not repeated."""


def collated(collate: Collate, items: list[Any], rows: Sequence[int], seed: int, epoch: int) -> dict[Any, torch.Tensor]:
    """Call the collate function, with the global random generators seeded by (seed, epoch, first row).

    Args:
        rows: indices of the items in the dataset.

    Returns:
        Tensors of shape (len(items), ...) by column name or index.

    Raises:
        DataError: the function raised, or did not return a batch.
    """
    with own_generators():
        seed_generators(seed, epoch, rows[0] + COLLATING)
        try:
            batch = collate(list(items))
        except LEAVING:
            raise
        except BaseException as error:
            raise DataError(
                f"collate_fn fails for items {rows[0]} and others{quoted(error)}: {short(error)} "
                + cure_of(error, f"It is called with the list of a mini-batch's items, here {len(items)}.")
            ) from error
    columns = {}
    for name, value in parts_of(batch).items():
        tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        if isinstance(tensor, torch.Tensor) and not is_plain(tensor):
            raise DataError(
                f"collate_fn made a tensor that is sparse, nested or on the meta device in column {name!r}, which no "
                "micro-batch can be cut from. Let it return dense ones, as to_dense() and Pad make them."
            )
        if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0 or len(tensor) != len(items):
            what = f"shape {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(value).__name__
            raise DataError(
                f"collate_fn made {what} of {len(items)} items in column {name!r}. Let it return a tensor with one row "
                "for each item in every column, in a dict, a dataclass or a tuple."
            )
        # ids[:, 1:] has gaps between its rows, and torch.export would take their sizes for sizes of the data.
        has_gaps = tensor.stride() != torch.empty_like(tensor, device="meta").stride()
        columns[name] = tensor.contiguous() if has_gaps else tensor
    return columns


def batch_of(
    items: list[Any],
    rows: Sequence[int],
    name: str,
    collate: Collate | None,
    columns: tuple[Any, ...],
    keys: Sequence[Any],
    *,
    seed: int,
    epoch: int = 0,
) -> dict[Any, torch.Tensor]:
    """Create the columns of a batch from items, by the collate function or by stacking.

    Args:
        rows: indices of the items in the dataset.
        name: name of the dataset, for messages.
        collate: function that creates columns from items; None stacks the items.
        columns: columns of item 0, which all items must have; empty if they are not known yet.
        keys: columns to return; empty for all.
        seed, epoch: key of the random numbers that ``collate`` uses.

    Raises:
        DataError: an item, or the batch of the collate function, has other columns.
    """
    if collate is not None:
        batch = collated(collate, items, rows, seed, epoch)
        if any(key not in batch for key in keys):
            raise DataError(
                f"collate_fn made the columns {list(batch)} of items {rows[0]} and others, but of item 0 it made "
                f"{list(columns)}. Let it make the same columns of all items."
            )
        return {key: batch[key] for key in keys or batch}
    parts = [parts_of(item) for item in items]
    for row, item in zip(rows, parts, strict=True) if columns else ():
        if tuple(item) != columns:
            raise DataError(
                f"Item {row} of {name} has the columns {list(item)}, but item 0 has {list(columns)}. Give all items "
                "the same columns."
            )
    return {key: stacked(name, key, [item[key] for item in parts], rows) for key in keys or parts[0]}


def check_range(name: str, num_samples: int, start: int, count: int) -> None:
    """Raise a DataError unless samples start, ..., start + count - 1 of the data ``name`` are in an epoch."""
    if not 0 <= start <= start + count <= num_samples:
        raise DataError(f"Samples {start} to {start + count} of {name} do not exist: an epoch has {num_samples}.")


def by_request(
    columns: Sequence[Any], keys: Sequence[Any], batch: Mapping[Any, torch.Tensor]
) -> tuple[torch.Tensor, ...] | dict[Any, torch.Tensor]:
    """Select ``keys`` of a batch in the form of ``Source.read``: a tuple if ``columns`` are indices, else a dict."""
    if all(isinstance(column, int) for column in columns):
        return tuple(batch[key] for key in keys)
    return {key: batch[key] for key in keys}
