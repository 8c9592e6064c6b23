"""An Arrow column as a numpy array of shape (rows, ...), or the reason why it is none.

    int16                              (rows,)
    fixed_size_list<uint8>[T]          (rows, T)          and so on for nested lists
    list<float> of equal lengths n     (rows, n)
    fixed_shape_tensor<float, (2, 3)>  (rows, 2, 3)

Dense columns without missing values are views of Arrow's own, read-only memory: whoever hands rows
on copies them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raypipe.errors import DataError

__all__ = ["check_type", "dense", "ragged"]


def check_type(name: str, kind: pa.DataType, where: str) -> None:
    """Refuse a column whose type cannot become a tensor, before anything of it is read.

    Raises:
        DataError: names the column, its type, the place, and what to do.
    """
    leaf = kind
    while True:
        if isinstance(leaf, pa.BaseExtensionType):
            leaf = leaf.storage_type
        elif _is_list(leaf):
            leaf = leaf.value_type
        else:
            break
    if pa.types.is_integer(leaf) or pa.types.is_floating(leaf) or pa.types.is_boolean(leaf):
        return
    if pa.types.is_string(leaf) or pa.types.is_large_string(leaf) or pa.types.is_dictionary(leaf):
        cure = "Turn text into numbers first, for example token ids in a fixed_size_list<int32>[T] column"
    else:
        cure = "Cast it to integers, floats or booleans, or to (fixed-size) lists of them"
    raise DataError(f"Column {name!r} of {where} has type {kind}, which cannot become a tensor. {cure}.")


def dense(name: str, column: pa.ChunkedArray, where: str, first_row: int = 0) -> NDArray[Any]:
    """The column's values, shape (rows, ...), with the dtype that Arrow has for them.

    Args:
        where: the file, for messages.
        first_row: of the column in the file.

    Raises:
        DataError: values are missing, or lists differ in length; names the column and what to do.
    """
    array: Any = column.combine_chunks()
    shape = [len(array)]
    while True:
        if array.null_count:
            missing = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
            row = first_row + missing // math.prod(shape[1:])
            raise DataError(
                f"Column {name!r} of {where} has {array.null_count} missing values, the first in row {row}, for which "
                "a tensor has no place. Fill or drop them (pyarrow.compute.fill_null, drop_null) before writing it."
            )
        if isinstance(array, pa.ExtensionArray):
            if isinstance(array.type, pa.FixedShapeTensorType):
                shape += _tensor_shape(name, array.type, where)
                array = array.storage.flatten()
            else:
                array = array.storage
        elif pa.types.is_fixed_size_list(array.type):
            shape.append(array.type.list_size)
            array = array.flatten()
        elif _is_list(array.type):
            shape.append(_common_length(name, array, where, first_row, math.prod(shape[1:])))
            array = array.flatten()
        else:
            # Booleans are bits in Arrow, so they are the one case that cannot be a view.
            return np.asarray(array.to_numpy(zero_copy_only=False)).reshape(shape)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _tensor_shape(name: str, kind: pa.FixedShapeTensorType, where: str) -> list[int]:
    if kind.permutation is not None and list(kind.permutation) != sorted(kind.permutation):
        raise DataError(
            f"Column {name!r} of {where} stores its tensors with permuted dimensions {list(kind.permutation)}. "
            "Write them in row-major order."
        )
    return list(kind.shape)


def _common_length(name: str, array: Any, where: str, first_row: int, per_row: int) -> int:
    lengths = np.diff(np.asarray(array.offsets))
    shortest, longest = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    if shortest != longest:
        row = first_row + int(np.flatnonzero(lengths != lengths[0])[0]) // per_row
        raise DataError(ragged(name, f"{shortest} to {longest} values (row {row} is the first to differ)", where))
    return longest


def ragged(name: object, found: str, where: str) -> str:
    """The sentence for rows that do not stack."""
    return (
        f"Column {name!r} of {where} is ragged: rows hold {found}, and a batch needs equal shapes. "
        "Pad or cut them to one length and store it as fixed_size_list."
    )
